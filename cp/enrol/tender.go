package enrol

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	// steady is how long a link must have lasted for its end to be no failure.
	steady = 5 * time.Second
	// answerWithin is how long a runner has to answer a preface: it may ask its present link for 2 s first.
	answerWithin = 5 * time.Second
	// giveUpWithin is how long a link that was replaced may last on: the runner ends it as soon as it has the new one.
	giveUpWithin = 10 * time.Second
	// handOverWithin is how long work waits for the link that takes the place of another, and acceptedBy how long before that work that
	// was sent has to be accepted over the old one.
	handOverWithin = 3 * time.Second
	acceptedBy     = 100 * time.Millisecond
	// farewellWithin bounds the goodbye to a revoked runner (SPEC C9).
	farewellWithin = 2 * time.Second
	// eager is how long after the end of a link the pauses between attempts don't grow: more than the grace that the works on the runner
	// have (SPEC D13). As long as they may be waited for, a link that can be had again is not waited for.
	eager = 20 * time.Second
	// lookAgain is how often who waits for its turn looks whether it has come.
	lookAgain = beaconEvery
	// askHealthEvery is how often a linked runner is asked how it is (SPEC C10).
	askHealthEvery = 15 * time.Second
)

// tender is the task of one runner: it dials when it is this replica's turn, and keeps what came of it.
type tender struct {
	d                 *Dialler
	id                string
	log               *slog.Logger
	wake, now, redial chan struct{} // of size 1: something has changed; dial at once; dial beside the link

	mu    sync.Mutex
	state LinkState

	// Of run alone.
	link     *spliced
	lost     time.Time // when the last link had ended
	failures int
	moving   bool // the runner has another address than its link
}

// spliced is one link in use.
type spliced struct {
	conn        net.Conn
	address     string // as it was dialled
	fingerprint string
	since       time.Time
	end         context.CancelFunc
	ended       chan struct{}
}

