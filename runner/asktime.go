package runner

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A link may last for weeks, in which the clocks of two hosts go apart by seconds: a runner whose clock is ahead by more than an assignment
// is good for drops them all. So it asks for the control plane's time again. Of 5,000 runners some six ask in a second then, each at
// another time, where 330 heartbeats come.
const (
	askEvery      = 20 * time.Minute // or after half of that; clockDrift makes 240 ms of it at most
	askImprecise  = 4 * time.Minute  // likewise, where the clock may be wrong by more than mostImprecise
	mostImprecise = 500 * time.Millisecond
	restAsking    = 10 * time.Second // between what doubt asks for
	mostLeap      = 500 * time.Millisecond
)

// askAgain is after how long the control plane is asked for its time again, where this host's idea of it may be wrong by bound.
func askAgain(bound time.Duration) time.Duration {
	most := askEvery
	if bound > mostImprecise {
		most = askImprecise
	}
	return most/2 + rand.N(most/2) //nolint:gosec // spreads load, keeps no secret
}

// keepTime asks for the control plane's time now and then, and soon when somebody doubts the clock, until ctx ends. An answer that does not
// come is made good by the next one, or by the next hello.
func (a *Agent) keepTime(ctx context.Context) error { return a.askInTime(ctx, a.askTime) }

func (a *Agent) askInTime(ctx context.Context, ask func(context.Context) error) error {
	again := time.NewTimer(a.again(a.clock.bound(time.Now())))
	defer again.Stop()
	rest := time.NewTimer(0)
	rest.Stop() // until something was asked for
	defer rest.Stop()
	doubt := a.doubt // nil while rest runs
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-rest.C:
			doubt = a.doubt
			continue
		case <-doubt:
			doubt = nil
			rest.Reset(restAsking)
		case <-again.C:
		}
		if err := ask(ctx); err != nil && ctx.Err() == nil {
			a.log.Info("the control plane did not tell its time", "error", err)
		}
		again.Reset(a.again(a.clock.bound(time.Now())))
	}
}

// askTime asks the control plane for its time once, and sets the clock by the answer. It asks by a probe, which every control plane
// answers with its time, if only by a refusal, and which changes nothing: another hello would take an id back that an admin has released.
func (a *Agent) askTime(ctx context.Context) error {
	if a.session.Load() == nil || !a.conn.NATS().IsConnected() {
		return nil // the hello to come brings it
	}
	ctx, cancel := context.WithTimeout(ctx, a.waits.hello)
	defer cancel()
	if l := a.link.Load(); l != nil { // no answer comes over another link
		defer context.AfterFunc(l, cancel)()
	}
	h := &runbusv1.RunnerHello{
		RunnerId: a.ref.Runner, Name: a.cfg.Name, Version: a.cfg.Version, ProcessNonce: a.nonce, Pid: a.pid(), Probe: true,
	}
	if err := a.cred.sign(a.ref, h); err != nil {
		return err
	}
	sent := time.Now()
	answer := new(runbusv1.EnrollmentAccepted)
	if err := a.conn.Request(ctx, schemas.HelloSubject(a.ref), h, answer); err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	if at := answer.GetServerTime(); at != nil {
		a.clock.adjust(at.AsTime(), sent, time.Now())
	}
	return nil
}

// hostClocks is the time of this host's wall clock alone, and uptime, both now.
func hostClocks() (wall time.Time, up time.Duration) {
	now := time.Now()
	return now.Round(0), now.Sub(processStart)
}

// leaps notices that this host slept: its monotonic clock, which the clock goes by, stood still then, and its wall clock
// went on. It can't be told from a wall clock that was set, which asks for nothing worse than a question. One goroutine at a time uses it.
type leaps struct {
	seen bool
	wall time.Time     // then
	up   time.Duration // likewise: uptime
}

// next is how far the wall clock has gone ahead of the monotonic one since the call before; 0 in the first.
func (l *leaps) next(wall time.Time, up time.Duration) time.Duration {
	leap := wall.Sub(l.wall) - (up - l.up)
	if !l.seen {
		leap = 0
	}
	*l = leaps{true, wall, up}
	return leap
}
