package runner

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// asking has a runner ask for the time again after what is sent, each at the time when it has to decide: at its start, and when it has taken an
// answer.
func asking(t *testing.T) (again chan<- time.Duration, seam func(*Agent)) {
	ch := make(chan time.Duration)
	return ch, func(a *Agent) {
		a.again = func(time.Duration) time.Duration {
			select {
			case d := <-ch:
				return d
			case <-t.Context().Done():
				return time.Hour
			}
		}
	}
}

// probed waits for a probe.
func (c *controlPlane) probed(t *testing.T) {
	t.Helper()
	h := receive(t, c.hellos, "hello, or a probe")
	for !h.GetProbe() {
		h = receive(t, c.hellos, "probe after the hello")
	}
	if h.GetRunnerId() != edge.Runner || len(h.GetSealingKey()) != 0 {
		t.Errorf("probe %v", h)
	}
}

// set sets the clock of the control plane.
func (c *controlPlane) set(ahead time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ahead = ahead
}

// A link lasts for longer than two clocks go together: the control plane is asked for its time again. A refusal has it as well, and ends nothing.
func TestTheTimeIsAskedForAgain(t *testing.T) {
	for name, refusal := range map[string]error{"answered": nil, "refused": schemas.ErrRunnerBound(edge.Runner)} {
		t.Run(name, func(t *testing.T) {
			g := newGate()
			close(g.open)
			cp := newControlPlane(t)
			again, seam := asking(t)
			p := cp.start(t, nil, func(a *Agent) { seam(a); playing(g.fetch)(a) })
			cp.set(-time.Hour)
			cp.answerWith(func(h *runbusv1.RunnerHello) *runbusv1.EnrollmentAccepted {
				answer := cp.accept(h)
				if refusal != nil {
					answer.Session, answer.Error, answer.Fatal = "", schemas.ToDetail(refusal), true
				}
				return answer
			})
			again <- 0
			cp.probed(t)
			again <- time.Hour
			p.assign(nil).completes()
			none(t, p.ended, "end of the runner")
			none(t, p.enrolled, "enrolment by a probe")
		})
	}
}

// A runner that drops an assignment as late may be wrong itself, because the control plane's clock was set back: it asks, and runs the next.
func TestALateAssignmentBringsDoubt(t *testing.T) {
	g := newGate()
	close(g.open)
	cp := newControlPlane(t)
	again, seam := asking(t)
	p := cp.start(t, nil, func(a *Agent) { seam(a); playing(g.fetch)(a) })
	again <- time.Hour
	cp.set(-time.Hour)
	dropped := p.assign(nil)
	cp.probed(t)
	again <- time.Hour
	p.assign(nil).completes()
	if state := p.cancel(dropped.id, schemas.CodeCancelled); state != runbusv1.CancelState_CANCEL_STATE_NEVER_STARTED {
		t.Errorf("what was dropped is %s", state)
	}
}

// Whoever has doubts all the time does not ask all the time; none of them is forgotten.
func TestDoubtsRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &Agent{doubt: make(chan struct{}, 1), again: askAgain, log: slog.New(slog.DiscardHandler)}
		began := time.Now()
		asked := make(chan time.Duration)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() {
			ended <- a.askInTime(ctx, func(context.Context) error { asked <- time.Since(began); return errors.New("no answer") })
		}()
		for i := range 5 {
			a.doubt <- struct{}{} // room is there when the one before was taken
			if at := <-asked; at != time.Duration(i)*restAsking {
				t.Errorf("the question %d comes after %s", i, at)
			}
		}
		for range 3 { // without any
			before := time.Since(began)
			if at := <-asked; at < before+askEvery/2 || at > before+askEvery {
				t.Errorf("asked after %s, before that at %s", at, before)
			}
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// The monotonic clock of a host that sleeps stands still, and the link may outlive a short sleep: the runner notices it.
func TestASleepBringsDoubt(t *testing.T) {
	var slept atomic.Int64
	cp := newControlPlane(t)
	cp.answerWith(func(h *runbusv1.RunnerHello) *runbusv1.EnrollmentAccepted {
		a := cp.accept(h)
		a.HeartbeatIntervalSeconds = 1
		return a
	})
	cp.start(t, nil, func(a *Agent) {
		a.clocks = func() (time.Time, time.Duration) {
			wall, up := hostClocks()
			return wall.Add(time.Duration(slept.Load())), up
		}
	})
	receive(t, cp.hellos, "hello")
	receive(t, cp.beats, "heartbeat in its time") // since when sleep is looked for
	slept.Store(int64(time.Minute))
	if h := receive(t, cp.hellos, "probe after a sleep"); !h.GetProbe() {
		t.Errorf("%v instead of a probe", h)
	}
}

func TestLeaps(t *testing.T) {
	var l leaps
	start := time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)
	for i, c := range []struct{ wall, up, want time.Duration }{
		{0, 7 * time.Second, 0}, // the first one
		{15 * time.Second, 22 * time.Second, 0},
		{33 * time.Second, 37 * time.Second, 3 * time.Second}, // asleep for three of them
		{48 * time.Second, 52 * time.Second, 0},
		{-3537 * time.Second, 67 * time.Second, -time.Hour}, // set back
		{-3522 * time.Second, 82 * time.Second, 0},
	} {
		if got := l.next(start.Add(c.wall), c.up); got != c.want {
			t.Errorf("%d: %s, want %s", i, got, c.want)
		}
	}
}

// Many runners don't ask in step, and one whose clock may be wrong by much asks sooner.
func TestAskAgain(t *testing.T) {
	for bound, most := range map[time.Duration]time.Duration{0: askEvery, mostImprecise: askEvery, mostImprecise + 1: askImprecise, time.Hour: askImprecise} {
		low, high := most, time.Duration(0)
		for range 1000 {
			d := askAgain(bound)
			low, high = min(low, d), max(high, d)
		}
		if low < most/2 || high > most || high-low < most/4 {
			t.Errorf("wrong by %s: asked again after %s to %s", bound, low, high)
		}
	}
}
