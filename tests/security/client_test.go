package security

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/seal"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
	"github.com/org-runink/runbus/tests/stack"
)

// bench is where the tests of this package connect to: a control plane, wherever it runs.
type bench struct {
	url, ca, dataDir string
}

func benchOf(p *stack.Plane) bench { return bench{url: p.NATS, ca: p.CA, dataDir: p.DataDir} }

// client is one connection whose errors the test sees.
type client struct {
	*nats.Conn
	bus    *bus.Conn     // on it
	errs   chan error    // what the server complained about, in order
	closed chan struct{} // the connection has ended
}

// connect dials with exactly these options, TLS and no reconnect.
func (b bench) connect(t testing.TB, options ...nats.Option) (*client, error) {
	t.Helper()
	pem, err := os.ReadFile(b.ca)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		t.Fatalf("%s holds no certificate", b.ca)
	}
	c := &client{errs: make(chan error, 1024), closed: make(chan struct{})}
	c.Conn, err = stack.Connect(b.url, append([]nats.Option{
		func(o *nats.Options) error {
			o.Secure, o.TLSConfig = true, &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool}
			return nil
		},
		nats.IgnoreDiscoveredServers(), nats.SkipHostLookup(), nats.NoReconnect(),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { c.errs <- err }),
		nats.ClosedHandler(func(*nats.Conn) { close(c.closed) }),
	}, options...)...)
	if err != nil {
		return nil, err
	}
	c.bus = bus.NewConn(c.Conn)
	t.Cleanup(func() {
		c.Close()
		<-c.closed
	})
	return c, nil
}

// mostAgain is how often something is tried again at most that was refused since somebody had no time for it.
const mostAgain = 3

// admitted is connect for who is let in. Whom the callout had no time for is refused, and comes back, as the product's own clients do.
func (b bench) admitted(t testing.TB, options ...nats.Option) (*client, error) {
	t.Helper()
	for again := 0; ; again++ {
		c, err := b.connect(t, options...)
		if again == mostAgain || !errors.Is(err, nats.ErrAuthorization) {
			return c, err
		}
		t.Logf("connected again: %v", err)
		<-time.After(100 * time.Millisecond)
	}
}

// privileged connects as one of the control plane's own users, or as ops, with the seed in its data folder.
func (b bench) privileged(t testing.TB, user string) *client {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(b.dataDir, "bus-keys.json"))
	if err != nil {
		t.Fatal(err)
	}
	var keys struct{ Seeds map[string]string }
	if err := json.Unmarshal(text, &keys); err != nil {
		t.Fatal("bus-keys.json can't be read")
	}
	pair, err := nkeys.FromSeed([]byte(keys.Seeds[user]))
	if err != nil {
		t.Fatalf("no seed of %q", user)
	}
	public, err := pair.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	c, err := b.admitted(t, nats.Nkey(public, pair.Sign), nats.Name("test-"+user))
	if err != nil {
		t.Fatalf("connect as %s: %v", user, err)
	}
	return c
}

// runner is a client with a runner's real credential and nothing of the agent.
type runner struct {
	*client
	ref     schemas.RunnerRef
	nonce   string
	sign    func(input []byte) ([]byte, error) // with its key or leaf
	public  string
	sealing []byte
	session string // after enrol
}

// dialRunner connects as runner/enrol.go does, under any name: id is the runner in the inbox prefix.
func (b bench) dialRunner(t testing.TB, token, id, nonce, connectName string) (*runner, error) {
	t.Helper()
	parsed, err := schemas.ParseServiceToken(token)
	if err != nil {
		t.Fatal(err)
	}
	key, err := seal.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	r := &runner{ref: schemas.RunnerRef{Tenant: parsed.Tenant, Runner: id}, nonce: nonce, sign: parsed.Key.Sign, sealing: key.Public()}
	if r.public, err = parsed.Key.PublicKey(); err != nil {
		t.Fatal(err)
	}
	r.client, err = b.admitted(t, nats.Name(connectName), nats.Nkey(r.public, parsed.Key.Sign), nats.CustomInboxPrefix(schemas.InboxPrefix(r.ref)))
	return r, err
}

// runner connects a runner under its id, and enrols it.
func (b bench) runner(t testing.TB, token, id string) *runner {
	t.Helper()
	nonce := schemas.NewID()
	r, err := b.dialRunner(t, token, id, nonce, schemas.ConnectName(id, nonce))
	if err != nil {
		t.Fatalf("connect as runner %s: %v", id, err)
	}
	r.enrol(t)
	return r
}

