package registry_test

import (
	"testing"

	"github.com/org-runink/runbus/cp/registry"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
)

// With its key a runner's signals end: a heartbeat from before is nothing to go by, however young it is.
func TestSignalsEndWithTheKey(t *testing.T) {
	s := rt.Start(t, nil)
	key := s.Mint(t, s.Admin, "one")
	s.Enrol(t, key, "edge-1")
	shown := func() registry.Runner {
		t.Helper()
		list := s.SelfHosted(t, rt.Tenant)
		if len(list) != 1 {
			t.Fatalf("%+v", list)
		}
		return list[0]
	}
	if r := shown(); r.Health.Signals.Heartbeat != "fresh" || !r.Health.Connected {
		t.Fatalf("before: %+v", r.Health)
	}
	_, err := s.Auth.RevokeKey(t.Context(), s.Admin, key.ID)
	rt.Must(t, err)
	if r := shown(); r.State != registry.StateRevoked || r.Health.Signals.Heartbeat != "ended" || r.Health.Connected || r.Health.Dispatchable {
		t.Errorf("after: %s, %+v", r.State, r.Health)
	}
}
