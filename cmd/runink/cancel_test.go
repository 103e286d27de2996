package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/pem"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/schemas"
)

// tripper answers requests as a test says.
type tripper func(*http.Request) *http.Response

func (f tripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req), nil }

// answeredBy is a client whose requests go nowhere.
func answeredBy(f tripper) *client {
	return &client{base: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}, token: schemas.NewSessionToken(), http: &http.Client{Transport: f}}
}

// answer is one about dispatch D1, whose body ends when the request does.
func answer(req *http.Request, status int) (*http.Response, *io.PipeWriter) {
	body, w := io.Pipe()
	context.AfterFunc(req.Context(), func() { w.CloseWithError(req.Context().Err()) })
	return &http.Response{StatusCode: status, Header: http.Header{"Runbus-Dispatch-Id": {"D1"}}, Body: body, Request: req}, w
}

// A fetch may end while it is being cancelled: then the server knows of none that runs, and the outcome is on its way.
func TestAnOutcomeOvertakesTheCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, interrupt := context.WithCancel(t.Context())
		defer interrupt()
		lines := make(chan *io.PipeWriter, 1)
		f := &fetch{progress: interruptOnAccept{interrupt}, rows: &jsonRows{w: io.Discard}, api: answeredBy(func(req *http.Request) *http.Response {
			if req.Method == http.MethodDelete {
				const text = `{"code":"not_found","detail":"no such fetch is running"}`
				return &http.Response{StatusCode: http.StatusNotFound, Body: io.NopCloser(strings.NewReader(text)), Request: req}
			}
			resp, w := answer(req, http.StatusOK)
			lines <- w
			return resp
		})}
		ended := make(chan error, 1)
		go func() {
			result, err := f.stream(ctx)
			if result.Outcome != "completed" {
				t.Errorf("the result is %+v", result)
			}
			ended <- err
		}()
		w := <-lines
		_, _ = io.WriteString(w, `{"type":"accepted","dispatchId":"D1"}`+"\n")
		synctest.Wait() // the server has answered
		_, _ = io.WriteString(w, `{"type":"result","outcome":"completed"}`+"\n")
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// After Ctrl-C before the answer a fetch was cancelled, whether that began to come at that moment or not. Where the id came, what became of it
// can be looked up.
func TestAnAnswerThatComesWhenItIsGivenUp(t *testing.T) {
	for _, accept := range []string{"application/x-ndjson", "text/csv"} {
		ctx, interrupt := context.WithCancel(t.Context())
		f := &fetch{progress: noProgress{}, rows: &jsonRows{w: io.Discard}, api: answeredBy(func(req *http.Request) *http.Response {
			if req.Method != http.MethodPost {
				t.Errorf("%s %s", req.Method, req.URL.Path)
			}
			interrupt()
			<-req.Context().Done()
			resp, _ := answer(req, http.StatusOK)
			return resp
		})}
		var err error
		if accept == "text/csv" {
			_, err = f.copyRaw(ctx, accept, io.Discard)
		} else {
			_, err = f.stream(ctx)
		}
		var text bytes.Buffer
		report(&text, err, false)
		if strings.Count(text.String(), "`runink fetch trace D1`") != 1 || !bytes.Contains(process.ErrorJSON(err), []byte("runink fetch trace D1")) {
			t.Errorf("%s: %s%s", accept, &text, process.ErrorJSON(err))
		}
		if code := schemas.CodeOf(err); code != schemas.CodeCancelled || statusOf(err) != 1 || !bytes.Contains(process.ErrorJSON(err), []byte(`"dispatchId":"D1"`)) {
			t.Errorf("%s: %s, %s", accept, code, process.ErrorJSON(err))
		}
	}
}

// A caller who sends no more on a connection has gone, as the server sees it, and is answered all the same: over TCP and over TLS.
func TestTheHalfOfAConnectionIsEnough(t *testing.T) {
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "begun\n")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		_, _ = io.WriteString(w, "ended\n")
	})
	plain, secure := httptest.NewServer(handler), httptest.NewTLSServer(handler)
	t.Cleanup(plain.Close)
	t.Cleanup(secure.Close)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw})
	if err := os.WriteFile(ca, cert, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, s := range []endpoint{{URL: plain.URL}, {URL: secure.URL, CA: ca}} {
		s.Token = schemas.NewSessionToken()
		api, err := newClient(s)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(api.http.CloseIdleConnections)
		var asked exchange
		resp, err := api.send(asked.watch(t.Context()), http.MethodPost, "/api/fetches", fetchBody{}, "text/csv", "")
		if err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewReader(resp.Body)
		if line, err := lines.ReadString('\n'); err != nil || line != "begun\n" {
			t.Errorf("%s: %q, %v", s.URL, line, err)
		}
		asked.endSending()
		if rest, err := io.ReadAll(lines); err != nil || string(rest) != "ended\n" {
			t.Errorf("%s: %q, %v", s.URL, rest, err)
		}
		_ = resp.Body.Close()
	}
}
