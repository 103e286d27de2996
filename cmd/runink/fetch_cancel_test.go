package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// halves is a connection in memory whose directions end apart, as TCP's.
type halves struct {
	in, out net.Conn
	deaf    bool // nobody passes on that one of them ended
}

func (h *halves) Read(b []byte) (int, error)         { return h.in.Read(b) }
func (h *halves) Write(b []byte) (int, error)        { return h.out.Write(b) }
func (h *halves) LocalAddr() net.Addr                { return h.in.LocalAddr() }
func (h *halves) RemoteAddr() net.Addr               { return h.in.RemoteAddr() }
func (h *halves) SetReadDeadline(t time.Time) error  { return h.in.SetReadDeadline(t) }
func (h *halves) SetWriteDeadline(t time.Time) error { return h.out.SetWriteDeadline(t) }

func (h *halves) SetDeadline(t time.Time) error {
	_ = h.in.SetReadDeadline(t)
	return h.out.SetWriteDeadline(t)
}

func (h *halves) Close() error {
	_ = h.in.Close()
	return h.out.Close()
}

func (h *halves) CloseWrite() error {
	if h.deaf {
		return nil
	}
	return h.out.Close()
}

// backlog is a listener in memory.
type backlog struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (l *backlog) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *backlog) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *backlog) Addr() net.Addr { return &net.UnixAddr{Name: "memory", Net: "unix"} }

// within is a client of a real server, with connections in memory between: all of it runs by the time of the test's bubble. stop ends it.
func within(handler http.HandlerFunc, deaf bool) (api *client, stop func()) {
	l := &backlog{conns: make(chan net.Conn), done: make(chan struct{})}
	var handling sync.WaitGroup
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handling.Add(1)
		defer handling.Done()
		handler(w, r)
	})}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = server.Serve(l)
	}()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		there, here := net.Pipe()
		back, from := net.Pipe()
		select {
		case l.conns <- &halves{in: there, out: back}:
			return &halves{in: from, out: here, deaf: deaf}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}}
	api = &client{base: &url.URL{Scheme: "http", Host: "127.0.0.1:1"}, token: schemas.NewSessionToken(), http: &http.Client{Transport: transport}}
	return api, func() {
		transport.CloseIdleConnections()
		handling.Wait()
		_ = server.Close()
		<-ended
	}
}

