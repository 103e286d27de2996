package cp_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/schemas"
)

// scene is a control plane in this process with one token of every kind.
type scene struct {
	*cp.ControlPlane
	url    string
	client *http.Client
	tokens map[string]string // by who
	other  string            // a tenant of its own
}

// The callers of the matrix.
const (
	nobody   = "nobody"
	garbage  = "garbage"
	reader   = "READER"
	writer   = "WRITER"
	admin    = "ORG_ADMIN"
	operator = "operator"
	stranger = "another tenant's ORG_ADMIN"
)

func newScene(t *testing.T) *scene {
	t.Helper()
	return newSceneWith(t, func(*cp.Config) {})
}

func newSceneWith(t *testing.T, change func(*cp.Config)) *scene {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	config := cp.Config{
		DataDir: filepath.Join(t.TempDir(), "data"), HTTP: "127.0.0.1:0", NATS: "127.0.0.1:0", StopGrace: time.Second,
		Log: slog.New(slog.NewTextHandler(bustest.Output(t), nil)),
	}
	change(&config)
	c, err := cp.Start(ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Stop)
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	e := c.Endpoints()
	s := &scene{ControlPlane: c, url: e.HTTP, client: &http.Client{Transport: transport}, other: "umbrella", tokens: map[string]string{
		nobody: "", garbage: "rst1.garbage", admin: tokenIn(t, e.AdminToken), operator: tokenIn(t, filepath.Join(e.DataDir, "operator.token")),
	}}
	var made struct{ Token string }
	s.must(t, operator, http.MethodPost, "/api/tenants", `{"name":"umbrella"}`, &made)
	s.tokens[stranger] = made.Token
	s.must(t, admin, http.MethodPost, "/api/people", `{"name":"rita","role":"READER"}`, &made)
	s.tokens[reader] = made.Token
	s.must(t, admin, http.MethodPost, "/api/people", `{"name":"walt","role":"WRITER"}`, &made)
	s.tokens[writer] = made.Token
	return s
}

func tokenIn(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// answer is a response, read to its end.
type answer struct {
	*http.Response
	body []byte
}

// problem is the body as problem details, whose invariants it checks.
func (a answer) problem(t *testing.T) (p struct {
	Type, Title, Detail, Code, Hint string
	Status                          int
}) {
	t.Helper()
	if err := json.Unmarshal(a.body, &p); err != nil {
		t.Errorf("%s %s: %v in %q", a.Request.Method, a.Request.URL.Path, err, a.body)
	}
	if a.Header.Get("Content-Type") != "application/problem+json" || p.Type != "about:blank" || p.Status != a.StatusCode ||
		p.Title != http.StatusText(a.StatusCode) || p.Code == "" || p.Detail == "" {
		t.Errorf("%s %s: not problem details: %s %s", a.Request.Method, a.Request.URL.Path, a.Header.Get("Content-Type"), a.body)
	}
	return p
}

func (s *scene) call(t *testing.T, who, method, path, body string, header ...string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if token := s.tokens[who]; token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := s.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp, b}
}

func (s *scene) must(t *testing.T, who, method, path, body string, into any) {
	t.Helper()
	a := s.call(t, who, method, path, body)
	if a.StatusCode >= 300 {
		t.Fatalf("%s %s as %s: %d %s", method, path, who, a.StatusCode, a.body)
	}
	if into != nil {
		if err := json.Unmarshal(a.body, into); err != nil {
			t.Fatal(err)
		}
	}
}

// operations are all of the OpenAPI document that s serves, as `METHOD path`.
func (s *scene) operations(t *testing.T) []string {
	t.Helper()
	var document struct {
		Paths map[string]map[string]json.RawMessage
	}
	s.must(t, nobody, http.MethodGet, "/openapi.json", "", &document)
	var all []string
	for path, methods := range document.Paths {
		for method := range methods {
			all = append(all, strings.ToUpper(method)+" "+path)
		}
	}
	slices.Sort(all)
	return all
}

