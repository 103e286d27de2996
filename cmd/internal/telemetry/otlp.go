package telemetry

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/schemas"
)

const (
	mediaProtobuf = "application/x-protobuf"
	maxAnswer     = 64 << 10
	defaultURL    = "http://localhost:4318"

	// A collector that is busy or away is asked again, each time after twice as long, until the time of the export is over.
	retryFirst = 200 * time.Millisecond
	retryMost  = 5 * time.Second
)

// client sends spans over OTLP/HTTP. It is here because the exporter of that name brings all of gRPC with it (measured: 5.2 MB in
// a runner); what is sent is the same.
type client struct {
	url     string
	headers map[string]string
	gzip    bool
	timeout time.Duration // of one export, with its retries
	http    *http.Client
}

// setting reads OTEL_EXPORTER_OTLP_TRACES_<name>, else OTEL_EXPORTER_OTLP_<name>.
func setting(getenv func(string) string, name string) string {
	if v := strings.TrimSpace(getenv("OTEL_EXPORTER_OTLP_TRACES_" + name)); v != "" {
		return v
	}
	return strings.TrimSpace(getenv("OTEL_EXPORTER_OTLP_" + name))
}

func newClient(getenv func(string) string) (*client, error) {
	bad := func(name, format string, args ...any) error {
		return schemas.Errorf(schemas.CodeInvalid, "OTEL_EXPORTER_OTLP_%s "+format, append([]any{name}, args...)...)
	}
	if v := setting(getenv, "PROTOCOL"); v != "" && v != "http/protobuf" {
		return nil, bad("PROTOCOL", "is %q: use http/protobuf", v)
	}
	c := &client{timeout: 10 * time.Second}
	var err error
	if c.url, err = endpoint(getenv); err != nil {
		return nil, bad("ENDPOINT", "is not an http or https URL")
	}
	if v := setting(getenv, "TIMEOUT"); v != "" {
		ms, err := strconv.Atoi(v)
		if err != nil || ms <= 0 {
			return nil, bad("TIMEOUT", "is %q: use milliseconds", v)
		}
		c.timeout = time.Duration(ms) * time.Millisecond
	}
	switch v := setting(getenv, "COMPRESSION"); v {
	case "", "none":
	case "gzip":
		c.gzip = true
	default:
		return nil, bad("COMPRESSION", "is %q: use gzip or none", v)
	}
	if c.headers, err = parseHeaders(setting(getenv, "HEADERS")); err != nil {
		return nil, bad("HEADERS", "is not a list of name=value separated by commas") // the values may be secrets
	}
	config, err := tlsConfig(getenv)
	if err != nil {
		return nil, bad("CERTIFICATE", "or the client's certificate or key can't be used: %w", err)
	}
	c.http = &http.Client{
		Transport:     &http.Transport{Proxy: http.ProxyFromEnvironment, TLSClientConfig: config, TLSHandshakeTimeout: 10 * time.Second, IdleConnTimeout: 90 * time.Second},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, // the headers may be secrets
	}
	return c, nil
}

func endpoint(getenv func(string) string) (string, error) {
	text, path := strings.TrimSpace(getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")), ""
	if text == "" {
		text, path = strings.TrimSpace(getenv("OTEL_EXPORTER_OTLP_ENDPOINT")), "v1/traces"
		if text == "" {
			text = defaultURL
		}
	}
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", errors.New("not a URL")
	}
	if path != "" {
		u = u.JoinPath(path)
	}
	return u.String(), nil
}

func parseHeaders(text string) (map[string]string, error) {
	headers := make(map[string]string)
	for pair := range strings.SplitSeq(text, ",") {
		if pair = strings.TrimSpace(pair); pair == "" {
			continue
		}
		name, value, ok := strings.Cut(pair, "=")
		value, err := url.PathUnescape(strings.TrimSpace(value))
		if name = strings.TrimSpace(name); !ok || err != nil || name == "" || strings.ContainsAny(name+value, "\r\n\x00") {
			return nil, errors.New("not a header")
		}
		headers[name] = value
	}
	return headers, nil
}

