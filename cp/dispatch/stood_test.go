package dispatch_test

import (
	"testing"
	"time"

	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A runner whose word of its end is not read, since this process stands still, is not taken for one that is silent.
func TestAStandstillIsNoSilence(t *testing.T) {
	const within = 2 * time.Second
	e := newEnv(t, func(d *dispatch.Deps) { d.ConfirmWithin = within }, nil)
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
	over := make(chan struct{})
	go func() { // whenever the wait begins, it stands still in it
		defer close(over)
		for t.Context().Err() == nil {
			e.d.StandStill(time.Minute)
			<-time.After(within / 100)
		}
	}()
	t.Cleanup(func() { <-over })
	rt.Must(t, e.d.Cancel(writer(), id))
	wantOutcome(t, f.wait(t), dispatch.OutcomeCancelled, "cancelled", "the fetch was cancelled")
	rt.Drain(t, w.Sender)
}
