// Package registrytest runs the real server, stores, audit log, auth with its callout, and registry for tests, and gives them
// the runner's side of the bus, step by step.
package registrytest

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/registry"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Patience bounds every wait of a test: it is only used up by one that fails.
const Patience = 2 * time.Minute

// Tenant is the tenant that a Stack has from the start, and Other a second one.
const (
	Tenant = "acme"
	Other  = "umbrella"
)

// Clock is the time of a test: the real one, moved, or held.
type Clock struct {
	mu   sync.Mutex
	held time.Time // zero: it goes on
	off  time.Duration
}

// Now is the moved time.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.held
	if now.IsZero() {
		now = time.Now()
	}
	return now.Add(c.off)
}

// Hold stops it, for good: only Advance moves it then.
func (c *Clock) Hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = time.Now()
}

// Advance moves it on, or back.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off += d
}

// Stack is everything that a registry stands on, and the registry.
type Stack struct {
	*bustest.Bus
	Store    *jetstream.Store
	Audit    *audit.Log
	Auth     *auth.Auth
	Roster   *roster.Roster
	Registry *registry.Registry
	Clock    *Clock
	Metrics  *prometheus.Registry
	Admin    auth.Principal // of Tenant
	Stranger auth.Principal // admin of Other

	now func() time.Time // that of Clock; nil: the real one
}

// Start starts a stack that ends with the test. configure, which may be nil, changes the registry's Deps.
func Start(t testing.TB, configure func(*registry.Deps)) *Stack {
	t.Helper()
	clock := &Clock{}
	return start(t, &Stack{Clock: clock, now: clock.Now}, configure)
}

// StartInRealTime is Start of a stack without a Clock: its parts ask time.Now, as they do where they are not tested.
func StartInRealTime(t testing.TB, configure func(*registry.Deps)) *Stack {
	t.Helper()
	return start(t, &Stack{}, configure)
}

func start(t testing.TB, s *Stack, configure func(*registry.Deps)) *Stack {
	t.Helper()
	s.Bus, s.Metrics = bustest.Start(t), prometheus.NewRegistry()
	ctx, cancel := context.WithCancel(context.Background())
	var err error
	s.Store, err = jetstream.Open(ctx, s.Conn(t, embedded.UserSec), jetstream.Options{Fresh: true, Log: s.Log})
	Must(t, err)
	t.Cleanup(s.Store.Close)
	s.Audit, err = audit.New(ctx, s.Store, "test", s.Log)
	Must(t, err)
	s.background(t, "audit log", cancel, func() error { return s.Audit.Run(ctx) })
	s.Auth, err = auth.New(ctx, auth.Deps{Store: s.Store, Audit: s.Audit, Log: s.Log, Now: s.now})
	Must(t, err)
	t.Cleanup(s.Auth.Close)
	s.Roster, err = roster.New(ctx, roster.Deps{Store: s.Store, Audit: s.Audit, Log: s.Log, Now: s.now})
	Must(t, err)
	t.Cleanup(s.Roster.Close)
	s.Admin, s.Stranger = s.tenant(t, Tenant), s.tenant(t, Other)
	s.Registry = s.Replica(t, configure)
	s.callout(t)
	return s
}

// Replica is one more registry on the same stores, with its task running.
func (s *Stack) Replica(t testing.TB, configure func(*registry.Deps)) *registry.Registry {
	t.Helper()
	d := registry.Deps{
		Store: s.Store, Serve: bus.NewConn(s.Conn(t, embedded.UserServe)), Sys: s.Conn(t, embedded.UserSys),
		Auth: s.Auth, Roster: s.Roster, Audit: s.Audit, Log: s.Log, Now: s.now,
	}
	if s.Registry == nil {
		d.Metrics = s.Metrics
	}
	if configure != nil {
		configure(&d)
	}
	r, err := registry.New(t.Context(), d)
	Must(t, err)
	t.Cleanup(r.Close)
	ctx, cancel := context.WithCancel(context.Background())
	s.background(t, "registry", cancel, func() error { return r.Run(ctx) })
	return r
}

// background runs a blocking task until the test ends.
func (s *Stack) background(t testing.TB, what string, cancel context.CancelFunc, task func() error) {
	ended := make(chan error, 1)
	go func() { ended <- task() }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", what, err)
		}
	})
}

// readable waits until the registry can be read: what a test lets pass by its clock, or a machine by standing still, may leave it unconfirmed
// for a moment.
func (s *Stack) readable(t testing.TB) {
	t.Helper()
	s.Await(t, "the registry can be read", func() bool { return s.Registry.Readable() == nil })
}

// SelfHosted is what the registry lists but for the managed runner, which must be first.
func (s *Stack) SelfHosted(t testing.TB, tenant string) []registry.Runner {
	t.Helper()
	s.readable(t)
	list, err := s.Registry.List(tenant)
	Must(t, err)
	if len(list) == 0 || list[0].ID != schemas.ConsoleRunner {
		t.Fatalf("the managed runner is not the first of %+v", list)
	}
	return list[1:]
}

func (s *Stack) tenant(t testing.TB, name string) auth.Principal {
	t.Helper()
	token, err := s.Auth.CreateTenant(t.Context(), auth.Principal{Name: "operator", Role: auth.RoleOperator}, name)
	Must(t, err)
	admin, err := s.Auth.Authenticate(token)
	Must(t, err)
	return admin
}