// Who gets which status from each operation. The document lists the operations, so that a new one needs a row here.
func TestWhoMayDoWhat(t *testing.T) {
	s := newScene(t)
	type row struct {
		body string
		want map[string]int
	}
	statuses := func(readerS, writerS, adminS, operatorS, strangerS int) map[string]int {
		return map[string]int{reader: readerS, writer: writerS, admin: adminS, operator: operatorS, stranger: strangerS}
	}
	table := map[string]row{
		"POST /api/fetches":                     {`{"source":{"kind":"file"}}`, statuses(403, 400, 400, 403, 400)},
		"GET /api/fetches":                      {"", statuses(200, 200, 200, 403, 200)},
		"GET /api/fetches/{dispatchId}":         {"", statuses(404, 404, 404, 403, 404)},
		"GET /api/fetches/{dispatchId}/events":  {"", statuses(404, 404, 404, 403, 404)},
		"GET /api/fetches/running":              {"", statuses(200, 200, 200, 403, 200)},
		"DELETE /api/fetches/{dispatchId}":      {"", statuses(403, 404, 404, 403, 404)},
		"GET /api/runners":                      {"", statuses(200, 200, 200, 403, 200)},
		"POST /api/runners":                     {`{"name":"x","address":"nowhere"}`, statuses(403, 400, 400, 403, 400)},
		"GET /api/runners/{id}":                 {"", statuses(404, 404, 404, 403, 404)},
		"PATCH /api/runners/{id}":               {"{}", statuses(403, 404, 404, 403, 404)},
		"DELETE /api/runners/{id}":              {"", statuses(403, 404, 404, 403, 404)},
		"POST /api/runners/{id}/token":          {"", statuses(403, 404, 404, 403, 404)},
		"POST /api/runners/{id}/revoke":         {"", statuses(403, 404, 404, 403, 404)},
		"POST /api/runners/{id}/connect":        {"", statuses(403, 404, 404, 403, 404)},
		"GET /api/runners/{id}/health":          {"", statuses(404, 404, 404, 403, 404)},
		"DELETE /api/runner-tokens/{id}":        {"", statuses(403, 404, 404, 403, 404)},
		"POST /api/runners/{id}/release":        {"", statuses(403, 403, 404, 403, 404)},
		"GET /api/service-account-keys":         {"", statuses(403, 403, 200, 403, 200)},
		"POST /api/service-account-keys":        {`{"name":"nope","tenant":"elsewhere"}`, statuses(403, 403, 403, 403, 403)},
		"DELETE /api/service-account-keys/{id}": {"", statuses(403, 403, 404, 403, 404)},
		"GET /api/tenants":                      {"", statuses(403, 403, 403, 200, 403)},
		"POST /api/tenants":                     {`{"name":"umbrella"}`, statuses(403, 403, 403, 409, 403)},
		"POST /api/tenants/{name}/session":      {"", statuses(403, 403, 403, 404, 403)},
		"GET /api/people":                       {"", statuses(403, 403, 200, 403, 200)},
		"POST /api/people":                      {`{"name":"owner","role":"READER"}`, statuses(403, 403, 409, 403, 409)},
		"DELETE /api/people/{name}":             {"", statuses(403, 403, 404, 403, 404)},
		"POST /api/people/{name}/session":       {"", statuses(403, 403, 404, 403, 404)},
		"GET /api/session":                      {"", statuses(200, 200, 200, 200, 200)},
		"GET /api/audit":                        {"", statuses(403, 403, 200, 403, 200)},
	}
	if got, want := s.operations(t), slices.Sorted(maps.Keys(table)); !slices.Equal(got, want) {
		t.Errorf("the document has\n%s\nthe table\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for operation, row := range table {
		method, path, _ := strings.Cut(operation, " ")
		path = strings.NewReplacer("{dispatchId}", "01J0000000000000000000NONE", "{id}", "sa-none", "{name}", "none").Replace(path)
		for _, who := range []string{nobody, garbage} {
			a := s.call(t, who, method, path, row.body)
			if a.StatusCode != http.StatusUnauthorized || string(a.body) != `{"error":"unauthorized"}` ||
				a.Header.Get("Content-Type") != "application/json" || !strings.HasPrefix(a.Header.Get("WWW-Authenticate"), "Bearer") {
				t.Errorf("%s as %s: %d %q", operation, who, a.StatusCode, a.body)
			}
		}
		for who, want := range row.want {
			a := s.call(t, who, method, path, row.body)
			if a.StatusCode != want {
				t.Errorf("%s as %s: %d, want %d: %s", operation, who, a.StatusCode, want, a.body)
			} else if want >= 400 {
				p := a.problem(t)
				if code := map[int]string{403: "forbidden"}[want]; code != "" && p.Code != code {
					t.Errorf("%s as %s: code %q", operation, who, p.Code)
				}
			}
		}
	}
	// What doesn't even look like a bearer's token is no session either.
	for _, header := range []string{"Basic eDp5", "Bearer", "Bearer ", "bearer " + s.tokens[admin], s.tokens[admin], "Bearer rsk1.local.SUAAA"} {
		if a := s.call(t, nobody, http.MethodGet, "/api/session", "", "Authorization", header); a.StatusCode != http.StatusUnauthorized && !strings.HasPrefix(header, "bearer") {
			t.Errorf("Authorization %.10q: %d", header, a.StatusCode)
		}
	}
}

// Nobody sees or touches what belongs to another tenant, and a token is shown once.
func TestTenantsAreApart(t *testing.T) {
	s := newScene(t)
	var made struct{ ID, Token string }
	s.must(t, admin, http.MethodPost, "/api/service-account-keys", `{"name":"edge"}`, &made)
	if made.ID != "sa-edge" || !strings.HasPrefix(made.Token, "rsk1.local.") {
		t.Errorf("minted %s", made.ID)
	}
	if a := s.call(t, admin, http.MethodGet, "/api/service-account-keys", ""); !strings.Contains(string(a.body), "sa-edge") ||
		strings.Contains(string(a.body), "rsk1.") || strings.Contains(string(a.body), made.Token[len("rsk1.local."):]) {
		t.Errorf("the list of keys is %s", a.body)
	}
	for _, path := range []string{"/api/service-account-keys", "/api/people", "/api/audit", "/api/runners"} {
		if a := s.call(t, stranger, http.MethodGet, path, ""); a.StatusCode != http.StatusOK || strings.Contains(string(a.body), "edge") || strings.Contains(string(a.body), "rita") {
			t.Errorf("%s shows another tenant: %s", path, a.body)
		}
	}
	if a := s.call(t, stranger, http.MethodDelete, "/api/service-account-keys/sa-edge", ""); a.StatusCode != http.StatusNotFound {
		t.Errorf("a stranger revokes the key: %d %s", a.StatusCode, a.body)
	}
	a := s.call(t, admin, http.MethodPost, "/api/service-account-keys", `{"name":"theirs","tenant":"umbrella"}`)
	if p := a.problem(t); a.StatusCode != http.StatusForbidden || !strings.Contains(p.Detail, "can't mint a key for another tenant") {
		t.Errorf("a key for another tenant: %d %s", a.StatusCode, a.body)
	}
	for _, name := range []string{"", "admin", "root", "system", "console", "Edge", "a.b"} {
		a := s.call(t, admin, http.MethodPost, "/api/service-account-keys", fmt.Sprintf(`{"name":%q}`, name))
		if p := a.problem(t); a.StatusCode != http.StatusBadRequest || !strings.Contains(p.Detail, "key name") {
			t.Errorf("a key named %q: %d %s", name, a.StatusCode, a.body)
		}
	}
	s.must(t, admin, http.MethodDelete, "/api/service-account-keys/sa-edge", "", nil)

	// Each of those is in the audit of its tenant, without a secret.
	audit := s.call(t, admin, http.MethodGet, "/api/audit?limit=1000", "")
	for _, want := range []string{`"key.mint"`, `"key.revoke"`, `"person.create"`, `"forbidden"`} {
		if !strings.Contains(strings.ReplaceAll(string(audit.body), " ", ""), want) {
			t.Errorf("%s is not in the audit: %s", want, audit.body)
		}
	}
	for _, secret := range []string{"rsk1.", "rst1.", made.Token[len("rsk1.local."):]} {
		if strings.Contains(string(audit.body), secret) {
			t.Errorf("a secret is in the audit")
		}
	}
}

// What is wrong with a request is told as problem details, before anything is done.
func TestRequestsThatAreRefused(t *testing.T) {
	s := newScene(t)
	long := strings.Repeat("x", 1<<20)
	for name, c := range map[string]struct {
		method, path, body string
		header             []string
		status             int
		code, text         string
	}{
		"unknown field":      {"POST", "/api/fetches", `{"runnr":"x"}`, nil, 422, "invalid", "validation failed"},
		"wrong type":         {"POST", "/api/fetches", `{"maxRows":"many"}`, nil, 422, "invalid", "validation failed"},
		"negative limit":     {"POST", "/api/fetches", `{"maxRows":-1}`, nil, 422, "invalid", "validation failed"},
		"not JSON":           {"POST", "/api/fetches", `{`, nil, 400, "invalid", ""},
		"no body":            {"POST", "/api/fetches", ``, nil, 400, "invalid", "body"},
		"other media type":   {"POST", "/api/fetches", `a=b`, []string{"Content-Type", "application/x-www-form-urlencoded"}, 415, "invalid", ""},
		"too long":           {"POST", "/api/fetches", `{"query":"` + long + `"}`, nil, 413, "limit", ""},
		"too long for a key": {"POST", "/api/service-account-keys", `{"name":"` + long[:70<<10] + `"}`, nil, 413, "limit", ""},
		"not acceptable":     {"POST", "/api/fetches", `{"runnerId":"x"}`, []string{"Accept", "text/html"}, 406, "invalid", "no media type"},
		"no runner":          {"POST", "/api/fetches", `{"source":{"kind":"file"}}`, nil, 400, "no_runner", "no runner is selected"},
		"unknown runner":     {"POST", "/api/fetches", `{"runnerId":"ghost","source":{"kind":"file"}}`, nil, 404, "runner_unknown", `runner "ghost" is not registered`},
		"not a runner name":  {"POST", "/api/fetches", `{"runnerId":"a b","source":{"kind":"file"}}`, nil, 400, "invalid", schemas.ErrNotARunnerName().Message},
		"stored connection":  {"POST", "/api/fetches", `{"runnerId":"x","connectionId":"y"}`, nil, 400, "invalid", "stored connections"},
		"timeout":            {"POST", "/api/fetches", `{"runnerId":"x","timeout":"soon"}`, nil, 400, "invalid", "is not a duration"},
		"limit of the audit": {"GET", "/api/audit?limit=0", ``, nil, 422, "invalid", "validation failed"},
		"unknown role":       {"POST", "/api/people", `{"name":"x","role":"KING"}`, nil, 422, "invalid", "validation failed"},
		"no such path":       {"GET", "/api/nothing", ``, nil, 404, "not_found", "nothing at this path"},
		"no such method":     {"PUT", "/api/runners", ``, nil, 405, "invalid", "PUT is not a method"},
	} {
		t.Run(name, func(t *testing.T) {
			a := s.call(t, admin, c.method, c.path, c.body, c.header...)
			p := a.problem(t)
			if a.StatusCode != c.status || p.Code != c.code || !strings.Contains(p.Detail, c.text) {
				t.Errorf("%d %s, want %d, %s and %q", a.StatusCode, clipped(a.body), c.status, c.code, c.text)
			}
			if len(a.body) > 4<<10 {
				t.Errorf("the answer has %d bytes: it gives back what it was sent", len(a.body))
			}
		})
	}
	if a := s.call(t, admin, "PUT", "/api/runners", ""); !strings.Contains(a.Header.Get("Allow"), "GET") {
		t.Errorf("Allow is %q", a.Header.Get("Allow"))
	}
	// A refused fetch has the id under which it is in the audit.
	a := s.call(t, writer, "POST", "/api/fetches", `{"runnerId":"ghost","source":{"kind":"file"}}`, "Accept", "text/csv")
	id := a.Header.Get("Runbus-Dispatch-Id")
	if a.StatusCode != http.StatusNotFound || id == "" || !bytes.Contains(a.body, []byte(id)) {
		t.Errorf("%d, dispatch %q: %s", a.StatusCode, id, a.body)
	}
	// The largest fetch that is taken fits into a message of the bus: what refuses it is not its size.
	a = s.call(t, writer, "POST", "/api/fetches", `{"runnerId":"ghost","source":{"kind":"file"},"query":"`+long[:500<<10]+`"}`)
	if a.StatusCode != http.StatusNotFound {
		t.Errorf("a large query: %d %s", a.StatusCode, clipped(a.body))
	}
}

func clipped(b []byte) []byte { return b[:min(len(b), 500)] }

func TestHealthAndMetrics(t *testing.T) {
	s := newScene(t)
	var body struct {
		Status string
		Checks map[string]string
	}
	s.must(t, nobody, http.MethodGet, "/livez", "", &body)
	if body.Status != "alive" {
		t.Errorf("livez %+v", body)
	}
	s.must(t, nobody, http.MethodGet, "/readyz", "", &body)
	if body.Status != "ready" || len(body.Checks) == 0 || body.Checks["registry"] != "ok" || body.Checks["callout"] != "ok" {
		t.Errorf("readyz %+v", body)
	}
	s.call(t, writer, "POST", "/api/fetches", `{"runnerId":"ghost","source":{"kind":"file"}}`)
	metrics := string(s.call(t, nobody, http.MethodGet, "/metrics", "").body)
	for _, want := range []string{
		`runbus_dispatches_total{code="runner_unknown",outcome="refused"} 1`, "runbus_dispatches_in_flight 0", "runbus_dispatch_duration_seconds_bucket", "go_goroutines",
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("%s is not in the metrics", want)
		}
	}
	for _, secret := range []string{"umbrella", "rita"} {
		if strings.Contains(metrics, secret) {
			t.Errorf("the metrics, which everybody may read, name %q", secret)
		}
	}
}

