package dispatch_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
)

// A fetch on `console` has the managed runner up first, and keeps it up; one that can't be says why, in the words of D11.
func TestTheManagedRunnerIsRaised(t *testing.T) {
	const unreachable = "Analysis failed: dedicated runner unreachable — fetch does not run on the control plane: "
	asked, released := make(chan string, 8), make(chan struct{}, 8)
	answer := func(context.Context) error { return nil }
	e := newEnv(t, func(d *dispatch.Deps) {
		d.Managed = func(ctx context.Context, tenant string) (func(), error) {
			asked <- tenant
			if err := answer(ctx); err != nil {
				return nil, err
			}
			return func() { released <- struct{}{} }, nil
		}
	}, nil)
	// Up it may be, as far as its keeper knows; what the registry knows counts.
	wantOutcome(t, e.start(t, request("console")).wait(t), dispatch.OutcomeRefused, "runner_offline", unreachable+"not connected")
	if rt.Wait(t, "the question", asked) != rt.Tenant {
		t.Error("another tenant's was asked for")
	}
	rt.Wait(t, "the release", released)

	answer = func(context.Context) error { return errors.New("it has a cold") }
	wantOutcome(t, e.start(t, request("console")).wait(t), dispatch.OutcomeRefused, "runner_offline", unreachable+"it has a cold")
	<-asked

	// Who waits for it may go, and has no more time than any fetch.
	answer = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	f := e.start(t, request("console"))
	rt.Wait(t, "the question", asked)
	f.stop()
	wantOutcome(t, f.wait(t), dispatch.OutcomeCancelled, "cancelled", "")
	short := request("console")
	short.Timeout = time.Millisecond
	wantOutcome(t, e.start(t, short).wait(t), dispatch.OutcomeRefused, "runner_offline", unreachable+"it is not up within the time of the fetch")
	<-asked

	// It is asked for by this name alone, and by nobody who may not fetch.
	f = e.start(t, request("edge-1"))
	e.accept(t).complete()
	wantOutcome(t, f.wait(t), dispatch.OutcomeCompleted, "", "")
	reader := request("console")
	reader.Caller.Role = "READER"
	if o := e.start(t, reader).wait(t); o.Code != dispatch.OutcomeRefused {
		t.Errorf("a reader's: %+v", o)
	}
	if len(asked) > 0 || len(released) > 0 {
		t.Errorf("asked %d times more, released %d", len(asked), len(released))
	}
}
