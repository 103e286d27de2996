package dispatch_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/propagation"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/cp/registry"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/cp/trace"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// timeline is what was recorded of an outcome.
func (e *env) timeline(t *testing.T, o dispatch.Outcome) trace.Timeline {
	t.Helper()
	tl, err := e.record.Get(t.Context(), rt.Tenant, o.DispatchID)
	rt.Must(t, err)
	if tl.State != trace.StateEnded || tl.Outcome != o.Code || len(tl.Phases) != len(o.Phases) || tl.EndedAt == nil {
		t.Errorf("outcome %+v, timeline %+v", o, tl)
	}
	return tl
}

func wantStopped(t *testing.T, tl trace.Timeline, hop, why string) {
	t.Helper()
	if s := tl.Stopped; s == nil || s.From+" → "+s.To != hop || !strings.Contains(s.Why, why) {
		t.Errorf("stopped at %+v, want %s: %s", s, hop, why)
	}
}

func (e *env) signals(t *testing.T) registry.Health {
	t.Helper()
	return e.SelfHosted(t, rt.Tenant)[0].Health
}

// A runner that nobody hears is told by the timeline and by the list of runners, until it is heard again (issue 3: the third
// signal).
func TestNobodyListens(t *testing.T) {
	e := newEnv(t, nil, nil)
	if h := e.signals(t); h.Signals.Responders != registry.RespondersUnasked || !h.Dispatchable {
		t.Errorf("at first: %+v", h)
	}
	e.runner.Deafen(t)
	e.Clock.Advance(3 * time.Second)
	o := e.start(t, request("edge-1")).wait(t)
	wantOutcome(t, o, dispatch.OutcomeRefused, "runner_offline", "")
	wantStopped(t, e.timeline(t, o), "assigned → accepted", "no responders")
	if h := e.signals(t); h.Signals != (registry.Signals{Connection: "up", Heartbeat: "fresh", Responders: "none"}) || h.Dispatchable || !strings.Contains(h.Detail, "no responders") {
		t.Errorf("unheard: %+v", h)
	}
	e.runner.Listen(t)
	f := e.start(t, request("edge-1")) // it is given work all the same
	e.accept(t).complete()
	o = f.wait(t)
	wantOutcome(t, o, dispatch.OutcomeCompleted, "", "")
	if tl := e.timeline(t, o); tl.Stopped != nil || tl.Rows != 42 || tl.RunnerPID != 4711 || tl.Session != e.runner.Session || tl.Replica != e.d.Replica() {
		t.Errorf("%+v", tl)
	}
	if h := e.signals(t); h.Signals.Responders != registry.RespondersHeard || !h.Dispatchable {
		t.Errorf("heard again: %+v", h)
	}
}

// What was waited for in vain is told, and what the cancel brought.
func TestNoAnswerIsTold(t *testing.T) {
	hasty := func(d *dispatch.Deps) { d.AcceptWithin = 50 * time.Millisecond }
	e := newEnv(t, func(d *dispatch.Deps) { hasty(d); unconfirmed(d) }, nil)
	o := e.start(t, request("edge-1")).wait(t)
	wantOutcome(t, o, dispatch.OutcomeUnknown, "outcome_unknown", "")
	wantStopped(t, e.timeline(t, o), "assigned → accepted", "no answer from the runner within 50ms; to the cancel: no answer either")
	e = newEnv(t, hasty, nil)
	e.runner.OnCancel(func(*runbusv1.CancelOrder) runbusv1.CancelState {
		return runbusv1.CancelState_CANCEL_STATE_NEVER_STARTED
	})
	o = e.start(t, request("edge-1")).wait(t)
	wantOutcome(t, o, dispatch.OutcomeRefused, "runner_offline", "")
	wantStopped(t, e.timeline(t, o), "assigned → accepted", "to the cancel: it never started")
}

// The caller's trace context goes with the work and with the credentials, when nobody traces in between.
func TestTraceContextIsPassedOn(t *testing.T) {
	e := newEnv(t, unconfirmed, nil)
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	ctx := propagation.TraceContext{}.Extract(context.Background(), propagation.MapCarrier{"traceparent": parent, "tracestate": "a=b"})
	done := make(chan dispatch.Outcome, 1)
	go func() { done <- e.d.Fetch(ctx, secretRequest(), "", newSink()) }()
	want := bus.Trace{Parent: parent, State: "a=b"}
	msg := rt.Wait(t, "the work", e.runner.Work)
	if got := bus.TraceOf(msg); got != want {
		t.Errorf("the work has %+v", got)
	}
	var a runbusv1.RunnerWorkAssignment
	rt.Must(t, bus.Decode(msg, &a))
	w := &work{t: t, Sender: e.runner.Stream(t, &a), assignment: &a}
	rt.Send(t, w.Sender, &runbusv1.RunnerWorkAccepted{Pid: 4711})
	if got := bus.TraceOf(rt.Wait(t, "the credentials", e.runner.Work)); got != want {
		t.Errorf("the credentials have %+v", got)
	}
	w.complete()
	o := rt.Wait(t, "the outcome", done)
	wantOutcome(t, o, dispatch.OutcomeCompleted, "", "")
	tl := e.timeline(t, o)
	if tl.TraceID != "0af7651916cd43dd8448eb211c80319c" || tl.Phases[3].Phase != dispatch.PhaseCredentials {
		t.Errorf("%+v", tl)
	}
	// Without one there is none.
	f := e.start(t, request("edge-1"))
	msg = rt.Wait(t, "the work", e.runner.Work)
	if got := bus.TraceOf(msg); got != (bus.Trace{}) {
		t.Errorf("the work has %+v", got)
	}
	f.stop()
	f.wait(t)
}

// Nothing of a request but the kind of its source is in the timeline, and what a caller or a runner may say at length is cut.
func TestTimelinesAreBounded(t *testing.T) {
	e := newEnv(t, nil, nil)
	req := request(strings.Repeat("x", 10_000))
	req.Fetch.Source.Kind = strings.Repeat("k", 10_000)
	tl := e.timeline(t, e.start(t, req).wait(t))
	if len(tl.RunnerID) > 100 || len(tl.Source) > 100 || len(tl.Message) > 2000 {
		t.Errorf("%d, %d, %d bytes", len(tl.RunnerID), len(tl.Source), len(tl.Message))
	}
	f := e.start(t, secretRequest())
	w := e.accept(t)
	rt.Wait(t, "the credentials", e.runner.Work)
	w.fail(true, "source_failed", strings.Repeat("e", 100_000))
	tl = e.timeline(t, f.wait(t))
	if len(tl.Message) > 2000 || len(tl.Stopped.Why) > 2000 {
		t.Errorf("%d, %d bytes", len(tl.Message), len(tl.Stopped.Why))
	}
	for _, p := range tl.Phases {
		if p.By == "" {
			t.Errorf("%+v", p)
		}
	}
}
