package embedded_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
)

// config is a server's that is not started.
func config(t testing.TB) embedded.Config {
	t.Helper()
	dir := t.TempDir()
	keys, err := embedded.LoadKeys(filepath.Join(dir, "keys.json"))
	if err != nil {
		t.Fatal(err)
	}
	cert, key, _, err := embedded.EnsureCertificate(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	return embedded.Config{
		StoreDir: filepath.Join(dir, "store"), Listen: "127.0.0.1:0", WebSocket: "127.0.0.1:0",
		CertFile: cert, KeyFile: key, Keys: keys, Log: slog.New(slog.DiscardHandler),
	}
}

func start(t testing.TB, c embedded.Config) *embedded.Server {
	t.Helper()
	s, err := embedded.Start(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Shutdown)
	return s
}

func seedOption(t testing.TB, seed []byte) nats.Option {
	t.Helper()
	pair, err := nkeys.FromSeed(seed)
	if err != nil {
		t.Fatal(err)
	}
	public, err := pair.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return nats.Nkey(public, pair.Sign)
}

// kick drops a connection, as the control plane does on a revocation.
func kick(t testing.TB, b *bustest.Bus, cid uint64) {
	t.Helper()
	if _, err := b.Conn(t, embedded.UserSys).Request("$SYS.REQ.SERVER."+b.ID()+".KICK", fmt.Appendf(nil, `{"cid":%d}`, cid), soon); err != nil {
		t.Fatalf("kick: %v", err)
	}
}

func roots(t testing.TB, caFile string) *x509.CertPool {
	t.Helper()
	pem, err := os.ReadFile(caFile)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		t.Fatal("no certificate in the authority's file")
	}
	return pool
}

// wire is a client that speaks the protocol by hand, for what nats.go would not send.
type wire struct {
	net.Conn
	t     testing.TB
	r     *bufio.Reader
	nonce string // what the server offers to sign
}

// dialWire connects over TCP, reads INFO and shakes hands. Reads and writes fail after a while rather than hang.
func dialWire(t testing.TB, b *bustest.Bus) *wire {
	t.Helper()
	w, err := tryWire(t, b)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// tryWire is dialWire for a server that may give up before.
func tryWire(t testing.TB, b *bustest.Bus) (*wire, error) {
	t.Helper()
	c, err := net.Dial("tcp", b.Addr())
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(3 * soon)); err != nil {
		return nil, err
	}
	line, err := bufio.NewReaderSize(c, 16).ReadString('\n') // no more than INFO comes before the handshake
	if err != nil {
		return nil, err
	}
	var info struct {
		Nonce string `json:"nonce"`
	}
	if err := json.Unmarshal([]byte(strings.TrimPrefix(line, "INFO ")), &info); err != nil || info.Nonce == "" {
		return nil, fmt.Errorf("got %q, %w, want INFO with a nonce", line, err)
	}
	s := tls.Client(c, &tls.Config{RootCAs: roots(t, b.CAFile), ServerName: "127.0.0.1", MinVersion: tls.VersionTLS13})
	if err := s.Handshake(); err != nil {
		return nil, err
	}
	return &wire{Conn: s, t: t, r: bufio.NewReader(s), nonce: info.Nonce}, nil
}

func (w *wire) send(format string, args ...any) {
	w.t.Helper()
	if _, err := fmt.Fprintf(w, format, args...); err != nil {
		w.t.Fatalf("send: %v", err)
	}
}

// expect reads until a line begins with prefix and returns it.
func (w *wire) expect(prefix string) string {
	w.t.Helper()
	var seen []string
	for {
		line, err := w.r.ReadString('\n')
		if strings.HasPrefix(line, prefix) {
			return strings.TrimSpace(line)
		}
		if err != nil {
			w.t.Fatalf("waiting for %q: %v, got %q", prefix, err, seen)
		}
		seen = append(seen, line)
	}
}

// logHook is a slog handler that passes each line on.
type logHook struct{ lines chan slog.Record }

func newLogHook() logHook { return logHook{lines: make(chan slog.Record, 1024)} }

func (h logHook) Enabled(context.Context, slog.Level) bool { return true }
func (h logHook) WithAttrs([]slog.Attr) slog.Handler       { return h }
func (h logHook) WithGroup(string) slog.Handler            { return h }

// Handle drops what nobody reads in time: the server must not wait for a test.
func (h logHook) Handle(_ context.Context, r slog.Record) error {
	select {
	case h.lines <- r:
	default:
	}
	return nil
}

// expect waits for a line that contains text.
func (h logHook) expect(t testing.TB, text string) slog.Record {
	t.Helper()
	deadline := time.After(3 * soon)
	for {
		select {
		case r := <-h.lines:
			if strings.Contains(r.Message, text) {
				return r
			}
		case <-deadline:
			t.Fatalf("no log line with %q", text)
		}
	}
}

// dialOps is dialWire with the ops user signed in.
func dialOps(t testing.TB, b *bustest.Bus) *wire {
	t.Helper()
	b.OpsConn(t).Close() // serves the callout
	pair, err := nkeys.FromSeed(b.Keys.OpsSeed())
	if err != nil {
		t.Fatal(err)
	}
	w := dialWire(t, b)
	sig, err := pair.Sign([]byte(w.nonce))
	if err != nil {
		t.Fatal(err)
	}
	w.send("CONNECT {\"nkey\":%q,\"sig\":%q,\"verbose\":false,\"protocol\":1,\"tls_required\":true}\r\nPING\r\n",
		b.Keys.OpsPublic(), base64.RawURLEncoding.EncodeToString(sig))
	w.expect("PONG")
	return w
}
