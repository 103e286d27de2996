package telemetry

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/pem"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/schemas"
)

func env(vars map[string]string) func(string) string {
	return func(name string) string { return vars[name] }
}

// collector keeps what comes.
type collector struct {
	*httptest.Server
	requests chan *http.Request
	spans    chan *tracepb.TracesData
	answers  atomic.Int32 // how many are 503 first
	body     []byte
}

func newCollector(t *testing.T, start func(http.Handler) *httptest.Server) *collector {
	t.Helper()
	c := &collector{requests: make(chan *http.Request, 16), spans: make(chan *tracepb.TracesData, 16)}
	c.Server = start(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := io.Reader(r.Body)
		if r.Header.Get("Content-Encoding") == "gzip" {
			z, err := gzip.NewReader(r.Body)
			if err != nil {
				t.Error(err)
				return
			}
			body = z
		}
		b, err := io.ReadAll(body)
		if err != nil {
			t.Error(err)
		}
		if c.answers.Add(-1) >= 0 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		var data tracepb.TracesData
		if err := proto.Unmarshal(b, &data); err != nil {
			t.Error(err)
		}
		c.requests <- r
		c.spans <- &data
		_, _ = w.Write(c.body)
	}))
	t.Cleanup(c.Close)
	return c
}

// Without the standard variables nothing is traced, and nothing is sent.
func TestOffByDefault(t *testing.T) {
	for name, vars := range map[string]map[string]string{
		"nothing set":  {},
		"name only":    {"OTEL_SERVICE_NAME": "x"},
		"SDK disabled": {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
		"no exporter":  {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
	} {
		provider, stop, err := Start(t.Context(), env(vars), "svc", "", slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		if _, span := provider.Tracer("t").Start(t.Context(), "x"); span.IsRecording() || span.SpanContext().IsValid() {
			t.Errorf("%s: a span is recorded", name)
		}
		stop()
	}
}

// Spans go to the collector with the headers, the compression and the service's name that the variables say, again while it is busy.
func TestExport(t *testing.T) {
	t.Setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
	c := newCollector(t, httptest.NewTLSServer)
	c.answers.Store(1)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	provider, stop, err := start(t.Context(), env(map[string]string{
		"OTEL_EXPORTER_OTLP_ENDPOINT": c.URL + "/base", "OTEL_EXPORTER_OTLP_CERTIFICATE": ca, "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip",
		"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic%20abc, x-scope = 7", "OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TIMEOUT": "180000",
	}), "svc", "1.2.3", slog.New(slog.NewTextHandler(t.Output(), nil)), 3*time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	_, span := provider.Tracer("t").Start(t.Context(), "one")
	span.End()
	stop() // sends what is left
	r, data := <-c.requests, <-c.spans
	if r.URL.Path != "/base/v1/traces" || r.Header.Get("Content-Type") != mediaProtobuf || r.Header.Get("Authorization") != "Basic abc" || r.Header.Get("X-Scope") != "7" {
		t.Errorf("%s %v", r.URL.Path, r.Header)
	}
	resource := data.GetResourceSpans()[0]
	attributes := map[string]string{}
	for _, a := range resource.GetResource().GetAttributes() {
		attributes[a.GetKey()] = a.GetValue().GetStringValue()
	}
	if attributes["service.name"] != "svc" || attributes["service.version"] != "1.2.3" || attributes["deployment.environment.name"] != "test" {
		t.Errorf("%v", attributes)
	}
	if name := resource.GetScopeSpans()[0].GetSpans()[0].GetName(); name != "one" {
		t.Errorf("span %q", name)
	}
}

func TestSettingsThatAreWrong(t *testing.T) {
	const secret = "s3cret"
	for name, vars := range map[string]map[string]string{
		"exporter":    {"OTEL_TRACES_EXPORTER": "zipkin"},
		"protocol":    {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
		"endpoint":    {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"},
		"timeout":     {"OTEL_EXPORTER_OTLP_TIMEOUT": "10s"},
		"compression": {"OTEL_EXPORTER_OTLP_COMPRESSION": "lzma"},
		"headers":     {"OTEL_EXPORTER_OTLP_HEADERS": secret},
		"CA":          {"OTEL_EXPORTER_OTLP_CERTIFICATE": filepath.Join(t.TempDir(), "none.pem")},
		"key alone":   {"OTEL_EXPORTER_OTLP_CLIENT_KEY": filepath.Join(t.TempDir(), "none.pem")},
	} {
		all := map[string]string{"OTEL_TRACES_EXPORTER": "otlp"}
		for k, v := range vars {
			all[k] = v
		}
		_, _, err := Start(t.Context(), env(all), "svc", "", slog.New(slog.DiscardHandler))
		if schemas.CodeOf(err) != schemas.CodeInvalid || !strings.Contains(err.Error(), "OTEL_") || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// What the collector does not take is told; a refusal is not tried again, and no error names the URL.
func TestRefusals(t *testing.T) {
	c := newCollector(t, httptest.NewServer)
	made, err := newClient(env(map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": c.URL + "/here"}))
	if err != nil {
		t.Fatal(err)
	}
	inner := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 3)
	inner = protowire.AppendString(protowire.AppendTag(inner, 2, protowire.BytesType), "too old")
	c.body = protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), inner)
	if err := made.UploadTraces(t.Context(), nil); err == nil || err.Error() != "the collector did not take 3 spans: too old" {
		t.Errorf("%v", err)
	}
	if r := <-c.requests; r.URL.Path != "/here" {
		t.Errorf("%s", r.URL.Path)
	}
	c.body = nil
	if err := made.UploadTraces(t.Context(), nil); err != nil {
		t.Error(err)
	}
	refusing := httptest.NewServer(http.NotFoundHandler())
	defer refusing.Close()
	made.url = refusing.URL
	if err := made.UploadTraces(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("%v", err)
	}
	refusing.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := made.UploadTraces(ctx, nil); err == nil || strings.Contains(err.Error(), refusing.URL) {
		t.Errorf("%v", err)
	}
	if err := made.Stop(ctx); err != nil {
		t.Error(err)
	}
}

func FuzzPartial(f *testing.F) {
	f.Add([]byte{0x0a, 0x02, 0x08, 0x03})
	f.Add(bytes.Repeat([]byte{0xff}, 20))
	f.Fuzz(func(_ *testing.T, b []byte) { _ = partial(b) })
}
