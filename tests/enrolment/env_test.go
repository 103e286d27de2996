// Package enrolment lets both sides of an enrolment and of a renewal meet: the control plane's CA, registry and exchange on a real bus,
// and a runner's state folder and responder behind a real TLS listener.
package enrolment

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/enrol"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
	"github.com/org-runink/runbus/tests/stack"
)

func TestMain(m *testing.M) { leak.Main(m) }

// patience bounds every wait of a test: it is only used up by one that fails.
const patience = 2 * time.Minute

var ada = auth.Principal{Tenant: "acme", Name: "ada", Role: auth.RoleOrgAdmin}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// clock is the real time, moved.
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

// plane is a control plane as far as it enrols.
type plane struct {
	*bustest.Bus
	clock  clock
	life   time.Duration
	caDir  string
	step   func(name string) // may be nil
	ca     *enrol.CA
	roster *roster.Roster
	audit  *audit.Log
	store  *jetstream.Store
	enrol  *enrol.Enroller
	stop   func()
	logged logBuffer
}

func start(t *testing.T) *plane {
	t.Helper()
	p := &plane{Bus: bustest.Start(t), caDir: filepath.Join(t.TempDir(), "runner-ca")}
	p.Log = slog.New(slog.NewTextHandler(&p.logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
	p.open(t, true)
	t.Cleanup(func() {
		must(t, stack.InspectStreams(context.Background(), t, p.Conn(t, embedded.UserSec)))
		p.stop()
		p.Shutdown()
		stack.InspectFolder(t, p.Dir, "the control plane")
		stack.InspectFolder(t, p.caDir, "the control plane's CA")
		stack.Inspect(t, "the log of the control plane", []byte(p.logged.String()), nil)
		if t.Failed() {
			t.Logf("log of the control plane:\n%s", p.logged.String())
		}
	})
	return p
}

// open starts what stands on the bus.
func (p *plane) open(t *testing.T, fresh bool) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	nc := p.Conn(t, embedded.UserSec)
	store, err := jetstream.Open(ctx, nc, jetstream.Options{Fresh: fresh, ConfirmEvery: 200 * time.Millisecond, Log: p.Log})
	must(t, err)
	p.store = store
	p.audit, err = audit.New(ctx, store, "test", p.Log)
	must(t, err)
	ended := make(chan struct{})
	go func(a *audit.Log) {
		defer close(ended)
		if err := a.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
			p.Log.Error("audit", "error", err)
		}
	}(p.audit)
	p.roster, err = roster.New(ctx, roster.Deps{Store: store, Audit: p.audit, Log: p.Log, Now: p.clock.now})
	must(t, err)
	p.ca, err = enrol.EnsureCA(p.caDir, p.Log)
	must(t, err)
	p.ca.SetClock(p.clock.now)
	p.enrol = enrol.NewEnroller(enrol.Config{CA: p.ca, Roster: p.roster, Audit: p.audit, LeafLife: p.life, Log: p.Log, Now: p.clock.now, Step: func(name string) {
		if p.step != nil {
			p.step(name)
		}
	}})
	var once sync.Once
	p.stop = func() {
		once.Do(func() {
			cancel()
			<-ended
			p.roster.Close()
			store.Close()
			nc.Close()
		})
	}
}

// restart is a new process on the same data folder: what was in memory is gone, proof keys too.
func (p *plane) restart(t *testing.T) {
	t.Helper()
	p.stop()
	p.Restart(t)
	p.open(t, false)
}

// create makes a runner and its ticket.
func (p *plane) create(t *testing.T, name string) (roster.Runner, schemas.Ticket) {
	t.Helper()
	r, minted, err := p.roster.Create(t.Context(), ada, roster.Spec{Name: name, Address: "edge.example.com:7443"})
	must(t, err)
	return r, p.ticket(r, minted)
}

func (p *plane) ticket(r roster.Runner, m roster.Minted) schemas.Ticket {
	ticket := schemas.Ticket{Token: m.Token, RunnerID: r.ID, Name: r.Name, ExpiresAt: m.ExpiresAt.UTC().Truncate(time.Second), CASHA256: p.ca.SHA256()}
	stack.Secrets.Learn("a new runner", []byte(ticket.Encode()))
	return ticket
}

// runner is the registry's present word on a runner, read from the leader.
func (p *plane) runner(t *testing.T, id string) roster.Runner {
	t.Helper()
	r, known, err := p.roster.ByID(id)
	must(t, err)
	if !known {
		t.Fatalf("the registry knows no %s", id)
	}
	return r
}

// settled waits until the view shows what want wants.
func (p *plane) settled(t *testing.T, id string, want func(roster.Runner) bool) roster.Runner {
	t.Helper()
	changed := make(chan struct{}, 1)
	p.roster.OnChange(func(roster.Runner) {
		select {
		case changed <- struct{}{}:
		default:
		}
	})
	timeout := time.After(patience)
	for {
		if r := p.runner(t, id); want(r) {
			return r
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("the registry still has %+v", p.runner(t, id))
		}
	}
}

