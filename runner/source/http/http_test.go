package httpsource

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
)

func TestMain(m *testing.M) { leak.Main(m) }

type result struct {
	columns []string
	rows    []string
	notices []string
	dials   []string
}

// server starts an HTTP server on loopback.
func server(t testing.TB, h http.HandlerFunc) *httptest.Server {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s
}

// fetch reads with settings in pairs; secret.NAME is a secret.
func fetch(t testing.TB, kv ...string) (result, error) {
	return fetchWith(t, context.Background(), connector{}, source.Limits{}, kv...)
}

func fetchWith(t testing.TB, ctx context.Context, c source.Connector, l source.Limits, kv ...string) (result, error) { //nolint:revive // t comes first in a test's helper
	t.Helper()
	mem := memory.NewCheckedAllocator(memory.DefaultAllocator)
	defer mem.AssertSize(t, 0)
	req := source.Request{Settings: map[string]string{}, Secrets: map[string]string{}}
	for i := 0; i < len(kv); i += 2 {
		if name, ok := strings.CutPrefix(kv[i], "secret."); ok {
			req.Secrets[name] = kv[i+1]
		} else {
			req.Settings[kv[i]] = kv[i+1]
		}
	}
	var res result
	var mu sync.Mutex
	dial := source.GuardedDial(&net.Dialer{})
	env := source.Env{Memory: mem, Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		mu.Lock()
		res.dials = append(res.dials, addr)
		mu.Unlock()
		return dial(ctx, network, addr)
	}}
	var buf bytes.Buffer
	out := source.NewOutput(&buf, l, nil)
	err := c.Fetch(ctx, env, req, out)
	mu.Lock()
	defer mu.Unlock()
	if err != nil {
		return res, err
	}
	if err := out.Close(); err != nil {
		return res, err
	}
	r, err := ipc.NewReader(&buf)
	if err != nil {
		return res, err
	}
	defer r.Release()
	for _, f := range r.Schema().Fields() {
		res.columns = append(res.columns, f.Name+":"+f.Type.String())
	}
	for r.Next() {
		b := r.RecordBatch()
		for i := range int(b.NumRows()) {
			var row []string
			for _, c := range b.Columns() {
				row = append(row, c.ValueStr(i))
			}
			res.rows = append(res.rows, strings.Join(row, "|"))
		}
	}
	for _, n := range out.Notices() {
		res.notices = append(res.notices, n.GetMessage())
	}
	return res, r.Err()
}

func (r result) want(t *testing.T, rows ...string) {
	t.Helper()
	if strings.Join(r.rows, "\n") != strings.Join(rows, "\n") {
		t.Errorf("got %q, want %q", r.rows, rows)
	}
}

func wantError(t *testing.T, err error, code schemas.Code, parts ...string) {
	t.Helper()
	if schemas.CodeOf(err) != code || err == nil {
		t.Errorf("code is %q, want %q: %v", schemas.CodeOf(err), code, err)
		return
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("%q lacks %q", err, p)
		}
	}
}

func TestFormats(t *testing.T) {
	s := server(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/json":
			_, _ = io.WriteString(w, `{"data":{"items":[{"a":1,"n":{"x":[1]}},{"a":2}]}}`)
		case "/jsonl":
			_, _ = io.WriteString(w, "{\"a\":1}\n{\"a\":2}\n")
		case "/csv":
			_, _ = io.WriteString(w, "a;b\n1;x\n")
		case "/gzip":
			if r.Header.Get("Accept-Encoding") != "gzip" {
				t.Error("no compression is asked for")
			}
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			_, _ = io.WriteString(z, `[{"a":1}]`)
			_ = z.Close()
		case "/none":
			w.WriteHeader(http.StatusNoContent)
		}
	})
	cases := []struct {
		path string
		kv   []string
		want []string
	}{
		{"/json", []string{"jsonPath", "data.items"}, []string{`1|{"x":[1]}`, "2|(null)"}},
		{"/jsonl", []string{"format", "jsonl"}, []string{"1", "2"}},
		{"/csv", []string{"format", "csv", "delimiter", ";"}, []string{"1|x"}},
		{"/gzip", nil, []string{"1"}},
		{"/none", nil, nil},
		{"/empty", nil, nil},
	}
	for _, c := range cases {
		got, err := fetch(t, append([]string{"url", s.URL + c.path}, c.kv...)...)
		if err != nil {
			t.Errorf("%s: %v", c.path, err)
			continue
		}
		got.want(t, c.want...)
		if len(got.dials) != 1 || got.dials[0] != s.Listener.Addr().String() {
			t.Errorf("%s: dialled %q", c.path, got.dials)
		}
	}
}

