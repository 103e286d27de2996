// Package bustest runs the real embedded server for tests: free ports, TLS, temporary folders.
package bustest

import (
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/internal/natsdial"
	"github.com/org-runink/runbus/schemas"
)

// Bus is a running server with its material. What a test does wrong with it fails that test.
type Bus struct {
	*embedded.Server
	Keys   *embedded.Keys
	Dir    string // temporary; the server's store is in it
	CAFile string
	Log    *slog.Logger

	out     *output
	config  embedded.Config
	callout sync.Once
	double  *calloutDouble
}

// patience is how long the server and its clients wait for each other before a connection stands: the defaults of two seconds are
// too short for a machine that does much else.
const patience = time.Minute

// Option changes the server's configuration before it starts.
type Option func(*embedded.Config)

// Start runs a server with TLS and a WebSocket listener on free ports of 127.0.0.1 until the test ends. Its log goes to
// the test's. The callout is not served: a test brings its own, or uses RunnerConn and OpsConn, which start a double.
func Start(t testing.TB, options ...Option) *Bus {
	t.Helper()
	dir := t.TempDir()
	keys, err := embedded.LoadKeys(filepath.Join(dir, "keys.json"))
	if err != nil {
		t.Fatalf("keys of the test's server: %v", err)
	}
	cert, key, ca, err := embedded.EnsureCertificate(filepath.Join(dir, "tls"), nil)
	if err != nil {
		t.Fatalf("certificate of the test's server: %v", err)
	}
	out := newOutput(t)
	log := slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelInfo}))
	b := &Bus{Keys: keys, Dir: dir, CAFile: ca, Log: log, out: out, config: embedded.Config{
		StoreDir: filepath.Join(dir, "store"), Listen: "127.0.0.1:0", WebSocket: "127.0.0.1:0",
		CertFile: cert, KeyFile: key, Keys: keys, Log: log, AuthTimeout: patience,
	}}
	for _, o := range options {
		o(&b.config)
	}
	b.Server, err = embedded.Start(b.config)
	if err != nil {
		t.Fatalf("start the test's server: %v", err)
	}
	t.Cleanup(func() { b.Shutdown() }) // of the server that runs then: see Restart
	return b
}

// Restart stops the server and starts it again on the same folder and addresses, once they are free: somebody else may use a port in
// between. Connections of Conn are closed by it; those over the network reconnect.
func (b *Bus) Restart(t testing.TB) {
	t.Helper()
	b.config.Listen = b.Addr()
	if b.config.WebSocket != "" {
		b.config.WebSocket = b.WebSocketAddr()
	}
	b.Shutdown()
	s, err := embedded.Start(b.config)
	for give := time.Now().Add(patience); schemas.CodeOf(err) == schemas.CodeConflict && time.Now().Before(give); {
		<-time.After(100 * time.Millisecond)
		s, err = embedded.Start(b.config)
	}
	if err != nil {
		t.Fatalf("restart the test's server: %v", err)
	}
	b.Server = s
	if b.double != nil {
		b.double.serve(t, b)
	}
}

// URL is the client port, with its scheme.
func (b *Bus) URL() string {
	if b.config.Plaintext {
		return "nats://" + b.Addr()
	}
	return "tls://" + b.Addr()
}

// WebSocketURL is the WebSocket listener, with its scheme.
func (b *Bus) WebSocketURL() string {
	if b.config.Plaintext {
		return "ws://" + b.WebSocketAddr()
	}
	return "wss://" + b.WebSocketAddr()
}

// Conn connects a configured user in process, until the test ends.
func (b *Bus) Conn(t testing.TB, u embedded.User, o ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := b.Connect(u, append([]nats.Option{b.quiet()}, o...)...)
	if err != nil {
		t.Fatalf("connect %s: %v", u, err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// RunnerConn connects over TCP and TLS as a runner: with a fresh nkey, the runner's real permissions in account RUN, its
// inbox prefix and a CONNECT name `<id>/<nonce>`. The callout is a double that trusts the keys made here.
func (b *Bus) RunnerConn(t testing.TB, ref schemas.RunnerRef, o ...nats.Option) *nats.Conn {
	t.Helper()
	if err := ref.Valid(); err != nil {
		t.Fatalf("runner of a test: %v", err)
	}
	public, sign := b.serveDouble(t).addRunner(t, ref)
	return b.dial(t, append([]nats.Option{
		nats.Nkey(public, sign), nats.Name(schemas.ConnectName(ref.Runner, schemas.NewID())),
		nats.CustomInboxPrefix(schemas.InboxPrefix(ref)),
	}, o...)...)
}

// RunnerToken is a service-account token that the server lets in as ref, by the double of the callout: for a test that runs
// a whole runner.
func (b *Bus) RunnerToken(t testing.TB, ref schemas.RunnerRef) string {
	t.Helper()
	token, public, err := schemas.NewServiceToken(ref.Tenant)
	if err != nil {
		t.Fatalf("token of a test's runner: %v", err)
	}
	b.serveDouble(t).trust(public, ref)
	return token
}

// OpsConn connects over TCP and TLS as ops, with its real permissions in account OPS, by the double of the callout.
func (b *Bus) OpsConn(t testing.TB, o ...nats.Option) *nats.Conn {
	t.Helper()
	b.serveDouble(t)
	return b.dial(t, append([]nats.Option{seedOption(t, b.Keys.OpsSeed()), nats.Name("ops")}, o...)...)
}

// OpsSysConn connects over TCP and TLS as the system user of ops, with its real permissions, by the double of the callout.
func (b *Bus) OpsSysConn(t testing.TB, o ...nats.Option) *nats.Conn {
	t.Helper()
	b.serveDouble(t)
	return b.dial(t, append([]nats.Option{seedOption(t, b.Keys.OpsSysSeed()), nats.Name("ops-sys")}, o...)...)
}

func (b *Bus) dial(t testing.TB, o ...nats.Option) *nats.Conn {
	t.Helper()
	options := []nats.Option{b.quiet(), nats.MaxReconnects(-1), nats.IgnoreDiscoveredServers(), nats.Timeout(patience)}
	if !b.config.Plaintext {
		options = append(options, nats.RootCAs(b.CAFile))
	}
	nc, err := natsdial.Connect(patience, b.URL(), append(options, o...)...)
	if err != nil {
		t.Fatalf("connect to the test's server: %v", err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// quiet keeps a connection's asynchronous errors in the test's log; nats.go would print them.
func (b *Bus) quiet() nats.Option {
	return nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { b.out.printf("nats: %v", err) })
}

// output is a test's log that may be written to at any time: what comes after the test's end is dropped, where testing
// would panic.
type output struct {
	mu    sync.Mutex
	t     testing.TB
	ended bool
}

// Output is t.Output for a log that is written to by what may go on after the test's end.
func Output(t testing.TB) io.Writer { return newOutput(t) }

func newOutput(t testing.TB) *output {
	o := &output{t: t}
	t.Cleanup(func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.ended = true
	})
	return o
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended {
		return len(p), nil
	}
	return o.t.Output().Write(p)
}

func (o *output) printf(format string, args ...any) {
	_, _ = fmt.Fprintf(o, format+"\n", args...)
}
