package security

import (
	"context"
	"strings"
	"testing"
	"time"

	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	agent "github.com/org-runink/runbus/runner"
)

// A key past its year ends its runner with the reason and the status for good; the doctor says the same and tells how the clocks
// differ (SPEC E4, E8, E11).
func TestAnExpiredKeyEndsItsRunner(t *testing.T) {
	s := rt.Start(t, nil)
	_, token, err := s.Auth.MintKey(t.Context(), s.Admin, "edge")
	rt.Must(t, err)
	s.Clock.Advance(366*24*time.Hour + 30*time.Second) // and half a minute, that a slow answer may add to or take off
	cfg := agent.Config{Addrs: []string{s.URL()}, Token: token, ID: "edge-1", TLS: true, CA: s.CAFile, StateDir: t.TempDir(), Log: s.Log}

	found := map[string]agent.Check{}
	d := agent.Diagnose(t.Context(), cfg, agent.DoctorOptions{Done: func(c agent.Check) { found[c.Name] = c }})
	if c := found["token"]; d.Verdict != agent.CheckFail || c.Verdict != agent.CheckFail || !strings.Contains(c.Saw, `the service-account key "sa-edge" has expired`) {
		t.Errorf("token: %+v", c)
	}
	if c := found["clock"]; c.Verdict != agent.CheckFail || !strings.Contains(c.Saw, "8784h0m") || !strings.Contains(c.Saw, "s behind") {
		t.Errorf("clock: %+v", c)
	}

	a, err := agent.New(cfg)
	rt.Must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), rt.Patience)
	defer cancel()
	if err := a.Run(ctx); agent.ExitCode(err) != agent.ExitRefused || !strings.Contains(err.Error(), `the service-account key "sa-edge" has expired`) {
		t.Errorf("the runner ends with %d: %v", agent.ExitCode(err), err)
	}
}
