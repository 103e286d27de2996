package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// server answers a fetch as a test says; its client has a token that is sent nowhere else.
func server(t *testing.T, answer http.HandlerFunc) *client {
	t.Helper()
	s := httptest.NewServer(answer)
	t.Cleanup(s.Close)
	api, err := newClient(endpoint{URL: s.URL, Token: schemas.NewSessionToken()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.http.CloseIdleConnections)
	return api
}

// The exit status is the outcome's: it is unknown unless the server told it, however the stream ended.
func TestExitStatusOfAFetch(t *testing.T) {
	hangUp := func(w http.ResponseWriter) {
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
	trailer := func(outcome, detail string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Trailer", "Runbus-Outcome, Runbus-Error")
			_, _ = io.WriteString(w, "a,b\n")
			w.Header().Set("Runbus-Outcome", outcome)
			w.Header().Set("Runbus-Error", detail)
		}
	}
	lines := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) }
	}
	for name, c := range map[string]struct {
		raw    bool
		answer http.HandlerFunc
		status int
		text   string
	}{
		"completed":         {false, lines(`{"type":"result","outcome":"completed"}` + "\n"), 0, ""},
		"refused":           {false, lines(`{"type":"error","outcome":"refused","code":"runner_busy","message":"busy"}` + "\n"), 3, "busy"},
		"failed":            {false, lines(`{"type":"error","outcome":"failed","code":"bad_source","message":"bad"}` + "\n"), 1, "bad"},
		"unknown":           {false, lines(`{"type":"error","outcome":"outcome_unknown","code":"outcome_unknown","message":"who knows"}` + "\n"), 4, "who knows"},
		"no line":           {false, lines(""), 4, "cut before the outcome"},
		"half a line":       {false, lines(`{"type":"result","outcome":"comp`), 4, "cut before the outcome"},
		"an endless line":   {false, lines(`{"type":"result","outcome":"completed"}`), 4, "cut before the outcome"},
		"a damaged line":    {false, lines("hello\n"), 4, "damaged"},
		"cut":               {false, func(w http.ResponseWriter, _ *http.Request) { hangUp(w) }, 4, "cut before the outcome"},
		"no answer":         {false, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 4, "cut before the outcome"},
		"raw no answer":     {true, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 4, "cut before the outcome"},
		"problem":           {false, problemAnswer(409, `{"code":"runner_offline","detail":"away","outcome":"refused"}`), 3, "away"},
		"failed problem":    {true, problemAnswer(403, `{"code":"forbidden","detail":"no such folder","outcome":"failed"}`), 1, "no such folder"},
		"no server of ours": {true, problemAnswer(500, `<html>`), 1, "500"},
		"raw completed":     {true, trailer("completed", ""), 0, ""},
		"raw failed":        {true, trailer("failed", `{"code":"source_failed","message":"gone"}`), 1, "gone"},
		"raw no trailer":    {true, lines("a,b\n"), 4, "cut before the outcome"},
		"raw cut":           {true, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "a,b\n"); hangUp(w) }, 4, "cut before the outcome"},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fetch{api: server(t, c.answer), rows: &jsonRows{w: io.Discard}, progress: noProgress{}}
			var err error
			if c.raw {
				_, err = f.copyRaw(t.Context(), "text/csv", io.Discard)
			} else {
				_, err = f.stream(t.Context())
			}
			status := 0
			if err != nil {
				status = statusOf(err)
			}
			if status != c.status || err != nil && !strings.Contains(err.Error(), c.text) {
				t.Errorf("status %d, %v; want %d, %q", status, err, c.status, c.text)
			}
		})
	}
}

// However a fetch fails, its error tells the id that `runink fetch trace` takes, as text and as JSON.
func TestAFailedFetchTellsItsDispatch(t *testing.T) {
	const id = "01DISPATCH"
	within := func(header bool, text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			if header {
				w.Header().Set("Runbus-Dispatch-Id", id)
			}
			_, _ = io.WriteString(w, text)
		}
	}
	for name, c := range map[string]struct {
		raw    bool
		answer http.HandlerFunc
	}{
		"a problem": {false, problemAnswer(403, `{"code":"forbidden","detail":"no such folder","outcome":"failed","dispatchId":"`+id+`"}`)},
		"raw":       {true, problemAnswer(409, `{"code":"runner_offline","detail":"away","outcome":"refused","dispatchId":"`+id+`"}`)},
		"a line":    {false, within(true, `{"type":"error","outcome":"failed","code":"bad_source","message":"bad"}`+"\n")},
		"no header": {false, within(false, `{"type":"accepted","dispatchId":"`+id+`"}`+"\n"+`{"type":"error","outcome":"failed","code":"bad_source","message":"bad"}`+"\n")},
		"the end":   {false, within(false, `{"type":"error","dispatchId":"`+id+`","outcome":"failed","code":"bad_source","message":"bad"}`+"\n")},
		"damage":    {false, within(true, "hello\n")},
		"cut":       {true, within(true, "a,b\n")},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fetch{api: server(t, c.answer), rows: &jsonRows{w: io.Discard}, progress: noProgress{}}
			run := func() (resultLine, error) { return f.stream(t.Context()) }
			if c.raw {
				run = func() (resultLine, error) { return f.copyRaw(t.Context(), "text/csv", io.Discard) }
			}
			_, err := run()
			var text, object bytes.Buffer
			if report(&text, err, false) == 0 || strings.Count(text.String(), "`runink fetch trace "+id+"`") != 1 {
				t.Errorf("%s", &text)
			}
			var said struct {
				Error struct{ Message, DispatchID string }
			}
			report(&object, err, true)
			if err := json.Unmarshal(object.Bytes(), &said); err != nil || said.Error.DispatchID != id || said.Error.Message == "" {
				t.Errorf("%s, %v", &object, err)
			}
		})
	}
}

