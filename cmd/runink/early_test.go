package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"

	"github.com/org-runink/runbus/cmd/internal/process"
)

// early answers as a control plane that was asked for the id of the dispatch: with an interim response, and then as then does.
func early(t *testing.T, then http.HandlerFunc) *client {
	t.Helper()
	return server(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			if prefer := r.Header.Get("Prefer"); prefer != "dispatch-id" {
				t.Errorf("Prefer: %q", prefer)
			}
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Runbus-Dispatch-Id", "D1")
			w.WriteHeader(http.StatusProcessing)
		}
		then(w, r)
	})
}

// raw writes text on the connection and closes it, behind the server's back.
func raw(t *testing.T, text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		if _, err := io.WriteString(conn, text); err != nil {
			t.Error(err)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
}

// What is known of a dispatch when its id came ahead of the answer: the answer is what counts, and where none can be read the outcome is
// unknown, and the error tells the id.
func TestAnIDThatCameBeforeTheAnswer(t *testing.T) {
	const trace = "`runink fetch trace D1`"
	for name, c := range map[string]struct {
		then   http.HandlerFunc
		status int
		text   string
	}{
		"completed": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Trailer", "Runbus-Outcome")
			_, _ = io.WriteString(w, "a,b\n")
			w.Header().Set("Runbus-Outcome", "completed")
		}, 0, ""},
		"killed":             {raw(t, ""), 4, trace},
		"garbage":            {raw(t, "what is this\r\n\r\n"), 4, trace},
		"half a status line": {raw(t, "HTTP/1.1 20"), 4, trace},
		"half a header":      {raw(t, "HTTP/1.1 200 OK\r\nContent-Ty"), 4, trace},
		"half a problem":     {raw(t, "HTTP/1.1 409 Conflict\r\nContent-Length: 99\r\n\r\n{\"code\":"), 4, trace},
		"half the rows":      {raw(t, "HTTP/1.1 200 OK\r\nContent-Length: 99\r\nRunbus-Dispatch-Id: D1\r\n\r\na,b\n"), 4, trace},
		"a proxy's word":     {problemAnswer(502, "<html>"), 4, trace},
		"refused":            {problemAnswer(409, `{"code":"runner_offline","detail":"away","outcome":"refused","dispatchId":"D1"}`), 3, "away"},
		"failed":             {problemAnswer(403, `{"code":"forbidden","detail":"no such folder","outcome":"failed","dispatchId":"D1"}`), 1, "no such folder"},
	} {
		for _, accept := range []string{"text/csv", "application/vnd.apache.arrow.stream"} {
			t.Run(name+" "+accept, func(t *testing.T) {
				f := &fetch{api: early(t, c.then), progress: noProgress{}, earlyID: true}
				var rows, text bytes.Buffer
				result, err := f.copyRaw(t.Context(), accept, &rows)
				if status := report(&text, err, false); status != c.status || !strings.Contains(text.String(), c.text) {
					t.Errorf("status %d, %s", status, &text)
				}
				switch {
				case c.status == 0 && (result.DispatchID != "D1" || rows.String() != "a,b\n"):
					t.Errorf("the result is %+v, its rows %q", result, &rows)
				case c.status != 0 && !bytes.Contains(process.ErrorJSON(err), []byte(`"dispatchId":"D1"`)):
					t.Errorf("%s", process.ErrorJSON(err))
				}
			})
		}
	}
}

// After Ctrl-C the dispatch whose id came ahead of the answer is cancelled by it. The outcome that is told then counts; it is unknown where
// none is.
func TestCancelByAnIDThatCameBeforeTheAnswer(t *testing.T) {
	for name, c := range map[string]struct {
		refusal http.HandlerFunc // of the cancel; nil: it is taken, and the outcome told
		status  int
		code    string
	}{
		"the outcome is told":   {nil, 1, "cancelled"},
		"no such one runs here": {problemAnswer(404, `{"code":"not_found","detail":"no such fetch is running"}`), 4, "outcome_unknown"},
		"not now":               {problemAnswer(503, `{"code":"unavailable","detail":"not now"}`), 4, "outcome_unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, interrupt := context.WithCancel(t.Context())
			defer interrupt()
			ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got1xxResponse: func(int, textproto.MIMEHeader) error {
				interrupt()
				return nil
			}})
			deleted := make(chan string, 1)
			api := early(t, func(w http.ResponseWriter, r *http.Request) {
				switch {
				case r.Method == http.MethodDelete:
					deleted <- r.URL.Path
					if c.refusal != nil {
						c.refusal(w, r)
					}
				case c.refusal == nil:
					deleted <- <-deleted
					problemAnswer(409, `{"code":"cancelled","detail":"stopped by the runner","outcome":"cancelled","dispatchId":"D1"}`)(w, r)
				default:
					<-r.Context().Done() // the caller goes
				}
			})
			f := &fetch{api: api, progress: noProgress{}, earlyID: true}
			_, err := f.copyRaw(ctx, "text/csv", io.Discard)
			if path := <-deleted; path != "/api/fetches/D1" {
				t.Errorf("cancelled %s", path)
			}
			var text, object bytes.Buffer
			if status := report(&text, err, false); status != c.status || strings.Count(text.String(), "`runink fetch trace D1`") != 1 {
				t.Errorf("status %d, %s", status, &text)
			}
			var said struct {
				Error struct{ Code, DispatchID string }
			}
			report(&object, err, true)
			if err := json.Unmarshal(object.Bytes(), &said); err != nil || said.Error.Code != c.code || said.Error.DispatchID != "D1" {
				t.Errorf("%s, %v", &object, err)
			}
		})
	}
}

// Nobody is asked for an interim response who was not meant to be: proxies take it for the answer.
func TestNoIDIsAskedForByItself(t *testing.T) {
	api := server(t, func(w http.ResponseWriter, r *http.Request) {
		if prefer, has := r.Header["Prefer"]; has {
			t.Errorf("%s: Prefer: %q", r.Header.Get("Accept"), prefer)
		}
		w.Header().Set("Trailer", "Runbus-Outcome")
		_, _ = io.WriteString(w, `{"type":"result","outcome":"completed"}`+"\n")
		w.Header().Set("Runbus-Outcome", "completed")
	})
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, _ textproto.MIMEHeader) error {
		t.Errorf("an interim response %d", code)
		return nil
	}})
	f := &fetch{api: api, rows: &jsonRows{w: io.Discard}, progress: noProgress{}}
	if _, err := f.stream(ctx); err != nil {
		t.Error(err)
	}
	for _, accept := range []string{"text/csv", "application/vnd.apache.arrow.stream"} {
		if _, err := f.copyRaw(ctx, accept, io.Discard); err != nil {
			t.Errorf("%s: %v", accept, err)
		}
	}
}
