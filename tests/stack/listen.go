package stack

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/org-runink/runbus/tests/canary"
)

// reveals are the calls whose answer shows a secret: the one that they make, this once.
var reveals = regexp.MustCompile(`^POST /api/(service-account-keys|tenants|people|people/[^/]+/session|runners|runners/[^/]+/token)$`)

// Listen is a transport that searches all that is answered for secrets and fails the test for each, in headers, bodies and trailers. What is
// sent to open a source, or to prove who calls, is made known first.
func Listen(t testing.TB, next http.RoundTripper) http.RoundTripper { return &listener{t, next} }

type listener struct {
	t    testing.TB
	next http.RoundTripper
}

// CloseIdleConnections is what http.Client.CloseIdleConnections calls.
func (l *listener) CloseIdleConnections() {
	if next, ok := l.next.(interface{ CloseIdleConnections() }); ok {
		next.CloseIdleConnections()
	}
}

var answers atomic.Int64

// RoundTrip implements http.RoundTripper.
func (l *listener) RoundTrip(req *http.Request) (*http.Response, error) {
	call := req.Method + " " + req.URL.Path
	Secrets.Learn("a call", []byte(req.Header.Get("Authorization")))
	if req.GetBody != nil {
		if body, err := req.GetBody(); err == nil {
			if b, err := io.ReadAll(body); err == nil {
				learnCall(b)
			}
		}
	}
	resp, err := l.next.RoundTrip(req)
	if err != nil {
		Inspect(l.t, "the error of "+call, []byte(err.Error()), nothing)
		return nil, err
	}
	sink := "the answer to " + call
	l.headers(sink, resp.Header)
	own := nothing
	if reveals.MatchString(call) && resp.StatusCode < 300 {
		b, err := io.ReadAll(resp.Body)
		if closed := resp.Body.Close(); err != nil || closed != nil {
			return nil, fmt.Errorf("%s: %w, %w", call, err, closed)
		}
		born := fmt.Sprintf("%s (no. %d)", sink, answers.Add(1))
		Secrets.Learn(born, b)
		own = func(s canary.Secret) bool { return s.Born == born }
		resp.Body = io.NopCloser(bytes.NewReader(b))
	}
	if measuring {
		return resp, nil
	}
	resp.Body = &heard{ReadCloser: resp.Body, look: Secrets.NewWriter(own), listener: l, sink: sink, resp: resp}
	return resp, nil
}

func (l *listener) headers(sink string, h http.Header) {
	for name, values := range h {
		for _, v := range values {
			Inspect(l.t, "header "+name+" of "+sink, []byte(v), nothing)
		}
	}
}

// heard is a body that is looked at while it is read.
type heard struct {
	io.ReadCloser
	*listener
	look *canary.Writer
	sink string
	resp *http.Response

	mu    sync.Mutex
	ended bool
}

// Read implements io.Reader.
func (h *heard) Read(p []byte) (int, error) {
	n, err := h.ReadCloser.Read(p)
	h.mu.Lock()
	_, _ = h.look.Write(p[:n])
	h.mu.Unlock()
	if err == io.EOF {
		h.finish()
	}
	return n, err
}

// Close implements io.Closer.
func (h *heard) Close() error {
	h.finish()
	return h.ReadCloser.Close()
}

func (h *heard) finish() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended {
		return
	}
	h.ended = true
	report(h.t, h.sink, h.look.Hits())
	h.headers("the end of "+h.sink, h.resp.Trailer)
}

// drain reads the rest of an answer.
func drain(resp *http.Response) error {
	_, err := io.Copy(io.Discard, resp.Body)
	return errors.Join(err, resp.Body.Close())
}
