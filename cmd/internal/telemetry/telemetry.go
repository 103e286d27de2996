// Package telemetry sets OpenTelemetry tracing up for a process, as its standard variables (OTEL_…) say. Without them nothing is
// traced and nothing is sent.
package telemetry

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/org-runink/runbus/schemas"
)

// shutdownWithin bounds what the last spans may take at the end of the process.
const shutdownWithin = 5 * time.Second

// Start makes the tracer provider of a process that is called service where OTEL_SERVICE_NAME names it nothing else; an empty version is
// that of the build. Spans are
// exported over OTLP/HTTP when OTEL_TRACES_EXPORTER is `otlp`, or an OTLP endpoint is set; OTEL_SDK_DISABLED and
// OTEL_TRACES_EXPORTER=none turn that off. The sampler and the batches follow their variables too. stop sends what is left, for 5 s at
// most. A variable that says what can't be done is an error of CodeInvalid.
func Start(ctx context.Context, getenv func(string) string, service, version string, log *slog.Logger) (_ trace.TracerProvider, stop func(), err error) {
	return start(ctx, getenv, service, version, log, shutdownWithin)
}

// start is Start with another bound of what stop may take.
func start(ctx context.Context, getenv func(string) string, service, version string, log *slog.Logger, within time.Duration) (_ trace.TracerProvider, stop func(), err error) {
	none := func() {}
	if !wanted(getenv) {
		return noop.NewTracerProvider(), none, nil
	}
	switch v := getenv("OTEL_TRACES_EXPORTER"); v {
	case "", "otlp":
	default:
		return nil, none, schemas.Errorf(schemas.CodeInvalid, "OTEL_TRACES_EXPORTER is %q: use otlp or none", v)
	}
	client, err := newClient(getenv)
	if err != nil {
		return nil, none, err
	}
	exporter, err := otlptrace.New(ctx, client)
	if err != nil {
		return nil, none, fmt.Errorf("start the exporter of traces: %w", err)
	}
	if info, ok := debug.ReadBuildInfo(); ok && version == "" {
		version = info.Main.Version
	}
	about, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", service), attribute.String("service.version", version)),
		resource.WithProcessPID(), resource.WithHost(), resource.WithTelemetrySDK(), resource.WithFromEnv())
	if err != nil {
		log.Warn("a part of what OpenTelemetry tells of this process is missing", "error", err)
	}
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("OpenTelemetry", "error", err) }))
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(about))
	return provider, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), within)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			log.Warn("the last traces were not sent", "error", err)
		}
	}, nil
}

// wanted reports whether traces are to be exported.
func wanted(getenv func(string) string) bool {
	exporter := getenv("OTEL_TRACES_EXPORTER")
	if strings.EqualFold(getenv("OTEL_SDK_DISABLED"), "true") || exporter == "none" {
		return false
	}
	return exporter != "" || getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") != ""
}