func TestAuth(t *testing.T) {
	s := server(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, `[{"a":%q,"k":%q,"u":%q,"x":%q}]`, r.Header.Get("Authorization"), r.Header.Get("X-Key"), r.Header.Get("User-Agent"), r.Header.Get("X-Name"))
	})
	cases := []struct {
		kv   []string
		want string
	}{
		{nil, "||runbus|"},
		{[]string{"header.X-Name", "n", "header.user-agent", "me"}, "||me|n"},
		{[]string{"auth", "basic", "username", "u", "secret.password", "p:w"}, "Basic dTpwOnc=||runbus|"},
		{[]string{"auth", "bearer", "secret.token", "t0k"}, "Bearer t0k||runbus|"},
		{[]string{"auth", "header", "authHeader", "X-Key", "secret.value", "v"}, "|v|runbus|"},
	}
	for _, c := range cases {
		got, err := fetch(t, append([]string{"url", s.URL}, c.kv...)...)
		if err != nil {
			t.Errorf("%q: %v", c.kv, err)
			continue
		}
		got.want(t, c.want)
	}
}

func TestBadSettings(t *testing.T) {
	u := "http://127.0.0.1:1/x"
	for _, kv := range [][]string{
		{}, {"url", "ftp://h/"}, {"url", "/x"}, {"url", "http://"}, {"url", "http://u:p@h/"}, {"url", "http://u@h/"}, {"url", "http:h"}, {"url", "http://[::1"}, {"url", u, "format", "xml"},
		{"url", u, "auth", "basic"}, {"url", u, "auth", "bearer"}, {"url", u, "auth", "header", "secret.value", "v"}, {"url", u, "secret.token", "t"}, {"url", u, "auth", "basic", "username", "u", "secret.token", "t"},
		{"url", u, "auth", "bearer", "secret.token", "a\r\nX: y"}, {"url", u, "header.X\n", "v"}, {"url", u, "header.X", "v\r\n"}, {"url", u, "header.Host", "v"}, {"url", u, "header.Authorization", "v"}, {"url", u, "header.Cookie", "v"},
		{"url", u, "header.X", "1", "header.x", "2"}, {"url", u, "header.X-Key", "1", "auth", "header", "authHeader", "x-key", "secret.value", "v"},
		{"url", u, "paging", "cursor"}, {"url", u, "paging", "cursor", "cursorPath", "next"}, {"url", u, "cursorPath", "next"}, {"url", u, "pageParam", "p"}, {"url", u, "paging", "link", "nextPath", "next", "format", "csv"},
		{"url", u, "paging", "cursor", "jsonPath", "data", "cursorPath", "data.next"}, {"url", u, "maxPages", "0"}, {"url", u, "timeout", "1ms"}, {"url", u, "method", "POST"}, {"url", u, "jsonPath", "a..b"},
	} {
		got, err := fetch(t, kv...)
		wantError(t, err, schemas.CodeBadSource)
		if len(got.dials) > 0 {
			t.Errorf("%q reached the source", kv)
		}
		for _, secret := range []string{"u:p@", "a\r\n"} {
			if err != nil && strings.Contains(err.Error(), secret) {
				t.Errorf("%q is shown: %v", secret, err)
			}
		}
	}
	err := New().Fetch(context.Background(), source.Env{}, source.Request{Settings: map[string]string{"url": u}, Query: "x"}, source.NewOutput(io.Discard, source.Limits{}, nil))
	wantError(t, err, schemas.CodeBadSource, "takes no query")
	err = New().Fetch(context.Background(), source.Env{}, source.Request{Settings: map[string]string{"url": u}}, source.NewOutput(io.Discard, source.Limits{}, nil))
	wantError(t, err, schemas.CodeForbiddenHop)
}

// Who has a secret and no auth is told which.
func TestASecretWithoutItsAuth(t *testing.T) {
	_, err := fetch(t, "url", "http://127.0.0.1:1/x", "secret.token", "t0k")
	wantError(t, err, schemas.CodeBadSource, `the secret "token" of source http is for auth=bearer`)
	var said *schemas.Error
	if !errors.As(err, &said) || said.Hint != "set auth=bearer, or leave that secret away" {
		t.Errorf("%v", err)
	}
}

