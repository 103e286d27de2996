package registry_test

import (
	"testing"
	"time"

	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

func probe(h *runbusv1.RunnerHello) { h.Probe, h.SealingKey = true, nil }

// A probe is told what a hello would be, and changes nothing: the live runner keeps its id, session and link (SPEC E11).
func TestAProbeReplacesNobody(t *testing.T) {
	s := rt.Start(t, nil)
	key, other := s.Mint(t, s.Admin, "edge"), s.Mint(t, s.Admin, "other")

	stranger := s.Connect(t, key, "edge-9")
	if a := stranger.Hello(t, probe); a.GetError() != nil || a.GetTenantId() != rt.Tenant || a.GetSession() != "" || a.GetServerTime() == nil {
		t.Errorf("a probe of an id that never enrolled: %v", a)
	}
	if list := s.SelfHosted(t, rt.Tenant); len(list) != 0 {
		t.Errorf("a probe enrolled: %v", list)
	}

	live := s.Enrol(t, key, "edge-1")
	s.Clock.Advance(5 * time.Second)
	doctor := s.Connect(t, key, "edge-1")
	asked := time.Now()
	a := doctor.Hello(t, probe)
	answered := time.Now()
	if a.GetError() != nil || a.GetRunnerId() != "acme/edge-1" || a.GetSession() != "" {
		t.Errorf("a probe of a live runner: %v", a)
	}
	if told := a.GetServerTime().AsTime().Add(-5 * time.Second); told.Before(asked.Round(0)) || told.After(answered.Round(0)) {
		t.Errorf("the server's time is 5 s after %s, of a probe from %s to %s", told, asked, answered)
	}
	doctor.Cut()
	if again := live.Hello(t, nil); again.GetSession() != live.Session {
		t.Errorf("the live runner lost its session: %v", again)
	}
	if c := s.Candidate(t, "edge-1"); c.Session != live.Session || c.Offline != "" {
		t.Errorf("the live runner lost its place: %+v", c)
	}
	if n := len(s.Events(t, "runner.enrol")); n != 1 {
		t.Errorf("%d enrolments were audited, want that of the live runner", n)
	}

	bound := s.Connect(t, other, "edge-1")
	if a := bound.Hello(t, probe); a.GetError().GetMessage() != schemas.ErrRunnerBound("edge-1").Message || !a.GetFatal() {
		t.Errorf("a probe with another key: %v", a)
	}
	if a := bound.Hello(t, func(h *runbusv1.RunnerHello) { h.Probe = true }); a.GetError().GetCode() != string(schemas.CodeInvalid) || !a.GetFatal() {
		t.Errorf("a probe with a sealing key: %v", a)
	}
}
