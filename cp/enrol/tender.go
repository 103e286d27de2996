package enrol

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
)

const (
	// steady is how long a link must have lasted for its end to be no failure.
	steady = 5 * time.Second
	// eager is how long after the end of a link the pauses between attempts don't grow: more than the grace that the works on the runner
	// have (SPEC D13). As long as they may be waited for, a link that can be had again is not waited for.
	eager = 20 * time.Second
	// lookAgain is how often who waits for its turn looks whether it has come.
	lookAgain = beaconEvery
)

// tender is the task of one runner: it dials when it is this replica's turn, and keeps what came of it.
type tender struct {
	d                 *Dialler
	id                string
	log               *slog.Logger
	wake, now, redial chan struct{} // of size 1: something has changed; dial at once; dial beside the link

	revoked context.Context //nolint:containedctx // ends when the runner is revoked or removed
	revoke  context.CancelFunc

	mu       sync.Mutex
	state    LinkState
	dialling bool // now
	another  bool // a link beside the present one was asked for, and is neither there nor given up yet

	// Of run alone.
	ref      schemas.RunnerRef // as it was last known
	link     *spliced
	lost     time.Time // when the last link had ended
	failures int
	moving   bool // the runner has another address than its link
}

func newTender(d *Dialler, id string) *tender {
	t := &tender{
		d: d, id: id, log: d.d.Log.With("runner", id),
		wake: make(chan struct{}, 1), now: make(chan struct{}, 1), redial: make(chan struct{}, 1),
	}
	t.revoked, t.revoke = context.WithCancel(context.Background())
	return t
}

func (t *tender) snapshot() LinkState {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state
}

func (t *tender) set(change func(*LinkState)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	change(&t.state)
}

// settled reports whether there is a link, and no other one is made or was asked for.
func (t *tender) settled() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state.Connected && !t.dialling && !t.another
}

// askAnother asks for a link beside the present one, if there is one.
func (t *tender) askAnother() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state.Connected {
		t.another = true
		signal(t.redial)
	}
}

// begun takes note that a dial begins, and returns what to call at its end. asked: it is the link that askAnother asked for, or in its place.
func (t *tender) begun(asked bool) (ended func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.dialling = true
	if asked {
		t.another = false
		select {
		case <-t.redial:
		default:
		}
	}
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.dialling = false
	}
}

// run tends the runner until it is revoked or removed, or ctx ends.
func (t *tender) run(ctx context.Context) {
	defer t.revoke()
	defer t.drop()
	for ctx.Err() == nil {
		r, known, err := t.d.d.Roster.ByID(t.id)
		if known {
			t.ref = r.Ref()
		}
		switch {
		case err != nil: // the links stand while the registry can't be read
			t.pause(ctx, lookAgain)
		case !known, r.State == roster.Revoked:
			t.farewell(ctx)
			return
		case t.link != nil:
			t.keep(ctx, r)
		default:
			t.seek(ctx, r)
		}
	}
}

// keep waits for what ends or changes the link.
func (t *tender) keep(ctx context.Context, r roster.Runner) {
	if r.Pinned(t.link.fingerprint) == nil {
		t.log.Info("the certificate of the link is not valid any more: it is made anew")
		t.drop()
		return
	}
	select {
	case <-t.link.ended:
		t.hasEnded(ctx, r)
		return
	default:
	}
	if t.link.address != r.Address {
		t.move(ctx, r)
		return
	}
	if t.moving { // back to where the link is
		t.moving, t.failures = false, 0
		t.set(func(s *LinkState) { s.LastError, s.NextTry = "", nil })
	}
	select {
	case <-ctx.Done():
	case <-t.wake:
	case <-t.now: // it is connected
	case <-t.redial:
		t.renewed(ctx, r)
	case <-t.link.ended:
		t.hasEnded(ctx, r)
	}
}

// renewed makes a second link to where the first one is, for the renewed certificate.
func (t *tender) renewed(ctx context.Context, r roster.Runner) {
	r.Address = t.link.address
	if err := t.dial(ctx, r, true); err != nil && !t.over(ctx) {
		t.log.Warn("a second link, for the renewed certificate, did not come about", "error", err)
		t.set(func(s *LinkState) { s.LastError = err.Error() })
	}
}

// hasEnded takes note of the end of the link.
func (t *tender) hasEnded(ctx context.Context, r roster.Runner) {
	t.lost = t.d.d.Now()
	lasted := t.lost.Sub(t.link.since)
	t.drop()
	if lasted < steady {
		t.failures++
		t.wait(ctx, r, errors.New("the link ended as soon as it was made: the runner's log says why"))
	}
}

// move makes a link to the address that the runner has now. The one to the address that it had goes on until then: a wrong address
// costs no work.
func (t *tender) move(ctx context.Context, r roster.Runner) {
	if !t.moving {
		t.moving, t.failures = true, 0
		t.log.Info("the address was changed: the link is made anew", "from", t.link.address, "to", r.Address)
	}
	select {
	case <-t.redial: // comes first: the certificate of the link that goes on may end
		t.renewed(ctx, r)
		return
	default:
	}
	err := t.dial(ctx, r, false)
	if t.over(ctx) {
		return
	}
	if err != nil {
		t.failures++
		t.wait(ctx, r, err)
	}
}

// over reports whether nothing more is to be made of an attempt: the runner is revoked, or ctx has ended.
func (t *tender) over(ctx context.Context) bool { return ctx.Err() != nil || t.revoked.Err() != nil }

