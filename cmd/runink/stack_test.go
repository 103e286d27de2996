package main

import (
	"io"
	"net/http"
	"os"
	"testing"

	"github.com/org-runink/runbus/cmd/internal/agent"
	"github.com/org-runink/runbus/cmd/internal/controlplane"
	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/schemas"
)

// A control plane that has just started may be held up: what it can't tell or do at once it is asked for again, and a key whose token
// never came, though it was made, is replaced.
func TestAStartBearsWithABusyControlPlane(t *testing.T) {
	const (
		keys    = "/api/service-account-keys"
		busy    = `{"code":"unavailable","detail":"an election"}`
		unknown = `{"code":"failed","detail":"runner registry unavailable"}`
		live    = `[{"id":"sa-edge","publicKey":"U","expiresAt":"9999-01-01T00:00:00Z"}]`
		ready   = `[{"id":"edge","health":{"dispatchable":true}}]`
	)
	type answer struct {
		call   string
		status int
		body   string
	}
	want := []answer{
		{"GET " + keys, 503, busy}, {"GET " + keys, 200, "[]"}, {"POST " + keys, 503, busy},
		{"GET " + keys, 200, live}, {"DELETE " + keys + "/sa-edge", 503, busy},
		{"GET " + keys, 200, live}, {"DELETE " + keys + "/sa-edge", 200, "{}"}, {"POST " + keys, 200, `{"token":"made"}`},
		{"GET /api/runners", 503, unknown}, {"GET /api/runners", 200, "[]"}, {"GET /api/runners", 503, busy}, {"GET /api/runners", 200, ready},
		{"GET " + keys, 403, `{"code":"forbidden","detail":"no"}`},
	}
	next := 0
	s := &stack{
		endpoint: controlplane.Ready{Endpoints: cp.Endpoints{DataDir: t.TempDir()}},
		runner:   &child{exited: make(chan struct{})}, enrolled: agent.Ready{Enrolled: runner.Enrolled{RunnerID: "edge"}},
		api: server(t, func(w http.ResponseWriter, r *http.Request) { // one call after the other
			if next == len(want) || r.Method+" "+r.URL.Path != want[next].call {
				t.Errorf("call %d is %s %s", next, r.Method, r.URL.Path)
				return
			}
			w.WriteHeader(want[next].status)
			_, _ = io.WriteString(w, want[next].body)
			next++
		}),
	}
	file, err := s.keyOf(t.Context(), stackConfig{runnerID: "edge"})
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "made\n" {
		t.Errorf("the key's file has %q, %v", b, err)
	}
	if err := s.awaitRunners(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := s.keyOf(t.Context(), stackConfig{runnerID: "edge"}); schemas.CodeOf(err) != schemas.CodeForbidden {
		t.Errorf("what is refused: %v", err)
	}
	if rest := want[next:]; len(rest) > 0 {
		t.Errorf("it was not asked for %+v", rest)
	}
}
