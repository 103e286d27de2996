package roster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

func TestMain(m *testing.M) { leak.Main(m) }

// mostAgain is how often who is told that the registry has no time asks again at most.
const mostAgain = 10

const (
	acme  = "acme"
	other = "other"
)

// clock is time that a test moves on.
type clock struct {
	mu  sync.Mutex
	off time.Duration
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.off)
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off += d
}

// env is a roster on a real bus.
type env struct {
	*bustest.Bus
	store *jetstream.Store
	audit *audit.Log
	clock *clock
	r     *Roster
	ada   auth.Principal // ORG_ADMIN of acme
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func start(t *testing.T, configure func(*Deps)) *env {
	t.Helper()
	e := &env{Bus: bustest.Start(t), clock: &clock{}, ada: auth.Principal{Tenant: acme, Name: "ada", Role: auth.RoleOrgAdmin}}
	var err error
	e.store, err = jetstream.Open(t.Context(), e.Conn(t, embedded.UserSec), jetstream.Options{Fresh: true, ConfirmEvery: 100 * time.Millisecond, Log: e.Log})
	must(t, err)
	t.Cleanup(e.store.Close)
	e.audit, err = audit.New(t.Context(), e.store, "test", e.Log)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- e.audit.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("audit: %v", err)
		}
	})
	e.r = e.replica(t, configure)
	return e
}

// replica is one more roster on the same buckets.
func (e *env) replica(t testing.TB, configure func(*Deps)) *Roster {
	t.Helper()
	d := Deps{Store: e.store, Audit: e.audit, Log: e.Log, Now: e.clock.now}
	if configure != nil {
		configure(&d)
	}
	r, err := New(t.Context(), d)
	must(t, err)
	t.Cleanup(r.Close)
	return r
}

func spec(name string) Spec { return Spec{Name: name, Address: "db.internal:7443"} }

// create creates a runner.
func (e *env) create(t testing.TB, name string) (Runner, Minted) {
	t.Helper()
	runner, minted, err := e.r.Create(t.Context(), e.ada, spec(name))
	must(t, err)
	return runner, minted
}

// claim is what a runner with this key claims.
func claim(runner Runner, m Minted, key string) Claim {
	sum := sha256.Sum256([]byte(key))
	fingerprint := hex.EncodeToString(sum[:])
	return Claim{
		RunnerID: runner.ID, TokenID: m.TokenID, KeySHA256: fingerprint, CertificatePEM: []byte("certificate of " + key),
		Leaf: leaf(key),
	}
}

func leaf(key string) Leaf {
	sum := sha256.Sum256([]byte("leaf " + key))
	return Leaf{Fingerprint: hex.EncodeToString(sum[:]), PublicKey: []byte(key), NotBefore: time.Now(), NotAfter: time.Now().Add(24 * time.Hour)}
}

// enrolled creates a runner and enrols it with the key `k`.
func (e *env) enrolled(t testing.TB, name string) Runner {
	t.Helper()
	runner, minted := e.create(t, name)
	_, _, err := e.r.Consume(t.Context(), claim(runner, minted, "k"))
	must(t, err)
	return e.byID(t, runner.ID)
}

func (e *env) byID(t testing.TB, id string) Runner {
	t.Helper()
	runner, ok, err := e.r.ByID(id)
	must(t, err)
	if !ok {
		t.Fatalf("no runner %s", id)
	}
	return runner
}

// token is the stored form of a token; the zero one if it isn't there.
func (e *env) token(t testing.TB, id string) Token {
	t.Helper()
	tokens, err := e.r.Tokens(acme)
	must(t, err)
	for _, token := range tokens {
		if token.ID == id {
			return token
		}
	}
	return Token{}
}

// events are the audited events of an action.
func (e *env) events(t testing.TB, action string) []*runbusv1.AuditEvent {
	t.Helper()
	all, err := e.audit.List(t.Context(), acme, 1000)
	must(t, err)
	var found []*runbusv1.AuditEvent
	for _, event := range all {
		if event.GetAction() == action {
			found = append(found, event)
		}
	}
	return found
}

func wantCode(t testing.TB, what string, err error, code schemas.Code, text string) {
	t.Helper()
	if schemas.CodeOf(err) != code || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: %v (%s), want %s and %q", what, err, schemas.CodeOf(err), code, text)
	}
}
