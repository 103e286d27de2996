// Package api is the HTTP face of the control plane: it authenticates, decodes, makes one call, and writes the answer. The
// OpenAPI document is generated from it (GET /openapi.json).
package api

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	oteltrace "go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/cp/registry"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/cp/trace"
	"github.com/org-runink/runbus/schemas"
)

// Check is one condition of readiness.
type Check struct {
	Name string
	Ask  func() error // nil: it holds
}

// Deps are the parts behind the API; all but Alive, Tracing and Log are required.
type Deps struct {
	Auth     *auth.Auth
	Registry *registry.Registry
	Roster   *roster.Roster
	Runners  Dialling
	Dispatch *dispatch.Dispatcher
	Audit    *audit.Log
	Recorder *trace.Recorder
	Metrics  prometheus.Gatherer
	Checks   []Check
	// Alive fails when the process should be restarted; nil means always alive.
	Alive func() error
	// Tracing makes the spans of fetches; nil means none.
	Tracing oteltrace.TracerProvider
	Version string
	Log     *slog.Logger
}

type server struct {
	Deps
	tracer oteltrace.Tracer
	early  earlyFetches
}

var useProblems sync.Once // huma's error constructor is a variable of its package

// New is the handler of the whole API. Safe for concurrent use.
func New(d Deps) http.Handler {
	useProblems.Do(func() { huma.NewError = humaProblem })
	if d.Log == nil {
		d.Log = slog.Default()
	}
	if d.Tracing == nil {
		d.Tracing = noop.NewTracerProvider()
	}
	s := &server{Deps: d, tracer: d.Tracing.Tracer(tracerName)}
	mux := http.NewServeMux()
	config := huma.DefaultConfig("Runbus", d.Version)
	config.Info.Description = "Dispatch data fetches to runners inside private networks. Every call below /api needs `Authorization: Bearer rst1.…`."
	config.DocsPath, config.SchemasPath = "", ""
	config.OpenAPIPath = "/openapi"
	config.CreateHooks = nil // no $schema links in bodies
	config.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"session": {Type: "http", Scheme: "bearer", Description: "Session token (rst1.…) of a person or of the platform's operator"},
	}
	api := humago.New(mux, config)
	api.UseMiddleware(s.authenticate)
	s.operations(api)

	mux.HandleFunc("GET /livez", s.livez)
	mux.HandleFunc("GET /readyz", s.readyz)
	mux.Handle("GET /metrics", promhttp.HandlerFor(d.Metrics, promhttp.HandlerOpts{}))
	return hardened(problems(mux))
}

// problems answers what no route takes, 404 and 405, as every other error of the API.
func problems(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler, pattern := mux.Handler(r)
		if pattern != "" {
			mux.ServeHTTP(w, r) // it sets the path's values, which handler alone would not
			return
		}
		none := &statusOnly{header: w.Header()}
		handler.ServeHTTP(none, r)
		if none.status < http.StatusBadRequest { // a redirect to the clean path
			w.WriteHeader(none.status)
			return
		}
		detail := "there is nothing at this path"
		if none.status == http.StatusMethodNotAllowed {
			detail = r.Method + " is not a method of this path: " + w.Header().Get("Allow")
		}
		_ = writeProblem(w, newProblem(none.status, codeOfStatus(none.status), detail, "GET /openapi.json tells what there is"))
	})
}

// statusOnly takes the header and the status of an answer, and drops its body.
type statusOnly struct {
	header http.Header
	status int
}

func (s *statusOnly) Header() http.Header         { return s.header }
func (s *statusOnly) Write(b []byte) (int, error) { return len(b), nil }
func (s *statusOnly) WriteHeader(status int)      { s.status = status }