func TestErrorsAreRedacted(t *testing.T) {
	const secret = "s3cr3t-t0ken-value"
	s := server(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprintf(w, "no access for %s\n\n%s", r.Header.Get("Authorization"), strings.Repeat("x", 2000))
	})
	for _, kv := range [][]string{{"auth", "bearer", "secret.token", secret}, {"auth", "basic", "username", "me", "secret.password", secret}} {
		_, err := fetch(t, append([]string{"url", s.URL + "/p?apikey=hidden"}, kv...)...)
		wantError(t, err, schemas.CodeSource, "answered 403 Forbidden", "no access for", "/p?…")
		if err == nil {
			continue
		}
		for _, no := range []string{secret, "bWU6czNjcjN0", "hidden"} {
			if strings.Contains(fmt.Sprintf("%s %+v", err, schemas.ToDetail(err)), no) {
				t.Errorf("%q is shown: %v", no, err)
			}
		}
		if len(err.Error()) > 800 {
			t.Errorf("the text has %d bytes", len(err.Error()))
		}
	}
	_, err := fetch(t, "url", "http://127.0.0.1:1/?k="+secret, "auth", "bearer", "secret.token", secret)
	wantError(t, err, schemas.CodeSource, "refused")
	if err != nil && strings.Contains(err.Error(), secret) {
		t.Error(err)
	}
	_, err = fetch(t, "url", "http://169.254.169.254/latest/meta-data")
	wantError(t, err, schemas.CodeForbiddenHop)
}

func TestRedirects(t *testing.T) {
	foreign := server(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metadata" {
			http.Redirect(w, r, "http://169.254.169.254/", http.StatusFound)
			return
		}
		fmt.Fprintf(w, `[{"auth":%q,"x":%q}]`, r.Header.Get("Authorization"), r.Header.Get("X-Name"))
	})
	s := server(t, func(w http.ResponseWriter, r *http.Request) {
		to := map[string]string{"/same": "/end?q=1", "/foreign": foreign.URL + "/", "/loop": "/loop", "/ftp": "ftp://h/", "/file": "file:///etc/passwd", "/user": "http://u:p@" + r.Host + "/", "/metadata": foreign.URL + "/metadata"}[r.URL.Path]
		if to != "" {
			w.Header().Set("Location", to)
			w.WriteHeader(http.StatusFound)
			return
		}
		fmt.Fprintf(w, `[{"auth":%q,"x":%q}]`, r.Header.Get("Authorization"), r.Header.Get("X-Name"))
	})
	auth := []string{"auth", "bearer", "secret.token", "t0k3n-abcdef", "header.X-Name", "n"}
	get := func(path string, kv ...string) (result, error) {
		return fetch(t, append(append([]string{"url", s.URL + path}, auth...), kv...)...)
	}
	got, err := get("/same")
	if err != nil {
		t.Fatal(err)
	}
	got.want(t, "Bearer t0k3n-abcdef|n")
	got, err = get("/foreign")
	wantError(t, err, schemas.CodeSource, "another origin")
	if len(got.dials) != 1 {
		t.Errorf("dialled %q", got.dials)
	}
	got, err = get("/foreign", "crossOrigin", "anonymous")
	if err != nil {
		t.Fatal(err)
	}
	got.want(t, "|")
	if len(got.dials) != 2 || got.dials[1] != foreign.Listener.Addr().String() {
		t.Errorf("dialled %q", got.dials)
	}
	_, err = get("/metadata", "crossOrigin", "anonymous")
	wantError(t, err, schemas.CodeForbiddenHop)
	_, err = get("/loop")
	wantError(t, err, schemas.CodeSource, "more than 5 redirects")
	for _, path := range []string{"/ftp", "/file", "/user"} {
		_, err = get(path, "crossOrigin", "anonymous")
		wantError(t, err, schemas.CodeSource, "redirect")
	}
}