// callout serves the real one.
func (s *Stack) callout(t testing.TB) {
	t.Helper()
	ops, opsSub := embedded.OpsPermissions()
	sys, sysSub := embedded.OpsSysPermissions()
	ready := make(chan struct{})
	c := auth.CalloutConfig{
		Conn: s.Conn(t, embedded.UserAuth), Sys: s.Conn(t, embedded.UserSys), Jail: bus.NewConn(s.Conn(t, embedded.UserJail)),
		Patience: Patience, // bustest's server waits for long, too
		Issuer:   s.Keys.Issuer(), XKey: s.Keys.XKey(), OpsPublic: s.Keys.OpsPublic(), OpsSysPublic: s.Keys.OpsSysPublic(),
		Ops: auth.Subjects{Publish: ops, Subscribe: opsSub}, OpsSys: auth.Subjects{Publish: sys, Subscribe: sysSub},
		// A test of the registry's own binding wants the second key let in.
		Bound: func(schemas.RunnerRef) (string, bool) { return "", false },
		Ready: func() { close(ready) },
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.background(t, "callout", cancel, func() error { return s.Auth.ServeCallout(ctx, c) })
	Wait(t, "the callout", ready)
}

// Credential is a service-account key with its secret half.
type Credential struct {
	auth.Key
	secret schemas.ServiceToken
}

// Mint makes a key of by's tenant.
func (s *Stack) Mint(t testing.TB, by auth.Principal, name string) Credential {
	t.Helper()
	key, token, err := s.Auth.MintKey(t.Context(), by, name)
	Must(t, err)
	secret, err := schemas.ParseServiceToken(token)
	Must(t, err)
	return Credential{key, secret}
}

// Await waits until is reports true, looking at each change of the registry's view.
func (s *Stack) Await(t testing.TB, what string, is func() bool) {
	t.Helper()
	AwaitOn(t, s.Registry, what, is)
}

// AwaitOn is Await on the view of another replica.
func AwaitOn(t testing.TB, r *registry.Registry, what string, is func() bool) {
	t.Helper()
	give := time.After(Patience)
	for {
		changed := r.Changed()
		if is() {
			return
		}
		select {
		case <-changed:
		case <-give:
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

// Candidate is what dispatch would see of a runner of Tenant.
func (s *Stack) Candidate(t testing.TB, id string) registry.Candidate {
	t.Helper()
	s.readable(t)
	list, err := s.Registry.Snapshot(Tenant)
	Must(t, err)
	for _, c := range list {
		if c.Ref.Runner == id {
			return c
		}
	}
	return registry.Candidate{}
}

// Dispatchable reports whether a runner of Tenant would get work.
func (s *Stack) Dispatchable(t testing.TB, id string) bool {
	c := s.Candidate(t, id)
	return c.Ref.Runner == id && c.Offline == ""
}

// BoundTo reports whether the view has it that the runner's id is cred's.
func (s *Stack) BoundTo(ref schemas.RunnerRef, cred Credential) bool {
	key, bound := s.Registry.Bound(ref)
	return bound && key == cred.PublicKey
}

// LoseHeartbeats takes the heartbeats away, for good: the store makes their bucket again otherwise, at any time.
func (s *Stack) LoseHeartbeats(t testing.TB) {
	t.Helper()
	js, err := natsjs.New(s.Conn(t, embedded.UserSec), natsjs.WithDefaultTimeout(Patience))
	Must(t, err)
	name := string(jetstream.Heartbeats)
	const overlap natsjs.ErrorCode = 10065 // its subjects are another stream's
	for give := time.Now().Add(Patience); ; <-time.After(10 * time.Millisecond) {
		if err := js.DeleteStream(t.Context(), "KV_"+name); err != nil && !errors.Is(err, natsjs.ErrStreamNotFound) {
			t.Fatal(err)
		}
		_, err := js.CreateStream(t.Context(), natsjs.StreamConfig{Name: "INSTEAD", Subjects: []string{"$KV." + name + ".>"}, Storage: natsjs.MemoryStorage})
		if err == nil {
			return
		}
		var refused *natsjs.APIError
		if !errors.As(err, &refused) || refused.ErrorCode != overlap || time.Now().After(give) { // else it was made again meanwhile
			t.Fatal(err)
		}
	}
}

// Events are the audit events of Tenant with the given action.
func (s *Stack) Events(t testing.TB, action string) []*runbusv1.AuditEvent {
	t.Helper()
	// What was noted is committed before what is recorded afterwards.
	Must(t, s.Audit.Record(t.Context(), &runbusv1.AuditEvent{Tenant: Other, Actor: "control-plane", Action: "test.fence", Subject: "test", Outcome: "ok"}))
	all, err := s.Audit.List(t.Context(), Tenant, 1000)
	Must(t, err)
	var events []*runbusv1.AuditEvent
	for _, e := range all {
		if e.GetAction() == action {
			events = append(events, e)
		}
	}
	return events
}

// Metric is the sum of a metric over all series whose labels contain want.
func (s *Stack) Metric(t testing.TB, name string, want map[string]string) float64 {
	t.Helper()
	families, err := s.Metrics.Gather()
	Must(t, err)
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
	series:
		for _, m := range f.GetMetric() {
			have := make(map[string]string)
			for _, l := range m.GetLabel() {
				have[l.GetName()] = l.GetValue()
			}
			for k, v := range want {
				if have[k] != v {
					continue series
				}
			}
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return sum
}

// Must fails the test for an error.
func Must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Wait returns what comes on c, and fails the test when nothing does.
func Wait[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(Patience):
		t.Fatalf("waited in vain for %s", what)
		panic("unreachable")
	}
}
