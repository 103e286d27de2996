package dispatch

import (
	"cmp"
	"context"
	"slices"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	oteltrace "go.opentelemetry.io/otel/trace"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/trace"
	"github.com/org-runink/runbus/schemas"
)

// tracerName is the instrumentation scope of the dispatcher's spans.
const tracerName = "github.com/org-runink/runbus/cp/dispatch"

// observe begins the timeline and the span of a run (SPEC D17). The context that it returns is that of the span; what the
// caller sent is passed on when nobody traces here.
func (d *Dispatcher) observe(ctx context.Context, run *run) context.Context {
	if d.d.Recorder != nil {
		run.live = d.d.Recorder.Begin(run.caller.Tenant, run.id, run.began, run.shown)
	}
	if d.d.Tracing == nil && !oteltrace.SpanContextFromContext(ctx).IsValid() {
		return ctx // nobody traces, here or at the caller
	}
	ctx, span := d.tracer.Start(ctx, "dispatch", oteltrace.WithSpanKind(oteltrace.SpanKindProducer), oteltrace.WithTimestamp(run.began),
		oteltrace.WithAttributes(attribute.String("runbus.dispatch.id", run.id), attribute.String("messaging.system", "nats")))
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	run.mu.Lock()
	defer run.mu.Unlock()
	run.span = span
	run.trace = bus.Trace{Parent: carrier[bus.HeaderTraceparent], State: carrier[bus.HeaderTracestate]}
	return ctx
}

// timeline is the run as it stands.
func (r *run) timeline() trace.Timeline {
	r.mu.Lock()
	defer r.mu.Unlock()
	named := r.named
	if len(named) > maxNamed || schemas.IsCredential(named) {
		named = ""
	}
	t := trace.Timeline{
		DispatchID: r.id, Tenant: r.caller.Tenant, RunnerID: cmp.Or(r.runner.Ref.Runner, named), RunnerPID: r.pid, Person: r.caller.Name,
		Source: clip(r.kind, maxNamed), State: trace.StateRunning,
		Replica: r.replica, Session: r.runner.Session, Link: r.runner.Link, Rows: r.rows, Bytes: r.bytes,
		StartedAt: r.began, Deadline: r.deadline, Phases: slices.Clone(r.phases),
	}
	if r.span != nil && r.span.SpanContext().HasTraceID() {
		t.TraceID = r.span.SpanContext().TraceID().String()
	}
	return t
}

// maxNamed bounds what a caller's words take of a timeline.
const maxNamed = 64

// conclude ends the timeline and the span of a run. It comes when the outcome is complete. It returns the steps of that timeline, nil if
// there is none.
func (r *run) conclude(o *Outcome) []PhaseAt {
	if r.live == nil && r.span == nil {
		return nil
	}
	t := r.timeline()
	t.State, t.Outcome = trace.StateEnded, o.Code
	ended := r.ended
	t.EndedAt = &ended
	if o.Err != nil {
		t.Code, t.Message, t.Hint = string(o.Err.Code), o.Err.Message, o.Err.Hint
		t.Stopped = trace.StoppedAt(t.Phases, cmp.Or(r.why, o.Err.Message))
	}
	r.live.End(t)
	if r.span == nil {
		return t.Phases
	}
	if r.span.IsRecording() {
		r.span.SetAttributes(attribute.String("runbus.tenant", t.Tenant), attribute.String("runbus.runner.id", t.RunnerID),
			attribute.String("runbus.source", t.Source), attribute.String("runbus.outcome", o.Code),
			attribute.Int64("runbus.rows", t.Rows), attribute.Int64("runbus.bytes", t.Bytes))
		for _, p := range t.Phases {
			r.span.AddEvent(p.Phase, oteltrace.WithTimestamp(p.At), oteltrace.WithAttributes(attribute.String("by", p.By)))
		}
		if o.Err != nil {
			r.span.SetAttributes(attribute.String("error.type", t.Code))
			r.span.SetStatus(codes.Error, t.Message)
		}
	}
	r.span.End(oteltrace.WithTimestamp(ended))
	return t.Phases
}

// blame says why the run does not get on, for its timeline; the first word counts.
func (r *run) blame(why string) {
	if r.why == "" {
		r.why = why
	}
}

// note adds something of interest to a step of the timeline.
func (r *run) note(phase, text string) {
	r.mu.Lock()
	for i := range r.phases {
		if r.phases[i].Phase == phase {
			r.phases[i].Note = text
		}
	}
	r.mu.Unlock()
	r.live.Changed()
}

// end adds the last steps: when the last rows came, and the end by the outcome's name.
func (r *run) end(outcome, by string) {
	r.mu.Lock()
	r.unsaid.Store(0) // the minder notes no start behind the end
	r.ended = r.now()
	if outcome == OutcomeCompleted && !r.lastRow.IsZero() {
		r.phases = append(r.phases, PhaseAt{Phase: trace.PhaseLastRow, At: r.lastRow, By: r.there})
	}
	r.phases = append(r.phases, PhaseAt{Phase: trace.EndPhase(outcome), At: r.ended, By: by})
	r.mu.Unlock()
}