// Every answer, of whatever status, keeps browsers and caches from making more of it.
func TestSecurityHeaders(t *testing.T) {
	s := newScene(t)
	for _, path := range []string{"/livez", "/openapi.json", "/metrics", "/api/session", "/api/nothing", "/"} {
		for _, who := range []string{nobody, admin} {
			h := s.call(t, who, http.MethodGet, path, "").Header
			for name, want := range map[string]string{
				"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
			} {
				if h.Get(name) != want {
					t.Errorf("%s as %s: %s is %q", path, who, name, h.Get(name))
				}
			}
			if h.Get("Access-Control-Allow-Origin") != "" || h.Get("Server") != "" {
				t.Errorf("%s: %v", path, h)
			}
		}
	}
}

func TestSession(t *testing.T) {
	s := newScene(t)
	for who, want := range map[string]string{reader: "local rita READER", writer: "local walt WRITER", admin: "local owner ORG_ADMIN", operator: " operator OPERATOR", stranger: "umbrella owner ORG_ADMIN"} {
		var got struct {
			TenantID, Name, Role string
			ExpiresAt            time.Time
		}
		s.must(t, who, http.MethodGet, "/api/session", "", &got)
		if text := got.TenantID + " " + got.Name + " " + got.Role; text != want {
			t.Errorf("%s is %q, want %q", who, text, want)
		}
	}
	// A person who was removed has no session any more.
	s.must(t, admin, http.MethodDelete, "/api/people/rita", "", nil)
	if a := s.call(t, reader, http.MethodGet, "/api/session", ""); a.StatusCode != http.StatusUnauthorized {
		t.Errorf("a removed person's session: %d", a.StatusCode)
	}
}
