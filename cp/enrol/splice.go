package enrol

import (
	"context"
	"crypto/tls"
	"errors"
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
	// askHealthEvery is how often a linked runner is asked how it is (SPEC C10).
	askHealthEvery = 15 * time.Second
)

// spliced is one link in use.
type spliced struct {
	conn        net.Conn
	address     string // as it was dialled
	fingerprint string
	since       time.Time
	end         context.CancelFunc
	ended       chan struct{}
}

// offer has the runner take the link, and splices it into this replica's server. A runner that has another link and is revoked before it
// answers is to be told over that at once, so that the offer ends then. A leaf that was NEXT is the runner's from here on
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
	undisturbed := func() bool { return true }
	if t.link != nil {
		undisturbed = context.AfterFunc(t.revoked, func() { _ = conn.Close() })
		defer undisturbed()
	}
	if err := link.Offer(conn, time.Now().Add(answerWithin), &runbusv1.LinkPreface{
		RunnerId: r.ID, Tenant: r.Tenant, ServerId: d.ServerID, Token: token, ServerTime: timestamppb.New(now), Replica: d.Replica,
	}); err != nil {
		return explainAnswer(err)
	}
	if !undisturbed() {
		return t.revoked.Err()
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

// handOver holds work back while a second link takes the place of the first, and lets what is under way be accepted on the first. An
// error is that of ctx.
func (t *tender) handOver(ctx context.Context, ref schemas.RunnerRef) error {
	if t.link == nil || t.d.d.Handover == nil {
		return ctx.Err()
	}
	t.d.d.Handover(ref, handOverWithin)
	timer := time.NewTimer(acceptedBy)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
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
func (t *tender) farewell(ctx context.Context) {
	if t.link == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, farewellWithin)
	defer cancel()
	_, err := t.d.d.Order(ctx, t.ref, &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Goodbye{
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