func newTender(d *Dialler, id string) *tender {
	return &tender{
		d: d, id: id, log: d.d.Log.With("runner", id),
		wake: make(chan struct{}, 1), now: make(chan struct{}, 1), redial: make(chan struct{}, 1),
	}
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

// run tends the runner until it is revoked or removed, or ctx ends.
func (t *tender) run(ctx context.Context) {
	defer t.drop()
	for ctx.Err() == nil {
		r, known, err := t.d.d.Roster.ByID(t.id)
		switch {
		case err != nil: // the links stand while the registry can't be read
			t.pause(ctx, lookAgain)
		case !known, r.State == roster.Revoked:
			t.farewell(ctx, r)
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
	if err := t.dial(ctx, r); err != nil && ctx.Err() == nil {
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
	err := t.dial(ctx, r)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		t.failures++
		t.wait(ctx, r, err)
	}
}

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
	err := t.dial(ctx, r)
	if ctx.Err() != nil {
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

// dial makes one connection to the runner and what it is for: an enrolment, or the link.
func (t *tender) dial(ctx context.Context, r roster.Runner) error {
	select {
	case <-t.now: // was asked for, and is what happens
	default:
	}
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
	if err := t.offer(ctx, conn, r, fingerprint); err != nil {
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

// offer has the runner take the link, and splices it into this replica's server. A leaf that was NEXT is the runner's from here on
// (SPEC C8): the handshake was fresh, and the runner has taken the link.
func (t *tender) offer(ctx context.Context, conn *tls.Conn, r roster.Runner, fingerprint string) error {
	d := t.d.d
	now := d.Now()
	token, err := d.Tokens.Sign(auth.LinkIdentity{Ref: r.Ref(), Fingerprint: fingerprint}, d.ServerID, now)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	t.handOver(ctx, r.Ref())
	if err := link.Offer(conn, time.Now().Add(answerWithin), &runbusv1.LinkPreface{
		RunnerId: r.ID, Tenant: r.Tenant, ServerId: d.ServerID, Token: token, ServerTime: timestamppb.New(now), Replica: d.Replica,
	}); err != nil {
		return explainAnswer(err)
	}
	server, err := d.Server()
	if err != nil {
		return err
	}
	t.adopt(ctx, conn, server, &spliced{conn: conn, address: r.Address, fingerprint: fingerprint, since: now}, r.Ref())
	if r.Next != nil && r.Next.Fingerprint == fingerprint { // after the splice: the runner waits for its server
		if _, err := d.Roster.Promote(ctx, r.ID, fingerprint); err != nil {
			t.log.Warn("the renewed certificate was not promoted; trying again", "error", err)
			return nil // it is valid as the next one, and the renewal that is still due has it promoted
		}
		t.log.Info("the renewed certificate is in use: the one before is refused from now on", "fingerprint", fingerprint, "until", r.Next.NotAfter)
	}
	return nil
}

// handOver holds work back while a second link takes the place of the first, and lets what is under way be accepted on the first.
func (t *tender) handOver(ctx context.Context, ref schemas.RunnerRef) {
	if t.link == nil || t.d.d.Handover == nil {
		return
	}
	t.d.d.Handover(ref, handOverWithin)
	timer := time.NewTimer(acceptedBy)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// explainAnswer says what an unanswered preface means.
func explainAnswer(err error) error {
	var said *schemas.Error
	if errors.As(err, &said) {
		return said
	}
	return refuse(ReasonRefused, "the runner shook hands and did not take the link: %v", err)
}

// adopt makes l the link in use. The one before is the runner's to end; it is ended here when it does not.
func (t *tender) adopt(ctx context.Context, conn, server net.Conn, l *spliced, ref schemas.RunnerRef) {
	old := t.link
	ctx, l.end = context.WithCancel(ctx)
	l.ended = make(chan struct{})
	peer := conn.RemoteAddr().String()
	t.log.Info("linked", "peer", peer, "tenant", ref.Tenant)
	go func() {
		defer close(l.ended)
		var beside sync.WaitGroup
		beside.Go(func() { t.d.keepLease(ctx, t.id, l.since) })
		beside.Go(func() { t.askHealth(ctx, ref) })
		if old != nil {
			beside.Go(func() { t.giveUp(ctx, old) })
		}
		err := link.Splice(ctx, conn, server)
		switch {
		case err == nil, errors.Is(err, context.Canceled): // in good order: closed by the runner, or here
			t.log.Info("the link was closed", "peer", peer)
		default:
			t.log.Info("the link has ended", "peer", peer, "error", err)
		}
		l.end()
		beside.Wait()
	}()
	t.link = l
	t.set(func(s *LinkState) {
		s.Connected, s.Since, s.PeerAddr, s.LastError, s.NextTry = true, &l.since, peer, "", nil
	})
}

// giveUp waits for the end of a link that was replaced, at most until the end of the one that replaced it, which is ctx's.
func (t *tender) giveUp(ctx context.Context, old *spliced) {
	timer := time.NewTimer(giveUpWithin)
	defer timer.Stop()
	select {
	case <-old.ended:
		return
	case <-timer.C:
	case <-ctx.Done():
	}
	old.end()
	<-old.ended
}

// askHealth polls what the runner says of itself. It never touches a source.
func (t *tender) askHealth(ctx context.Context, ref schemas.RunnerRef) {
	tick := time.NewTicker(askHealthEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		asked, cancel := context.WithTimeout(ctx, askHealthEvery/3)
		reply, err := t.d.d.Order(asked, ref, &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Health{Health: &runbusv1.HealthOrder{}}})
		cancel()
		if err != nil || reply.GetHealth() == nil {
			t.log.Debug("the runner did not say how it is", "error", err)
			continue
		}
		at := t.d.d.Now()
		t.set(func(s *LinkState) { s.Health, s.HealthAt = reply.GetHealth(), &at })
	}
}

// farewell tells a revoked runner so, as well as that can be done, and ends its link.
func (t *tender) farewell(ctx context.Context, r roster.Runner) {
	if t.link == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, farewellWithin)
	defer cancel()
	_, err := t.d.d.Order(ctx, r.Ref(), &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Goodbye{
		Goodbye: &runbusv1.GoodbyeOrder{Reason: "REVOKED: this runner was revoked", Revoked: true},
	}})
	if err != nil {
		t.log.Warn("the runner was not told that it is revoked", "error", err)
	}
	// What ends the link is the runner: it writes down that it is revoked, and goes.
	select {
	case <-t.link.ended:
	case <-ctx.Done():
	}
	t.drop()
}