// drop ends the link, if there is one, and waits until it has ended.
func (t *tender) drop() {
	if t.link == nil {
		return
	}
	t.link.end()
	<-t.link.ended
	t.link = nil
	t.set(func(s *LinkState) { s.Connected, s.Since, s.PeerAddr = false, nil, "" })
}

// seek dials if it is this replica's turn.
func (t *tender) seek(ctx context.Context, r roster.Runner) {
	if r.Address == "" || !t.d.mine(t.id) {
		t.set(func(s *LinkState) { s.LastError, s.NextTry = "", nil })
		t.pause(ctx, lookAgain)
		return
	}
	err := t.dial(ctx, r, true)
	if t.over(ctx) {
		return
	}
	if err != nil {
		t.failures++
		t.wait(ctx, r, err)
		return
	}
	t.failures = 0
	t.set(func(s *LinkState) { s.LastError, s.NextTry = "", nil })
}

// wait logs a failure and waits for the next attempt, or until somebody asks for one, or what is known of the runner has changed.
func (t *tender) wait(ctx context.Context, r roster.Runner, why error) {
	now := t.d.d.Now()
	pause := t.d.retryDelay(t.paced(now))
	next := now.Add(pause)
	t.set(func(s *LinkState) { s.LastError, s.NextTry = why.Error(), &next })
	kv := []any{"address", r.Address, "error", why, "in", pause}
	var refused *HandshakeError
	if errors.As(why, &refused) {
		t.log.Warn("the link was refused: "+refused.Text, append(kv, "reason", refused.Reason)...)
	} else {
		t.log.Info("the runner can't be linked; trying again", kv...)
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	var ended, redial chan struct{} // of the link beside which it is tried
	if t.link != nil {
		ended, redial = t.link.ended, t.redial
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			return
		case <-ended:
			return
		case <-redial:
			signal(t.redial) // who comes next sees to it
			return
		case <-t.now:
			return
		case <-t.wake:
			if now, known, err := t.d.d.Roster.ByID(t.id); err == nil && (!known || !sameTarget(r, now)) {
				t.failures = 0
				return
			}
		}
	}
}

// paced is the number of failures that the pause before the next attempt is reckoned by.
func (t *tender) paced(now time.Time) int {
	if now.Sub(t.lost) < eager {
		return 1
	}
	return t.failures
}

// sameTarget reports whether a failed attempt says something about the next one.
func sameTarget(a, b roster.Runner) bool {
	fingerprint := func(l *roster.Leaf) string {
		if l == nil {
			return ""
		}
		return l.Fingerprint
	}
	return a.Address == b.Address && a.State == b.State &&
		fingerprint(a.Current) == fingerprint(b.Current) && fingerprint(a.Next) == fingerprint(b.Next)
}

// pause waits, at most that long, for a change.
func (t *tender) pause(ctx context.Context, most time.Duration) {
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-t.now:
	case <-t.wake:
	}
}

// dial makes one connection to the runner and what it is for: an enrolment, or the link, which lasts until life ends. A revocation ends the
// attempt: who has a link is to be told at once. asked: see begun.
func (t *tender) dial(life context.Context, r roster.Runner, asked bool) error {
	defer t.begun(asked)()
	select {
	case <-t.now: // was asked for, and is what happens
	default:
	}
	ctx, cancel := context.WithCancel(life)
	defer cancel()
	defer context.AfterFunc(t.revoked, cancel)()
	d := t.d.d
	protos, err := Protocols(r, d.Now())
	if err != nil {
		return err
	}
	config, err := d.CA.ClientTLS(protos...)
	if err != nil {
		return err
	}
	conn, fingerprint, err := t.shake(ctx, r, config)
	if err != nil {
		t.log.Debug("the runner was not reached", "error", err)
		return explainDial(err, r.Address)
	}
	if conn.ConnectionState().NegotiatedProtocol == link.ProtoEnrol {
		defer func() { _ = conn.Close() }()
		return d.Exchange(ctx, conn, config, r)
	}
	if err := t.handOver(ctx, r.Ref()); err != nil {
		_ = conn.Close() // nothing was said on it
		return err
	}
	if err := t.offer(life, conn, r, fingerprint); err != nil {
		_ = conn.Close() // the error that counts is err
		return err
	}
	return nil
}

// shake connects and shakes hands. It returns the fingerprint of the runner's leaf for a link.
func (t *tender) shake(ctx context.Context, r roster.Runner, config *tls.Config) (conn *tls.Conn, fingerprint string, err error) {
	d := t.d.d
	config.VerifyConnection = func(cs tls.ConnectionState) (err error) {
		switch cs.NegotiatedProtocol {
		case link.ProtoLink:
			fingerprint, err = verifyLeaf(cs, d.CA.cert, r, d.Now())
			return err
		case link.ProtoEnrol:
			return nil // Exchange judges
		}
		return refuse(ReasonProtocol, "what listens at %s is no runner: it speaks neither %s nor %s", r.Address, link.ProtoEnrol, link.ProtoLink)
	}
	raw, err := (&net.Dialer{Timeout: d.DialWithin, ControlContext: ruled(d.Rules)}).DialContext(ctx, "tcp", r.Address)
	if err != nil {
		return nil, "", err
	}
	if err := link.SetUserTimeout(raw, link.UserTimeout); err != nil {
		_ = raw.Close()
		return nil, "", err
	}
	conn = tls.Client(raw, config)
	shaking, cancel := context.WithTimeout(ctx, d.DialWithin)
	defer cancel()
	if err := conn.HandshakeContext(shaking); err != nil {
		_ = raw.Close()
		return nil, "", err
	}
	return conn, fingerprint, nil
}