// operations registers every operation with its errors and its place in the OpenAPI document.
func (s *server) operations(api huma.API) {
	register(api, http.MethodPost, "/api/fetches", "runFetch", "Run a fetch on a runner and stream its result", "fetches", s.runFetch, streamDocs)
	register(api, http.MethodGet, "/api/fetches", "listFetches", "Timelines of the last day's fetches: those that run, then the ended ones, the newest end first", "fetches", s.listTimelines)
	register(api, http.MethodGet, "/api/fetches/{dispatchId}", "getFetch", "Timeline of one fetch, with the hop on which it stopped", "fetches", s.getTimeline)
	register(api, http.MethodGet, "/api/fetches/{dispatchId}/events", "followFetch", "Follow a fetch: its steps and progress as server-sent events", "fetches", s.fetchEvents, eventsDocs)
	register(api, http.MethodGet, "/api/fetches/running", "listRunningFetches", "Fetches that run on this replica", "fetches", s.listRunning)
	register(api, http.MethodDelete, "/api/fetches/{dispatchId}", "cancelFetch", "Cancel a running fetch", "fetches", s.cancelFetch)
	s.runnerOperations(api)
	register(api, http.MethodGet, "/api/service-account-keys", "listKeys", "Service-account keys of the tenant", "keys", s.listKeys)
	register(api, http.MethodPost, "/api/service-account-keys", "generateServiceAccountKey", "Mint a service-account key; its token is shown once", "keys", s.mintKey, created)
	register(api, http.MethodDelete, "/api/service-account-keys/{id}", "revokeKey", "Revoke a key; a live runner of it is cut", "keys", s.revokeKey)
	register(api, http.MethodGet, "/api/tenants", "listTenants", "Tenants of the platform (operator)", "tenants", s.listTenants)
	register(api, http.MethodPost, "/api/tenants", "createTenant", "Create a tenant (operator); its first admin's token is shown once", "tenants", s.createTenant, created)
	register(api, http.MethodPost, "/api/tenants/{name}/session", "recoverTenant", "Give an admin of a tenant a new session (operator), for a tenant whose admins have none left, or by force; the token is shown once", "tenants", s.recoverTenant, created)
	register(api, http.MethodGet, "/api/people", "listPeople", "People of the tenant", "people", s.listPeople)
	register(api, http.MethodPost, "/api/people", "createPerson", "Create a person; the session token is shown once", "people", s.createPerson, created)
	register(api, http.MethodDelete, "/api/people/{name}", "removePerson", "Remove a person; their sessions end", "people", s.removePerson)
	register(api, http.MethodPost, "/api/people/{name}/session", "renewSession", "End a person's sessions and issue a new token, shown once", "people", s.renewSession, created)
	register(api, http.MethodGet, "/api/session", "getSession", "Whose session this is", "people", s.getSession)
	register(api, http.MethodGet, "/api/audit", "listAudit", "Audit events of the tenant (ORG_ADMIN)", "audit", s.listAudit)
}

func register[I, O any](api huma.API, method, path, id, summary, tag string, handler func(context.Context, *I) (*O, error), more ...func(*huma.Operation)) {
	op := huma.Operation{
		OperationID: id, Method: method, Path: path, Summary: summary, Tags: []string{tag},
		Security: []map[string][]string{{"session": {}}}, MaxBodyBytes: maxRequest,
		Responses: map[string]*huma.Response{"401": {
			Description: "No session: the token is missing, unknown or expired",
			Content: map[string]*huma.MediaType{"application/json": {Schema: &huma.Schema{
				Type: "object", Properties: map[string]*huma.Schema{"error": {Type: "string", Enum: []any{"unauthorized"}}}, Required: []string{"error"},
			}}},
		}},
		Errors: []int{http.StatusBadRequest, http.StatusForbidden, http.StatusNotFound, http.StatusConflict, http.StatusServiceUnavailable},
	}
	for _, change := range more {
		change(&op)
	}
	huma.Register(api, op, handler)
}

// Bodies at most. A fetch, decoded, must fit into one message of the bus (1 MiB) with its envelope.
const (
	maxRequest      = 64 << 10
	maxFetchRequest = 768 << 10
)

func created(op *huma.Operation) { op.DefaultStatus = http.StatusCreated }

