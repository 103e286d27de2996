package embedded_test

import (
	"bufio"
	"crypto/tls"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/internal/natsdial"
)

func opsOptions(t testing.TB, b *bustest.Bus, o ...nats.Option) []nats.Option {
	t.Helper()
	b.OpsConn(t).Close() // serves the callout
	return append([]nats.Option{seedOption(t, b.Keys.OpsSeed()), nats.Timeout(soon)}, o...)
}

func TestTLSVersions(t *testing.T) {
	b := bustest.Start(t)
	pool := roots(t, b.CAFile)
	for name, dial := range map[string]func(*tls.Config) (*tls.Conn, error){
		"client port": func(c *tls.Config) (*tls.Conn, error) {
			raw, err := net.Dial("tcp", b.Addr())
			if err != nil {
				return nil, err
			}
			if _, err := bufio.NewReaderSize(raw, 16).ReadString('\n'); err != nil { // INFO comes before the handshake
				return nil, err
			}
			s := tls.Client(raw, c)
			return s, s.Handshake()
		},
		"WebSocket": func(c *tls.Config) (*tls.Conn, error) { return tls.Dial("tcp", b.WebSocketAddr(), c) },
	} {
		t.Run(name, func(t *testing.T) {
			c, err := dial(&tls.Config{RootCAs: pool, ServerName: "127.0.0.1", MaxVersion: tls.VersionTLS12})
			if err == nil || !strings.Contains(err.Error(), "protocol version") {
				t.Errorf("TLS 1.2: %v", err)
			}
			if c != nil {
				_ = c.Close()
			}
			c, err = dial(&tls.Config{RootCAs: pool, ServerName: "127.0.0.1"})
			if err != nil {
				t.Fatal(err)
			}
			if v := c.ConnectionState().Version; v != tls.VersionTLS13 {
				t.Errorf("version %s", tls.VersionName(v))
			}
			_ = c.Close()
		})
	}
}

func TestPlaintextIsRefusedWhenTLSIsOn(t *testing.T) {
	b := bustest.Start(t)
	raw, err := net.Dial("tcp", b.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = raw.Close() }()
	w := &wire{Conn: raw, t: t, r: bufio.NewReader(raw)}
	info := w.expect("INFO ")
	if !strings.Contains(info, `"tls_required":true`) || strings.Contains(info, `"tls_available":true`) {
		t.Errorf("the server says %s", info)
	}
	w.send("CONNECT {}\r\nPING\r\n")
	if line, err := w.r.ReadString('\n'); strings.HasPrefix(line, "PONG") || strings.HasPrefix(line, "+OK") {
		t.Errorf("answered in plaintext: %q, %v", line, err)
	}
	if nc, err := natsdial.Connect(soon, "ws://"+b.WebSocketAddr(), opsOptions(t, b)...); err == nil {
		nc.Close()
		t.Error("a WebSocket without TLS connected")
	}
	if nc, err := natsdial.Connect(soon, "tls://"+b.Addr(), opsOptions(t, b)...); err == nil {
		nc.Close()
		t.Error("connected without knowing the authority")
	}
}

func TestWebSocketConnects(t *testing.T) {
	b := bustest.Start(t)
	nc, err := natsdial.Connect(soon, b.WebSocketURL(), opsOptions(t, b, nats.RootCAs(b.CAFile))...)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if err := nc.FlushTimeout(soon); err != nil {
		t.Fatal(err)
	}
	if state, err := nc.TLSConnectionState(); err == nil && state.Version != tls.VersionTLS13 {
		t.Errorf("version %s", tls.VersionName(state.Version))
	}
	if !strings.HasPrefix(b.WebSocketURL(), "wss://127.0.0.1:") {
		t.Errorf("URL %s", b.WebSocketURL())
	}
}

// Told to, the server takes plaintext on both listeners, and still nobody without a key.
func TestPlaintextWhenTold(t *testing.T) {
	b := bustest.Start(t, func(c *embedded.Config) { c.Plaintext, c.CertFile, c.KeyFile = true, "", "" })
	for _, url := range []string{b.URL(), b.WebSocketURL()} {
		nc, err := natsdial.Connect(soon, url, opsOptions(t, b)...)
		if err != nil {
			t.Fatalf("%s: %v", url, err)
		}
		if err := nc.FlushTimeout(soon); err != nil {
			t.Errorf("%s: %v", url, err)
		}
		nc.Close()
		if nc, err := natsdial.Connect(soon, url, nats.Timeout(soon)); !errors.Is(err, nats.ErrAuthorization) {
			if nc != nil {
				nc.Close()
			}
			t.Errorf("%s without a key: %v", url, err)
		}
	}
}

// Until the callout is served nobody but the configured users gets in.
func TestNobodyGetsInWithoutTheCallout(t *testing.T) {
	b := bustest.Start(t, hurried)
	for give := time.Now().Add(soon); ; {
		nc, err := natsdial.Connect(soon, b.URL(), nats.Timeout(soon), nats.RootCAs(b.CAFile), seedOption(t, b.Keys.OpsSeed()))
		if err == nil {
			nc.Close()
			t.Fatal("let in")
		}
		if errors.Is(err, nats.ErrAuthorization) {
			return
		}
		if !strings.Contains(strings.ToLower(err.Error()), "authentication timeout") || time.Now().After(give) { // a slow machine's handshake
			t.Fatalf("got %v", err)
		}
	}
}