// Whatever becomes of the cancel that Ctrl-C asks for, the control plane has the fetch stopped within a second, and an outcome that it tells
// is the one that counts.
func TestEveryCtrlCStopsTheFetch(t *testing.T) {
	const elsewhere = `{"code":"not_found","detail":"no such fetch is running","hint":"it may have ended already"}`
	notFound := problemAnswer(http.StatusNotFound, elsewhere)
	never := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	for name, c := range map[string]struct {
		deleted  http.HandlerFunc
		deaf     bool          // a proxy is between that does not pass on that this side sends no more
		ends     time.Duration // after the cancel; 0: when the caller has gone
		outcome  string
		status   int
		code     schemas.Code
		text     string
		unheeded bool // it ends by itself, and nobody has to stop it
	}{
		"it runs at another replica":         {deleted: notFound, outcome: "cancelled", status: 1, code: "cancelled", text: "so it ended"},
		"at another, behind a proxy":         {deleted: notFound, deaf: true, outcome: "cancelled", status: 4, code: "outcome_unknown", text: "cancelled before"},
		"it can't be cancelled now":          {deleted: problemAnswer(503, `{"code":"unavailable","detail":"not now"}`), outcome: "cancelled", status: 1, code: "cancelled", text: "so it ended"},
		"nobody answers the cancel":          {deleted: never, outcome: "cancelled", status: 1, code: "cancelled", text: "so it ended"},
		"it ended just then":                 {deleted: notFound, ends: 300 * time.Millisecond, outcome: "completed", unheeded: true},
		"it ended, behind a proxy":           {deleted: notFound, deaf: true, ends: 300 * time.Millisecond, outcome: "completed", unheeded: true},
		"it ended badly just then":           {deleted: notFound, ends: 300 * time.Millisecond, outcome: "failed", status: 1, code: "failed", text: "so it ended", unheeded: true},
		"it ended, and the outcome is lost":  {deleted: notFound, ends: time.Minute, outcome: "completed", status: 4, code: "outcome_unknown", text: "cancelled before", unheeded: true},
		"it is asked to stop, and takes 10s": {deleted: func(http.ResponseWriter, *http.Request) {}, ends: 10 * time.Second, outcome: "cancelled", status: 1, code: "cancelled", text: "so it ended", unheeded: true},
		"the server knows no outcome":        {deleted: notFound, outcome: "outcome_unknown", status: 4, code: "outcome_unknown", text: "so it ended"},
	} {
		for _, way := range []string{"ndjson", "csv", "csv with an early id"} {
			t.Run(name+" "+way, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					ctx, interrupt := context.WithCancel(t.Context())
					defer interrupt()
					var asked, stopped time.Time
					press := func() {
						if asked.IsZero() {
							asked = time.Now()
							interrupt()
						}
					}
					ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got1xxResponse: func(int, textproto.MIMEHeader) error {
						press()
						return nil
					}})
					f := &fetch{rows: &jsonRows{w: io.Discard}, earlyID: way == "csv with an early id", progress: interruptOnAccept{press}}
					api, stop := within(func(w http.ResponseWriter, r *http.Request) {
						if r.Method == http.MethodDelete {
							if r.URL.Path != "/api/fetches/D1" {
								t.Errorf("cancelled %s", r.URL.Path)
							}
							c.deleted(w, r)
							return
						}
						_, _ = io.Copy(io.Discard, r.Body)
						w.Header().Set("Runbus-Dispatch-Id", "D1")
						w.Header().Set("Trailer", "Runbus-Outcome, Runbus-Error")
						if f.earlyID { // the dispatch has not begun, and there is no row for long
							w.WriteHeader(http.StatusProcessing)
						} else {
							_, _ = io.WriteString(w, `{"type":"accepted","dispatchId":"D1"}`+"\n")
							_ = http.NewResponseController(w).Flush()
						}
						if c.unheeded {
							<-time.After(c.ends)
						} else {
							<-r.Context().Done()
							stopped = time.Now()
						}
						tell(w, way == "ndjson", c.outcome)
					}, c.deaf)
					f.api = api
					var err error
					if way == "ndjson" {
						_, err = f.stream(ctx)
					} else {
						_, err = f.copyRaw(ctx, "text/csv", io.Discard)
					}
					stop()
					if took := stopped.Sub(asked); !c.unheeded && (took < 0 || took >= time.Second) {
						t.Errorf("it was stopped after %s", took)
					}
					var text bytes.Buffer
					status := report(&text, err, false)
					if status != c.status || !strings.Contains(text.String(), c.text) || err != nil && schemas.CodeOf(err) != c.code {
						t.Errorf("status %d, %s: %s", status, schemas.CodeOf(err), &text)
					}
					if n := strings.Count(text.String(), "`runink fetch trace D1`"); err != nil && n != 1 {
						t.Errorf("the way to what became of it is told %d times: %s", n, &text)
					}
				})
			})
		}
	}
}

// tell writes the end of an answer.
func tell(w http.ResponseWriter, lines bool, outcome string) {
	code := outcome
	said := `"code":"` + code + `","message":"so it ended"}`
	switch {
	case lines && outcome == "completed":
		_, _ = io.WriteString(w, `{"type":"result","outcome":"completed"}`+"\n")
	case lines:
		_, _ = io.WriteString(w, `{"type":"error","outcome":"`+outcome+`",`+said+"\n")
	default:
		w.Header().Set("Runbus-Outcome", outcome)
		if outcome != "completed" {
			w.Header().Set("Runbus-Error", "{"+said)
		}
	}
}