func TestRetries(t *testing.T) {
	var mu sync.Mutex
	calls := 0
	status := http.StatusTooManyRequests
	s := server(t, func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		calls++
		if calls < 3 {
			w.Header().Set("Retry-After", "500")
			w.WriteHeader(status)
			return
		}
		if status == http.StatusInternalServerError {
			w.WriteHeader(status)
			return
		}
		_, _ = io.WriteString(w, `[{"a":1}]`)
	})
	var waited []time.Duration
	c := connector{pause: func(_ context.Context, d time.Duration) error { waited = append(waited, d); return nil }}
	got, err := fetchWith(t, context.Background(), c, source.Limits{}, "url", s.URL)
	if err != nil || len(got.rows) != 1 || len(waited) != 2 || waited[0] != 500*time.Second {
		t.Errorf("%v %v, waited %v", got.rows, err, waited)
	}
	// No time left for what Retry-After asks: the answer is the error.
	mu.Lock()
	calls, waited = 0, nil
	mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	_, err = fetchWith(t, ctx, c, source.Limits{}, "url", s.URL)
	wantError(t, err, schemas.CodeSource, "429")
	if len(waited) != 0 {
		t.Errorf("waited %v", waited)
	}
	mu.Lock()
	calls, status = 10, http.StatusInternalServerError
	mu.Unlock()
	_, err = fetchWith(t, context.Background(), c, source.Limits{}, "url", s.URL)
	wantError(t, err, schemas.CodeSource, "500")
	if len(waited) != 0 {
		t.Errorf("a 500 was tried again after %v", waited)
	}
	// A pause ends with its context.
	ctx, stop := context.WithCancel(context.Background())
	mu.Lock()
	calls, status = 0, http.StatusServiceUnavailable
	mu.Unlock()
	sleeping := connector{pause: func(ctx context.Context, d time.Duration) error {
		stop()
		return (&client{}).sleep(ctx, d)
	}}
	if _, err = fetchWith(t, ctx, sleeping, source.Limits{}, "url", s.URL); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for s, want := range map[string]time.Duration{
		"": 0, "5": 5 * time.Second, " 5 ": 5 * time.Second, "-5": 0, "x": 0, "99999": 10 * time.Minute,
		"Thu, 01 Jan 2026 00:00:30 GMT": 30 * time.Second, "Wed, 31 Dec 2025 00:00:00 GMT": 0,
	} {
		if got := retryAfter(s, now); got != want {
			t.Errorf("%q: %s, want %s", s, got, want)
		}
	}
}

func TestBounds(t *testing.T) {
	s := server(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/cut":
			w.Header().Set("Content-Length", "1000")
			_, _ = io.WriteString(w, `[{"a":1},`)
		case "/bomb":
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			_, _ = z.Write(bytes.Repeat([]byte(" "), 5<<20))
			_ = z.Close()
		case "/endless":
			_, _ = io.WriteString(w, `[{"a":1}`)
			for r.Context().Err() == nil {
				if _, err := io.WriteString(w, strings.Repeat(`,{"a":1}`, 1000)); err != nil {
					return
				}
			}
		case "/hang":
			_, _ = io.WriteString(w, `[{"a":1},`)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		case "/html":
			_, _ = io.WriteString(w, `<!doctype html>`)
		}
	})
	_, err := fetch(t, "url", s.URL+"/cut")
	wantError(t, err, schemas.CodeSource, "/cut", "EOF")
	_, err = fetch(t, "url", s.URL+"/bomb", "maxBodyBytes", "1000000")
	wantError(t, err, schemas.CodeSource, "maxBodyBytes=1000000")
	_, err = fetch(t, "url", s.URL+"/html")
	wantError(t, err, schemas.CodeSource, "not JSON")
	got, err := fetchWith(t, context.Background(), connector{}, source.Limits{MaxRows: 30_000}, "url", s.URL+"/endless")
	if err != nil || len(got.rows) != 30_000 || len(got.notices) != 1 {
		t.Errorf("%d rows, %q, %v", len(got.rows), got.notices, err)
	}
	_, err = fetch(t, "url", s.URL+"/hang", "timeout", "1s")
	wantError(t, err, schemas.CodeSource, "within 1s")
}

// A cancelled fetch leaves the source.
func TestCancel(t *testing.T) {
	reached, left := make(chan struct{}), make(chan struct{})
	s := server(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, `[`)
		w.(http.Flusher).Flush()
		close(reached)
		<-r.Context().Done()
		close(left)
	})
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		<-reached
		cancel()
	}()
	if _, err := fetchWith(t, ctx, connector{}, source.Limits{}, "url", s.URL); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	<-left
}

// A link never leads from https to http, whatever crossOrigin says.
func TestLinksKeepHTTPS(t *testing.T) {
	origin, err := parseURL("https://api.example/v1/items")
	if err != nil {
		t.Fatal(err)
	}
	c := &client{config: &config{url: origin, anonymous: true}}
	if u, err := c.next(origin, "http://api.example/v1/items?page=2", "redirect"); err == nil {
		t.Errorf("%s may be followed", u)
	}
	for link, want := range map[string]string{"?page=2": "https://api.example/v1/items?page=2", "//other.example/": "https://other.example/", "https://API.example:443/x#f": "https://API.example:443/x"} {
		if u, err := c.next(origin, link, "redirect"); err != nil || u.String() != want {
			t.Errorf("%s: %v %v, want %s", link, u, err, want)
		}
	}
	other, err := parseURL("https://api.example:8443/")
	if err != nil || sameOrigin(origin, other) {
		t.Error("another port is the same origin")
	}
}
