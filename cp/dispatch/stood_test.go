package dispatch_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// standStill has it seem that the process stands still all the time, until the test ends.
func (e *env) standStill(t *testing.T) {
	over := make(chan struct{})
	go func() { // whenever a wait begins, it stands still in it
		defer close(over)
		for t.Context().Err() == nil {
			e.d.StandStill(time.Minute)
			<-time.After(10 * time.Millisecond)
		}
	}()
	t.Cleanup(func() { <-over })
}

// A process that is late all the time gives up a silent runner all the same: nothing of it, nor its end, would ever come otherwise.
func TestStandstillsHaveAnEnd(t *testing.T) {
	e := newEnv(t, func(d *dispatch.Deps) { d.ConfirmWithin = 100 * time.Millisecond }, nil)
	e.d.Spare(time.Second)
	e.standStill(t)

	f := e.start(t, request("edge-1"))
	e.accept(t)
	rt.Must(t, e.d.Cancel(writer(), rt.Wait(t, "accepted", f.sink.accepted).DispatchID))
	wantOutcome(t, f.wait(t), dispatch.OutcomeUnknown, "outcome_unknown", "")

	e = newEnv(t, func(d *dispatch.Deps) { d.AcceptWithin, d.ConfirmWithin = 100*time.Millisecond, 100*time.Millisecond }, nil)
	e.d.Spare(time.Second)
	e.standStill(t)
	f = e.start(t, request("edge-1"))
	e.runner.Assignment(t)
	wantOutcome(t, f.wait(t), dispatch.OutcomeUnknown, "outcome_unknown", "")
}

// A standstill just before the assignment goes out, when the time for its acceptance runs already, counts as well.
func TestAStandstillBeforeTheAssignmentCounts(t *testing.T) {
	const within = time.Second
	var stand atomic.Pointer[dispatch.Dispatcher]
	e := newEnv(t, func(d *dispatch.Deps) {
		d.AcceptWithin = within
		now := d.Now
		d.Now = func() time.Time { // each time that it is asked the time it stands still after it
			at := now()
			if d := stand.Load(); d != nil {
				d.StandStill(time.Minute)
			}
			return at
		}
	}, nil)
	e.d.Spare(rt.Patience)
	stand.Store(e.d)
	f := e.start(t, request("edge-1"))
	w := e.take(t)
	<-time.After(within + within/2)
	rt.Send(t, w.Sender, &runbusv1.RunnerWorkAccepted{Pid: 4711})
	rt.Wait(t, "accepted", f.sink.accepted)
	w.complete()
	wantOutcome(t, f.wait(t), dispatch.OutcomeCompleted, "", "")
}

// A runner whose word of its end is not read, since this process stands still, is not taken for one that is silent.
func TestAStandstillIsNoSilence(t *testing.T) {
	const within = 2 * time.Second
	e := newEnv(t, func(d *dispatch.Deps) { d.ConfirmWithin = within }, nil)
	e.d.Spare(rt.Patience)
	f := e.start(t, request("edge-1"))
	w := e.accept(t)
	id := rt.Wait(t, "accepted", f.sink.accepted).DispatchID
	e.runner.OnCancel(func(c *runbusv1.CancelOrder) runbusv1.CancelState {
		go func() {
			<-time.After(within + within/4)
			w.fail(true, c.GetCode(), "stopped")
		}()
		return stopping
	})
	e.standStill(t)
	rt.Must(t, e.d.Cancel(writer(), id))
	wantOutcome(t, f.wait(t), dispatch.OutcomeCancelled, "cancelled", "the fetch was cancelled")
	rt.Drain(t, w.Sender)
}