func tlsConfig(getenv func(string) string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if file := setting(getenv, "CERTIFICATE"); file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, errors.New("no PEM certificate in it")
		}
	}
	cert, key := setting(getenv, "CLIENT_CERTIFICATE"), setting(getenv, "CLIENT_KEY")
	if cert != "" || key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// Start has nothing to do: the first export connects.
func (c *client) Start(context.Context) error { return nil }

// Stop closes what is idle.
func (c *client) Stop(context.Context) error {
	c.http.CloseIdleConnections()
	return nil
}

// UploadTraces sends one batch, again while the collector says that it may be taken later.
func (c *client) UploadTraces(ctx context.Context, spans []*tracepb.ResourceSpans) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	// ExportTraceServiceRequest has the same one field.
	body, err := proto.Marshal(&tracepb.TracesData{ResourceSpans: spans})
	if err != nil {
		return err
	}
	if c.gzip {
		var out bytes.Buffer
		w := gzip.NewWriter(&out)
		_, err := w.Write(body)
		if err := errors.Join(err, w.Close()); err != nil {
			return err
		}
		body = out.Bytes()
	}
	for pause := retryFirst; ; pause = min(2*pause, retryMost) {
		after, err := c.post(ctx, body)
		if err == nil || after < 0 {
			return err
		}
		wait := time.NewTimer(max(pause, after))
		select {
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
			return err
		}
	}
}

// post sends the body once. after is how long to wait before it may be sent again, negative for never.
func (c *client) post(ctx context.Context, body []byte) (after time.Duration, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return -1, errors.New("the request for the collector can't be made")
	}
	for name, value := range c.headers {
		req.Header.Set(name, value)
	}
	req.Header.Set("Content-Type", mediaProtobuf)
	if c.gzip {
		req.Header.Set("Content-Encoding", "gzip")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		var where *url.Error
		if errors.As(err, &where) {
			err = where.Err // without the URL
		}
		return 0, fmt.Errorf("the collector of traces can't be reached: %w", err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	switch status := resp.StatusCode; {
	case status >= 200 && status < 300 && err == nil:
		return -1, partial(answer)
	case status == http.StatusTooManyRequests, status == http.StatusBadGateway, status == http.StatusServiceUnavailable, status == http.StatusGatewayTimeout:
		seconds, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
		return min(time.Duration(max(seconds, 0))*time.Second, time.Minute), fmt.Errorf("the collector of traces answered %s", resp.Status)
	}
	return -1, errors.Join(fmt.Errorf("the collector of traces answered %s", resp.Status), err)
}

// partial reads ExportTraceServiceResponse.partial_success: how many spans the collector did not take, and why.
func partial(answer []byte) error {
	inner, ok := field(answer, 1, protowire.BytesType)
	if !ok {
		return nil
	}
	text, _ := field(inner, 2, protowire.BytesType)
	rejected, _ := field(inner, 1, protowire.VarintType)
	if n, _ := protowire.ConsumeVarint(rejected); n > 0 || len(text) > 0 {
		return fmt.Errorf("the collector did not take %d spans: %s", n, text[:min(len(text), 500)])
	}
	return nil
}

// field is the value of the first field of this number and type; a message that is damaged has none.
func field(b []byte, number protowire.Number, kind protowire.Type) ([]byte, bool) {
	for len(b) > 0 {
		n, t, size := protowire.ConsumeTag(b)
		if size < 0 {
			return nil, false
		}
		b = b[size:]
		length := protowire.ConsumeFieldValue(n, t, b)
		if length < 0 {
			return nil, false
		}
		if n == number && t == kind {
			if kind == protowire.BytesType {
				value, _ := protowire.ConsumeBytes(b)
				return value, true
			}
			return b[:length], true
		}
		b = b[length:]
	}
	return nil, false
}
