package runner

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// tracerName is the instrumentation scope of a runner's spans.
const tracerName = "github.com/org-runink/runbus/runner"

// startSpan begins the span of an assignment, below that of the control plane that came with it (SPEC D17). What the assignment
// came with goes on when nobody traces here; the span is nil then.
func (a *Agent) startSpan(ctx context.Context, m *runbusv1.RunnerWorkAssignment, from bus.Trace) (context.Context, trace.Span, bus.Trace) {
	if a.tracer == nil && from.Parent == "" {
		return ctx, nil, bus.Trace{}
	}
	carrier := propagation.MapCarrier{bus.HeaderTraceparent: from.Parent, bus.HeaderTracestate: from.State}
	ctx = propagation.TraceContext{}.Extract(ctx, carrier)
	var span trace.Span
	if a.tracer != nil {
		ctx, span = a.startTraced(ctx, m)
	}
	carrier = propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return ctx, span, bus.Trace{Parent: carrier[bus.HeaderTraceparent], State: carrier[bus.HeaderTracestate]}
}

func (a *Agent) startTraced(ctx context.Context, m *runbusv1.RunnerWorkAssignment) (context.Context, trace.Span) {
	return a.tracer.Start(ctx, "run fetch", trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(
		attribute.String("messaging.system", "nats"), attribute.String("runbus.dispatch.id", m.GetDispatchId()),
		attribute.String("runbus.runner.id", a.ref.Runner), attribute.String("runbus.tenant", a.ref.Tenant),
		attribute.String("runbus.source", m.GetRequest().GetSource().GetKind()),
	))
}

// startSource begins the span of the read itself, at the source; it is nil when nobody traces here.
func (w *work) startSource(kind string) (context.Context, trace.Span) {
	if w.agent.tracer == nil {
		return w.ctx, nil
	}
	return w.agent.tracer.Start(w.ctx, "read "+kind, trace.WithSpanKind(trace.SpanKindClient),
		trace.WithAttributes(attribute.String("runbus.source", kind)))
}

// endSpan ends a span, if it is one, with what became of its work. The error's text is the one that the caller is told.
func endSpan(span trace.Span, rows, bytes int64, err error) {
	if span == nil {
		return
	}
	span.SetAttributes(attribute.Int64("runbus.rows", rows), attribute.Int64("runbus.bytes", bytes))
	if err != nil {
		span.SetAttributes(attribute.String("error.type", string(schemas.CodeOf(err))))
		span.SetStatus(codes.Error, schemas.ToDetail(err).GetMessage())
	}
	span.End()
}
