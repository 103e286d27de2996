package api

import (
	"context"
	"net/http"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	oteltrace "go.opentelemetry.io/otel/trace"

	"github.com/org-runink/runbus/cp/dispatch"
)

// tracerName is the instrumentation scope of the API's spans.
const tracerName = "github.com/org-runink/runbus/cp/api"

// startSpan takes the W3C trace context of a request in and begins the span of the fetch that it asks for.
func (s *server) startSpan(ctx context.Context, r *http.Request) (context.Context, oteltrace.Span) {
	ctx = propagation.TraceContext{}.Extract(ctx, propagation.HeaderCarrier(r.Header))
	return s.tracer.Start(ctx, "POST /api/fetches", oteltrace.WithSpanKind(oteltrace.SpanKindServer), oteltrace.WithAttributes(
		attribute.String("http.request.method", http.MethodPost), attribute.String("http.route", "/api/fetches"),
		attribute.String("url.path", "/api/fetches"),
	))
}

// endSpan ends it with the outcome of the fetch.
func endSpan(span oteltrace.Span, o dispatch.Outcome) {
	span.SetAttributes(attribute.String("runbus.dispatch.id", o.DispatchID), attribute.String("runbus.outcome", o.Code))
	if o.Err != nil {
		span.SetAttributes(attribute.String("error.type", string(o.Err.Code)))
		span.SetStatus(codes.Error, o.Err.Message)
	}
	span.End()
}
