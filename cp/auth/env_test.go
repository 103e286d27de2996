package auth

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/internal/natsdial"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
)

func TestMain(m *testing.M) { leak.Main(m) }

// clock is the time of a test: the real one, moved.
type clock struct {
	mu  sync.Mutex
	off time.Duration
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.off)
}

func (c *clock) set(off time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off = off
}

// env is a real server with the real store, audit log and Auth.
type env struct {
	*bustest.Bus
	auth     *Auth
	store    *jetstream.Store
	audit    *audit.Log
	clock    *clock
	operator Principal
	// bound is what the registry would say: runner → public key.
	mu    sync.Mutex
	bound map[schemas.RunnerRef]string
	links dialledRunners
}

func newEnv(t *testing.T) *env {
	t.Helper()
	e := &env{
		Bus: bustest.Start(t), clock: &clock{}, bound: map[schemas.RunnerRef]string{},
		operator: Principal{Name: "operator", Role: RoleOperator},
	}
	ctx, cancel := context.WithCancel(context.Background())
	var err error
	e.store, err = jetstream.Open(ctx, e.Conn(t, embedded.UserSec), jetstream.Options{Fresh: true, Log: e.Log})
	must(t, err)
	t.Cleanup(e.store.Close)
	e.audit, err = audit.New(ctx, e.store, "test", e.Log)
	must(t, err)
	ran := make(chan error, 1)
	go func() { ran <- e.audit.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ran; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("audit log: %v", err)
		}
	})
	e.auth = e.newAuth(t)
	return e
}

// newAuth is one more replica's view.
func (e *env) newAuth(t *testing.T) *Auth {
	t.Helper()
	a, err := New(t.Context(), Deps{Store: e.store, Audit: e.audit, Log: e.Log, Now: e.clock.Now})
	must(t, err)
	t.Cleanup(a.Close)
	return a
}

// serve serves the real callout until the test ends. It has the patience of the test's server, and who is refused stays in JAIL for long
// enough to ask, whatever holds the test up.
func (e *env) serve(t *testing.T, change ...func(*CalloutConfig)) {
	t.Helper()
	ops, opsSub := embedded.OpsPermissions()
	sys, sysSub := embedded.OpsSysPermissions()
	ready := make(chan struct{})
	c := CalloutConfig{
		Conn: e.Conn(t, embedded.UserAuth), Sys: e.Conn(t, embedded.UserSys), Jail: bus.NewConn(e.Conn(t, embedded.UserJail)),
		Issuer: e.Keys.Issuer(), XKey: e.Keys.XKey(), OpsPublic: e.Keys.OpsPublic(), OpsSysPublic: e.Keys.OpsSysPublic(),
		Ops: Subjects{Publish: ops, Subscribe: opsSub}, OpsSys: Subjects{Publish: sys, Subscribe: sysSub},
		Bound: e.boundTo, Link: e.links.config(), Ready: func() { close(ready) },
		Patience: patience, JailTime: time.Hour,
	}
	for _, fn := range change {
		fn(&c)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- e.auth.ServeCallout(ctx, c) }()
	select {
	case <-ready:
	case err := <-ended:
		cancel()
		t.Fatalf("the callout ended: %v", err)
	}
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the callout: %v", err)
		}
	})
}

func (e *env) boundTo(ref schemas.RunnerRef) (string, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	public, ok := e.bound[ref]
	return public, ok
}

func (e *env) bind(ref schemas.RunnerRef, public string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.bound[ref] = public
}

// tenant makes a tenant and returns its admin with the token.
func (e *env) tenant(t *testing.T, name string) (Principal, string) {
	t.Helper()
	token, err := e.auth.CreateTenant(t.Context(), e.operator, name)
	must(t, err)
	admin, err := e.auth.Authenticate(token)
	must(t, err)
	return admin, token
}

// key mints a key and returns it with its secret half.
func (e *env) key(t *testing.T, by Principal, name string) (Key, schemas.ServiceToken) {
	t.Helper()
	key, token, err := e.auth.MintKey(t.Context(), by, name)
	must(t, err)
	secret, err := schemas.ParseServiceToken(token)
	must(t, err)
	return key, secret
}

// proof is the option of a client that signs with a key.
func proof(key Key, secret schemas.ServiceToken) nats.Option {
	return nats.Nkey(key.PublicKey, secret.Key.Sign)
}

// dial connects over the network, once, without reconnecting.
func (e *env) dial(t *testing.T, o ...nats.Option) (*nats.Conn, error) {
	t.Helper()
	nc, err := natsdial.Connect(patience, e.URL(), append([]nats.Option{
		nats.RootCAs(e.CAFile), nats.NoReconnect(), nats.IgnoreDiscoveredServers(), nats.Timeout(patience),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}),
	}, o...)...)
	if err == nil {
		t.Cleanup(nc.Close)
	}
	return nc, err
}

// runner connects as a runner of ref.
func (e *env) runner(t *testing.T, ref schemas.RunnerRef, o ...nats.Option) (*nats.Conn, error) {
	t.Helper()
	return e.dial(t, append([]nats.Option{
		nats.Name(schemas.ConnectName(ref.Runner, schemas.NewID())), nats.CustomInboxPrefix(schemas.InboxPrefix(ref)),
	}, o...)...)
}

// place asks the server where a connection is and as whom.
func (e *env) place(t *testing.T, nc *nats.Conn) (account string, c connection) {
	t.Helper()
	account, c, there := e.find(t, nc)
	if !there {
		t.Fatalf("the server shows no such connection: %v", nc.LastError())
	}
	return account, c
}

// find is place of a connection that may have ended.
func (e *env) find(t *testing.T, nc *nats.Conn) (account string, c connection, there bool) {
	t.Helper()
	id, err := nc.GetClientID()
	if err != nil {
		return "", c, false
	}
	body, err := json.Marshal(map[string]any{"auth": true, "cid": id})
	must(t, err)
	msg, err := e.Conn(t, embedded.UserSys).Request("$SYS.REQ.SERVER."+e.ID()+".CONNZ", body, patience)
	must(t, err)
	var answer struct {
		Data struct {
			Connections []struct {
				connection
				Account string `json:"account"`
			} `json:"connections"`
		} `json:"data"`
	}
	must(t, json.Unmarshal(msg.Data, &answer))
	if len(answer.Data.Connections) != 1 {
		return "", c, false
	}
	return answer.Data.Connections[0].Account, answer.Data.Connections[0].connection, true
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// patience bounds every wait of a test: it is only used up by one that fails.
const patience = 2 * time.Minute

// wait returns what comes on c, and fails the test when nothing does.
func wait[T any](t testing.TB, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("waited in vain for %s", what)
		panic("unreachable")
	}
}

// wantError checks the code and the text of a refusal.
func wantError(t testing.TB, err error, code schemas.Code, text string) {
	t.Helper()
	var e *schemas.Error
	if !errors.As(err, &e) || e.Code != code || e.Message != text {
		t.Errorf("error = %v (%s), want %q (%s)", err, schemas.CodeOf(err), text, code)
	}
}

// deadAudit is an audit log that has stopped.
func deadAudit(t *testing.T, e *env) *audit.Log {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	log, err := audit.New(ctx, e.store, "dead", e.Log)
	must(t, err)
	cancel()
	if err := log.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	return log
}
