package registry_test

import (
	"encoding/hex"
	"errors"
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/registry"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// named is the one candidate that name means; the zero one for none.
func named(t *testing.T, r *registry.Registry, tenant, name string) registry.Candidate {
	t.Helper()
	list, err := r.Named(tenant, name)
	rt.Must(t, err)
	if len(list) > 1 {
		t.Fatalf("%s means %+v", name, list)
	}
	if len(list) == 0 {
		return registry.Candidate{}
	}
	return list[0]
}

// enrol makes a dialled runner ACTIVE with a leaf that ends at end.
func enrol(t *testing.T, s *rt.Stack, runner roster.Runner, m roster.Minted, end time.Time) {
	t.Helper()
	_, _, err := s.Roster.Consume(t.Context(), roster.Claim{
		RunnerID: runner.ID, TokenID: m.TokenID, KeySHA256: "key", CertificatePEM: []byte("certificate"),
		Leaf: roster.Leaf{Fingerprint: hex.EncodeToString(make([]byte, 32)), NotAfter: end},
	})
	rt.Must(t, err)
}

// What D7 and R3 say of dialled runners, from the roster and from what their process says.
func TestDialledRunnersAreListed(t *testing.T) {
	s := rt.Start(t, nil)
	create := func(name string) (roster.Runner, roster.Minted) {
		t.Helper()
		runner, minted, err := s.Roster.Create(t.Context(), s.Admin, roster.Spec{
			Name: name, Address: "db.internal:7443", Zone: "eu-1", Labels: map[string]string{"env": "prod"},
		})
		rt.Must(t, err)
		return runner, minted
	}
	valid, validToken := create("valid")
	expired, expiredToken := create("expired")
	gone, goneToken := create("gone")
	pending, _ := create("pending")
	enrol(t, s, valid, validToken, time.Now().Add(time.Hour))
	enrol(t, s, expired, expiredToken, time.Now().Add(-time.Hour))
	enrol(t, s, gone, goneToken, time.Now().Add(-roster.RenewableFor-time.Hour))
	revoked, _ := create("revoked")
	_, err := s.Roster.Revoke(t.Context(), s.Admin, "revoked")
	rt.Must(t, err)

	shown := map[string]registry.Runner{}
	for _, r := range s.SelfHosted(t, rt.Tenant) {
		shown[r.Name] = r
	}
	for name, want := range map[string]struct{ id, state, detail string }{
		"valid":   {valid.ID, "ACTIVE", "not connected"},
		"expired": {expired.ID, "ACTIVE", "certificate expired: it is renewed when the runner can be reached"},
		"gone":    {gone.ID, "ACTIVE", "certificate expired: revoke and create again"},
		"pending": {pending.ID, "PENDING", "not enrolled yet"},
		"revoked": {revoked.ID, "REVOKED", "it was revoked"},
	} {
		r := shown[name]
		if r.ID != want.id || r.State != want.state || r.Health.Detail != want.detail || r.Health.Connected || r.Health.Dispatchable || r.Link != "dialled" ||
			r.Kind != "self_hosted" || r.Address != "db.internal:7443" || r.Zone != "eu-1" || r.Labels["env"] != "prod" || (r.Health.CertNotAfter != nil) != (want.state == "ACTIVE") {
			t.Errorf("%s is shown as %+v", name, r)
		}
		for _, by := range []string{name, want.id} {
			c := named(t, s.Registry, rt.Tenant, by)
			if c.Ref.Runner != want.id || c.Offline != want.detail || c.Pending != (want.state == "PENDING") || c.Revoked != (want.state == "REVOKED") || c.Label() != name {
				t.Errorf("%s means %+v", by, c)
			}
			if c := named(t, s.Registry, rt.Other, by); c.Ref.Runner != "" {
				t.Errorf("another tenant's %s means %+v", by, c)
			}
		}
	}
}

// A process that claims the name of a dialled runner never gets its work; one whose id it is neither.
func TestARegisteredNameIsNotTakenByAClaim(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Connect(t, s.Mint(t, s.Admin, "edge"), "warehouse")
	r.Hello(t, func(h *runbusv1.RunnerHello) { h.Name = "store" })
	s.Await(t, "the outbound runner is there", func() bool { return named(t, s.Registry, rt.Tenant, "store").Ref.Runner == "warehouse" })
	for _, name := range []string{"warehouse", "store"} {
		runner, _, err := s.Roster.Create(t.Context(), s.Admin, roster.Spec{Name: name, Address: "h:1"})
		rt.Must(t, err)
		if c := named(t, s.Registry, rt.Tenant, name); c.Ref.Runner != runner.ID || c.Link != "dialled" {
			t.Errorf("%s means %+v", name, c)
		}
		if shown, ok, err := s.Registry.Runner(rt.Tenant, name); err != nil || !ok || shown.ID != runner.ID {
			t.Errorf("%s is shown as %+v, %v", name, shown, err)
		}
		_, err = s.Roster.Revoke(t.Context(), s.Admin, name)
		rt.Must(t, err)
		rt.Must(t, s.Roster.Remove(t.Context(), s.Admin, name))
		if c := named(t, s.Registry, rt.Tenant, name); c.Ref.Runner != "warehouse" || c.Link != "outbound" {
			t.Errorf("when it is removed, %s means %+v", name, c)
		}
	}
}

// The managed runner is there for every tenant, stored nowhere, and nobody's to be (SPEC R2, R7).
func TestTheManagedRunnerIsAlwaysListed(t *testing.T) {
	s := rt.Start(t, nil)
	for _, tenant := range []string{rt.Tenant, rt.Other, "nobody"} {
		list, err := s.Registry.List(tenant)
		rt.Must(t, err)
		if len(list) != 1 || list[0].ID != "console" || list[0].Kind != "managed" || list[0].DisplayName != "Runink managed" || list[0].Link != "local" ||
			list[0].State != "UNKNOWN" || !strings.Contains(list[0].Description, "liveness was not observed") || list[0].ComputeUnits != 0 {
			t.Errorf("%s lists %+v", tenant, list)
		}
		if c := named(t, s.Registry, tenant, "console"); c.Link != "local" || c.Offline != "not connected" {
			t.Errorf("console means %+v", c)
		}
	}
}

// A tenant whose managed runner a fetch starts is not told that somebody should.
func TestAManagedRunnerThatAFetchStarts(t *testing.T) {
	s := rt.Start(t, func(d *registry.Deps) { d.ManagedWaits = func(tenant string) bool { return tenant == rt.Other } })
	for tenant, want := range map[string]string{rt.Tenant: "not connected", rt.Other: "starts with its tenant's first fetch"} {
		list, err := s.Registry.List(tenant)
		rt.Must(t, err)
		if c := list[0]; c.State != "UNKNOWN" || !strings.Contains(c.Description, "liveness was not observed") || c.Health.Detail != want || c.Health.Dispatchable {
			t.Errorf("%s sees %+v", tenant, c)
		}
	}
	if c := named(t, s.Registry, rt.Other, "console"); c.Offline != "not connected" { // a fetch has it started first
		t.Errorf("console means %+v", c)
	}
}

// Without the dialled runners there is no list: never "only console" (SPEC R1, D7).
func TestUnreadableRoster(t *testing.T) {
	s := rt.Start(t, nil)
	short, err := roster.New(t.Context(), roster.Deps{Store: s.Store, Audit: s.Audit, StaleAfter: 7 * time.Second, Log: s.Log})
	rt.Must(t, err)
	t.Cleanup(short.Close)
	replica := s.Replica(t, func(d *registry.Deps) { d.Roster = short })
	await := func(readable bool) {
		t.Helper()
		for give := time.Now().Add(rt.Patience); (replica.Readable() == nil) != readable; <-time.After(20 * time.Millisecond) { // nobody tells of it
			if time.Now().After(give) {
				t.Fatalf("waited in vain until the registry is readable: %v", readable)
			}
		}
	}
	await(true)
	js, err := natsjs.New(s.Conn(t, embedded.UserSec))
	rt.Must(t, err)
	rt.Must(t, js.DeleteStream(t.Context(), "KV_runbus_registry"))
	await(false)
	want := schemas.ErrRegistryUnavailable(nil)
	if list, err := replica.List(rt.Tenant); !errors.Is(err, want) || list != nil {
		t.Errorf("List: %v, %v", list, err)
	}
	if list, err := replica.Snapshot(rt.Tenant); !errors.Is(err, want) || list != nil {
		t.Errorf("Snapshot: %v, %v", list, err)
	}
	for _, name := range []string{"console", "edge-1"} {
		if list, err := replica.Named(rt.Tenant, name); !errors.Is(err, want) || len(list) > 0 {
			t.Errorf("Named %s: %v, %v", name, list, err)
		}
	}
}