// enrol says hello, and reports once. Nothing answers that report: who presumes that it has come awaits the runner.
func (r *runner) enrol(t testing.TB) {
	t.Helper()
	answer := r.trueHello(t)
	if answer.GetError() != nil {
		t.Fatalf("hello of %s: %v", r.ref, answer.GetError())
	}
	r.session = answer.GetSession()
	r.beat(t)
}

// signedHello is a valid hello in everything but, perhaps, the id.
func (r *runner) signedHello(t testing.TB, id string) *runbusv1.RunnerHello {
	t.Helper()
	h := &runbusv1.RunnerHello{
		RunnerId: id, Name: "intruder", Version: "1", Capabilities: []string{"fetch"}, Limit: 4, ProcessNonce: r.nonce,
		Pid: int64(os.Getpid()), SealingKey: r.sealing, PublicKey: r.public, Session: r.session,
	}
	var err error
	if h.Signature, err = r.sign(schemas.HelloSigningInput(r.ref, h)); err != nil {
		t.Fatal(err)
	}
	return h
}

func (r *runner) heartbeat() *runbusv1.RunnerHeartbeat {
	return &runbusv1.RunnerHeartbeat{Session: r.session, ProcessNonce: r.nonce, Limit: 4}
}

// hello says it, the right way round, and returns the answer.
func (r *runner) hello(t testing.TB, h *runbusv1.RunnerHello) *runbusv1.EnrollmentAccepted {
	t.Helper()
	return r.ask(t, schemas.HelloSubject(r.ref), h)
}

// trueHello says the runner's own, and returns the answer: again, as a runner does, while the control plane can't decide.
func (r *runner) trueHello(t testing.TB) *runbusv1.EnrollmentAccepted {
	t.Helper()
	answer := r.hello(t, r.signedHello(t, r.ref.Runner))
	for give := time.Now().Add(stack.Patience); answer.GetError().GetCode() == string(schemas.CodeUnavailable) && time.Now().Before(give); {
		<-time.After(100 * time.Millisecond)
		answer = r.hello(t, r.signedHello(t, r.ref.Runner))
	}
	return answer
}

// ask sends m with a reply subject in the own inbox and returns the answer.
func (r *runner) ask(t testing.TB, subject string, m proto.Message) *runbusv1.EnrollmentAccepted {
	t.Helper()
	answer, err := r.asked(t, subject, m)
	if err != nil {
		t.Fatalf("%s: %v", subject, err)
	}
	return answer
}

// asked is ask, for who can do something about an error, as that the connection has ended.
func (r *runner) asked(t testing.TB, subject string, m proto.Message) (*runbusv1.EnrollmentAccepted, error) {
	ctx, cancel := context.WithTimeout(t.Context(), stack.Patience)
	defer cancel()
	go func() {
		select {
		case <-r.closed:
			cancel()
		case <-ctx.Done():
		}
	}()
	answer := new(runbusv1.EnrollmentAccepted)
	return answer, r.bus.Request(ctx, subject, m, answer)
}

// send publishes m in the bus's envelope.
func (c *client) send(t testing.TB, subject, reply string, m proto.Message) {
	t.Helper()
	if err := c.bus.PublishWithReply(subject, reply, m); err != nil {
		t.Fatalf("publish %s: %v", subject, err)
	}
}

// beat sends a heartbeat and flushes.
func (r *runner) beat(t testing.TB) {
	t.Helper()
	r.send(t, schemas.HeartbeatSubject(r.ref), "", r.heartbeat())
	r.flush(t)
}

func (c *client) flush(t testing.TB) {
	t.Helper()
	if err := c.FlushTimeout(stack.Patience); err != nil {
		t.Fatalf("flush: %v", err)
	}
}

// violation waits for the server's complaint about subject. One of another kind fails the test.
func (c *client) violation(t testing.TB, kind, subject string) {
	t.Helper()
	if err := c.violated(kind, subject); err != nil {
		t.Fatal(err)
	}
}

// violated is violation, for who can do something about an error.
func (c *client) violated(kind, subject string) error {
	select {
	case err := <-c.errs:
		if !errors.Is(err, nats.ErrPermissionViolation) || !strings.Contains(err.Error(), kind) || !strings.Contains(err.Error(), strconv.Quote(subject)) {
			return fmt.Errorf("the server says %w, want a violation: %s %q", err, kind, subject)
		}
		return nil
	case <-c.closed:
		return fmt.Errorf("%s %q: the connection was closed: %w", kind, subject, c.LastError())
	case <-time.After(stack.Patience):
		return fmt.Errorf("no violation: %s %q", kind, subject)
	}
}

// quiet fails the test when the server complained about anything.
func (c *client) quiet(t testing.TB, about string) {
	t.Helper()
	c.flush(t)
	select {
	case err := <-c.errs:
		t.Fatalf("%s: the server says %v", about, err)
	default:
	}
}