// unspent fails the test if a token of the runner was used.
func (p *plane) unspent(t *testing.T, id string) {
	t.Helper()
	if _, _, _, err := p.roster.Proof(t.Context(), id); err != nil {
		t.Errorf("the token can't be proven any more: %v", err)
	}
	tokens, err := p.roster.Tokens(ada.Tenant)
	must(t, err)
	for _, token := range tokens {
		if token.RunnerID == id && token.UsedAt != nil {
			t.Error("the token was spent")
		}
	}
	if r := p.runner(t, id); r.State != roster.Pending {
		t.Errorf("the runner is %s", r.State)
	}
}

// exchange dials addr as the control plane does and carries out what the connection is for.
func (p *plane) exchange(ctx context.Context, addr string, r roster.Runner) error {
	protos, err := enrol.Protocols(r, p.clock.now())
	if err != nil {
		return err
	}
	config, err := p.ca.ClientTLS(protos...)
	if err != nil {
		return err
	}
	conn, err := (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	return p.enrol.Exchange(ctx, conn.(*tls.Conn), config, r)
}

// killedAt runs do and stops it dead at a step of the control plane: nothing after it runs, and its sockets are closed, as if the
// process had been killed there. It reports whether the step was reached.
func (p *plane) killedAt(step string, do func()) (killed bool) {
	type death struct{}
	p.step = func(name string) {
		if name == step {
			panic(death{})
		}
	}
	defer func() {
		p.step = nil
		if dead := recover(); dead != nil {
			if _, killed = dead.(death); !killed {
				panic(dead)
			}
		}
	}()
	do()
	return false
}

// host is a runner's side: a state folder and a listener.
type host struct {
	t      *testing.T
	dir    string
	ticket *schemas.Ticket
	clock  clock
	store  *identity.Store
	logged logBuffer
	errs   chan error // of each exchange

	addr string
	stop func()
}

func newHost(t *testing.T, ticket *schemas.Ticket) *host {
	t.Helper()
	h := &host{t: t, dir: filepath.Join(t.TempDir(), "state"), ticket: ticket, errs: make(chan error, 100)}
	h.start()
	t.Cleanup(func() {
		h.stop()
		stack.InspectFolder(t, h.dir, "the runner")
		stack.Inspect(t, "the log of the runner", []byte(h.logged.String()), nil)
	})
	return h
}

// start is a start of the runner's process.
func (h *host) start() {
	h.t.Helper()
	log := slog.New(slog.NewTextHandler(&h.logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
	store, err := identity.OpenWith(h.dir, identity.Options{Log: log})
	must(h.t, err)
	h.store = store
	use, err := store.Admit(h.ticket, h.clock.now())
	must(h.t, err)
	responder := identity.NewResponder(identity.ResponderConfig{Store: store, Ticket: use, Log: log, Now: h.clock.now})
	l, err := new(net.ListenConfig).Listen(h.t.Context(), "tcp", "127.0.0.1:0")
	must(h.t, err)
	h.addr = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				err := responder.Serve(ctx, tls.Server(conn, responder.TLS()))
				select {
				case h.errs <- err:
				default:
				}
			})
		}
	})
	h.stop = sync.OnceFunc(func() {
		cancel()
		_ = l.Close()
		serving.Wait()
		_ = store.Close()
	})
}

// restart is a new process on the same folder, with or without the ticket.
func (h *host) restart(ticket *schemas.Ticket) {
	h.t.Helper()
	h.stop()
	h.ticket = ticket
	h.start()
}

// served is how the last exchange ended on the runner's side.
func (h *host) served() error {
	h.t.Helper()
	select {
	case err := <-h.errs:
		return err
	case <-time.After(patience):
		h.t.Fatal("no exchange has ended on the runner's side")
		return nil
	}
}

// logBuffer is a log that may be read while it is written.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// one checks that a runner has exactly one valid certificate, and which.
func (p *plane) one(t *testing.T, h *host) {
	t.Helper()
	id := h.store.RunnerID()
	r := p.settled(t, id, func(r roster.Runner) bool {
		return r.Current != nil && r.Current.Fingerprint == h.store.Fingerprint() && r.Next == nil
	})
	if h.store.State() != identity.Enrolled || r.State != roster.Active {
		t.Fatalf("the runner is %s, the registry says %s", h.store.State(), r.State)
	}
}

// hint is what an error says to do.
func hint(err error) string {
	var e *schemas.Error
	if errors.As(err, &e) {
		return e.Hint
	}
	return ""
}

// events are the audit events of an action, as text.
func (p *plane) events(t *testing.T, action string) string {
	t.Helper()
	list, err := p.audit.List(t.Context(), ada.Tenant, 1000)
	must(t, err)
	var out bytes.Buffer
	for _, e := range list {
		if e.GetAction() == action {
			_, _ = fmt.Fprintln(&out, e.GetSubject(), e.GetOutcome(), e.GetDetails())
		}
	}
	return out.String()
}

type frame = runbusv1.EnrolFrame