// streamDocs describes the answer of a fetch, which huma can't see: it is written by hand, line by line.
func streamDocs(op *huma.Operation) {
	op.MaxBodyBytes = maxFetchRequest
	op.Errors = append(op.Errors, http.StatusNotAcceptable, http.StatusRequestEntityTooLarge, http.StatusTooManyRequests, http.StatusBadGateway, http.StatusGatewayTimeout)
	text := func(description string) *huma.MediaType {
		return &huma.MediaType{Schema: &huma.Schema{Type: "string", Description: description}}
	}
	dispatchID := map[string]*huma.Param{
		"Runbus-Dispatch-Id": {Description: "Id of the dispatch, for DELETE /api/fetches/{dispatchId} and the audit", Schema: &huma.Schema{Type: "string"}},
	}
	op.Responses["102"] = &huma.Response{Description: "With `Prefer: dispatch-id` alone, over HTTP/1.1 or 2: the request is taken, and this is its id. The answer follows", Headers: dispatchID}
	op.Responses["200"] = &huma.Response{
		Description: "The result. A fetch that ends before its first byte is answered with problem JSON and a status of its own.",
		Headers:     dispatchID,
		Content: map[string]*huma.MediaType{
			mediaNDJSON: text("One JSON object a line; `type` is accepted, progress, schema, row (the row under `row`), notice, and last result or error"),
			mediaArrow:  text("Arrow IPC stream, zstd; the outcome is in the trailers Runbus-Outcome, Runbus-Error and Runbus-Notices"),
			mediaCSV:    text("Header and records; NULL is an empty field, empty text is \"\"; the outcome is in the trailers as for Arrow"),
		},
	}
}

type principalKey struct{}

// authenticate lets nobody past without a session.
func (s *server) authenticate(ctx huma.Context, next func(huma.Context)) {
	token, ok := strings.CutPrefix(ctx.Header("Authorization"), "Bearer ")
	if ok {
		p, err := s.Auth.Authenticate(strings.TrimSpace(token))
		if err == nil {
			next(huma.WithValue(ctx, principalKey{}, p))
			return
		}
		s.Log.Debug("authentication failed", "error", err)
	}
	_, w := humago.Unwrap(ctx)
	if err := writeUnauthorized(w); err != nil {
		s.Log.Debug("answer not written", "error", err)
	}
}

// principal is who authenticate let in.
func principal(ctx context.Context) auth.Principal {
	p, _ := ctx.Value(principalKey{}).(auth.Principal)
	return p
}

// hardened sets the headers that every answer has.
func hardened(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Cache-Control", "no-store")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
		next.ServeHTTP(w, r)
	})
}

// Readiness is the body of /livez and /readyz.
type Readiness struct {
	Status string            `json:"status"` // `ready`, `not_ready`, or for /livez `alive`, `not_alive`
	Checks map[string]string `json:"checks,omitempty"`
}

func (s *server) livez(w http.ResponseWriter, _ *http.Request) {
	body, status := Readiness{Status: "alive"}, http.StatusOK
	if s.Alive != nil {
		if err := s.Alive(); err != nil {
			s.Log.Error("not alive", "error", err)
			body.Status, status = "not_alive", http.StatusServiceUnavailable
		}
	}
	writeJSON(w, status, body)
}

func (s *server) readyz(w http.ResponseWriter, _ *http.Request) {
	body, status := Readiness{Status: "ready", Checks: map[string]string{}}, http.StatusOK
	for _, check := range s.Checks {
		body.Checks[check.Name] = "ok"
		if err := check.Ask(); err != nil {
			s.Log.Debug("not ready", "check", check.Name, "error", err)
			body.Checks[check.Name] = schemas.ToDetail(err).GetMessage()
			body.Status, status = "not_ready", http.StatusServiceUnavailable
		}
	}
	writeJSON(w, status, body)
}

// ServerOf is an http.Server for the handler with the timeouts of a public service. A fetch lifts them for itself.
func ServerOf(handler http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second,
		WriteTimeout: 60 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}