// Who was never reached has run nothing.
func TestNobodyThereIsNoUnknownOutcome(t *testing.T) {
	api := server(t, nil)
	// The port is taken, so that nobody else listens there, and nobody listens.
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd) //nolint:errcheck // nothing was written
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	at, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	api.base.Host = fmt.Sprintf("127.0.0.1:%d", at.(*syscall.SockaddrInet4).Port)
	f := &fetch{api: api, rows: &jsonRows{w: io.Discard}, progress: noProgress{}}
	if _, err := f.stream(t.Context()); err == nil || statusOf(err) != 1 || !strings.Contains(err.Error(), "can't be reached") {
		t.Errorf("status %d, %v", statusOf(err), err)
	}
}

func problemAnswer(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// After Ctrl-C the server is asked to cancel, and the outcome that it tells is the one that counts.
func TestCancelAsksTheServer(t *testing.T) {
	for _, raw := range []bool{false, true} {
		ctx, interrupt := context.WithCancel(t.Context())
		deleted := make(chan string, 1)
		api := server(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodDelete {
				deleted <- r.URL.Path
				return
			}
			w.Header().Set("Runbus-Dispatch-Id", "D1")
			w.Header().Set("Trailer", "Runbus-Outcome, Runbus-Error")
			_, _ = fmt.Fprintln(w, `{"type":"accepted"}`)
			_ = http.NewResponseController(w).Flush()
			if path := <-deleted; path != "/api/fetches/D1" {
				t.Errorf("cancelled %s", path)
			}
			const detail = `"outcome":"cancelled","code":"cancelled","message":"stopped by the runner"}`
			if raw {
				w.Header().Set("Runbus-Outcome", "cancelled")
				w.Header().Set("Runbus-Error", "{"+detail)
			} else {
				_, _ = fmt.Fprintln(w, `{"type":"error",`+detail)
			}
		})
		f := &fetch{api: api, progress: interruptOnAccept{interrupt}}
		var err error
		if raw {
			_, err = f.copyRaw(ctx, "text/csv", io.Discard)
		} else {
			_, err = f.stream(ctx)
		}
		if err == nil || err.Error() != "stopped by the runner" || statusOf(err) != 1 {
			t.Errorf("raw %v: %v", raw, err)
		}
	}
}

// interruptOnAccept presses Ctrl-C as soon as the fetch is accepted.
type interruptOnAccept struct{ interrupt func() }

func (i interruptOnAccept) accepted(acceptedLine) { i.interrupt() }
func (interruptOnAccept) progress(progressLine)   {}
func (interruptOnAccept) stop()                   {}

func TestTheTokenStaysAtHome(t *testing.T) {
	session := schemas.NewSessionToken()
	service, _, err := schemas.NewServiceToken("acme")
	if err != nil {
		t.Fatal(err)
	}
	for url, token := range map[string]string{
		"http://10.0.0.1:1": session, "http://example.test": session, "ftp://127.0.0.1": session, "127.0.0.1:1": session, "": session,
		"http://127.0.0.1:1": service, "https://example.test": session + "\n", "http://localhost:1": "",
	} {
		if _, err := newClient(endpoint{URL: url, Token: token}); err == nil || statusOf(err) != 2 {
			t.Errorf("%s: %v", url, err)
		} else if token != "" && strings.Contains(err.Error(), token) {
			t.Errorf("the error shows the token: %v", err)
		}
	}
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the token went on") }))
	defer elsewhere.Close()
	api := server(t, func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, elsewhere.URL, http.StatusTemporaryRedirect)
	})
	if err := api.call(t.Context(), http.MethodGet, "/api/runners", nil, nil); err == nil {
		t.Error("a redirect was taken as an answer")
	}
}

// The old file stays until the new one is whole, a failure leaves nothing beside it, and a device is not replaced.
func TestOutputFileIsReplacedWhole(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "out"), filepath.Join(dir, "link")
	write := func(name string, failure error) error {
		o := &output{}
		if err := o.openFile(name); err != nil {
			return err
		}
		o.buf = newBuffer(o.file)
		if _, err := o.buf.WriteString("new"); err != nil {
			t.Fatal(err)
		}
		return o.finish(failure)
	}
	content := func() string {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) > 2 {
			t.Errorf("%v, %v", entries, err)
		}
		return string(b)
	}
	if err := os.WriteFile(file, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	if err := write(file, io.ErrUnexpectedEOF); err == nil || content() != "old" {
		t.Errorf("after a failure: %v, %q", err, content())
	}
	if err := write(link, nil); err != nil || content() != "new" {
		t.Errorf("through a link: %v, %q", err, content())
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Error("the link was replaced")
	}
	if err := write(os.DevNull, nil); err != nil {
		t.Error(err)
	}
	if info, err := os.Stat(os.DevNull); err != nil || info.Mode().IsRegular() {
		t.Errorf("%s was replaced", os.DevNull)
	}
	if err := write(dir, nil); err == nil {
		t.Error("a folder was taken")
	}
}
