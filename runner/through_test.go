package runner

import (
	"context"
	"crypto/tls"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/runner/tunnel"
	"github.com/org-runink/runbus/runner/tunnel/tunneltest"
)

// name is the control plane's in tests that reach it through a proxy: it resolves nowhere else.
const name = "control-plane.test"

// named gives the server a certificate for name, by the same authority.
func named(t *testing.T) func(*embedded.Config) {
	return func(c *embedded.Config) {
		_, _, _, err := embedded.EnsureCertificate(filepath.Dir(c.CertFile), []string{name})
		must(t, err)
	}
}

func onIPv6(c *embedded.Config) { c.Listen, c.WebSocket = "[::1]:0", "[::1]:0" }

// serverCertificate is that of the control plane, for a proxy.
func (c *controlPlane) serverCertificate(t *testing.T) *tls.Certificate {
	t.Helper()
	dir := filepath.Dir(c.CAFile)
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "server.pem"), filepath.Join(dir, "server.key"))
	must(t, err)
	return &pair
}

// A network whose only way out is a proxy, and one whose only port out is 443 (SPEC E10): the name resolves at the proxy alone,
// which lets nothing through but the one address.
func TestThroughAProxy(t *testing.T) {
	cp := newControlPlane(t, named(t))
	for what, c := range map[string]struct {
		addr, asks, really string
		user               string
		secured            bool
	}{
		"TLS":                        {addr: name, asks: name + ":4222", really: cp.Addr()},
		"only 443 is open":           {addr: "wss://" + name, asks: name + ":443", really: cp.WebSocketAddr()},
		"proxy with a login":         {addr: "wss://" + name, asks: name + ":443", really: cp.WebSocketAddr(), user: "me"},
		"https proxy with a login":   {addr: "wss://" + name, asks: name + ":443", really: cp.WebSocketAddr(), user: "me", secured: true},
		"TLS on 443, proxy with TLS": {addr: "tls://" + name + ":443", asks: name + ":443", really: cp.Addr(), secured: true},
	} {
		t.Run(what, func(t *testing.T) {
			proxy := &tunneltest.Proxy{Knows: map[string]string{c.asks: c.really}, User: c.user, Password: "hunter2"}
			scheme := "http"
			var cert *tls.Certificate
			if c.secured {
				scheme, cert = "https", cp.serverCertificate(t)
			}
			tunneltest.Start(t, proxy, cert)
			login := ""
			if c.user != "" {
				login = c.user + ":hunter2@"
			}
			env := map[string]string{"HTTPS_PROXY": scheme + "://" + login + proxy.Addr(), "RUNNER_ENROLL_ADDR": c.addr}
			p := cp.start(t, func(cfg *Config) {
				from, err := ConfigFromEnv(func(name string) string { return env[name] })
				must(t, err)
				cfg.Addrs, cfg.Proxy = from.Addrs, from.Proxy
			}, playing(newGate().fetch))
			receive(t, cp.hellos, "hello")

			proxy.Cut() // the link, in the middle
			if again := receive(t, p.enrolled, "enrolment after the cut"); again.Session != p.session {
				t.Errorf("session %s, was %s", again.Session, p.session)
			}
			receive(t, cp.hellos, "hello after the cut")
			if asked := proxy.Asked(); len(asked) < 2 || slices.ContainsFunc(asked, func(a string) bool { return a != c.asks }) {
				t.Errorf("the proxy was asked for %v, want only %s", asked, c.asks)
			}
			p.Drain()
			_ = p.exit(ExitOK)
			receive(t, cp.goodbyes, "goodbye")
			if strings.Contains(p.log.text(), "hunter2") {
				t.Error("the proxy's password is in the log")
			}
		})
	}
}

// What a proxy has against it is in the log at each try, and the runner goes on trying (SPEC E8, E10).
func TestWhyAProxyDoesNotLetThrough(t *testing.T) {
	cp := newControlPlane(t, named(t))
	for what, c := range map[string]struct {
		proxy      *tunneltest.Proxy
		text, hint string
	}{
		"login refused": {&tunneltest.Proxy{User: "me", Password: "other"}, "refuses the user and password in HTTPS_PROXY (407", "check them"},
		"not allowed":   {&tunneltest.Proxy{}, "refuses a tunnel to control-plane.test:4222 (403", "many allow port 443 only"},
		"silent":        {&tunneltest.Proxy{Silent: true}, "no answer from the proxy", "does it answer others"},
	} {
		t.Run(what, func(t *testing.T) {
			tunneltest.Start(t, c.proxy, nil)
			p := cp.run(t, func(cfg *Config) {
				cfg.Addrs = []string{name}
				cfg.Proxy = tunnel.Settings{Proxy: "http://me:hunter2@" + c.proxy.Addr()}
			}, func(a *Agent) {
				if c.proxy.Silent {
					a.waits.connect = time.Second
				}
			})
			p.log.awaitTimes(t, 3, "can't reach the control plane", c.text, c.hint)
			p.Drain()
			_ = p.exit(ExitOK)
			if strings.Contains(p.log.text(), "hunter2") {
				t.Error("the proxy's password is in the log")
			}
		})
	}
}

func TestIPv6Only(t *testing.T) {
	cp := newControlPlane(t, onIPv6)
	for what, addr := range map[string]string{"TLS": cp.Addr(), "WebSocket": cp.WebSocketURL()} {
		t.Run(what, func(t *testing.T) {
			if !strings.Contains(addr, "[::1]:") {
				t.Fatalf("the address is %s", addr)
			}
			p := cp.start(t, func(c *Config) { c.Addrs = []string{addr} }, playing(newGate().fetch))
			p.Drain()
			_ = p.exit(ExitOK)
			receive(t, cp.goodbyes, "goodbye")
		})
	}
}

// silent takes connections and says nothing, as a firewall or a captive portal may.
func silent(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	var open []net.Conn
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			open = append(open, c)
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
		for _, c := range open {
			_ = c.Close()
		}
	})
	return l.Addr().String()
}

// A peer that never answers is given up and tried again, whatever is spoken with it; and it holds up neither a drain nor the end.
func TestASilentPeer(t *testing.T) {
	cp := newControlPlane(t)
	for _, scheme := range []string{"tls", "wss"} {
		t.Run(scheme, func(t *testing.T) {
			addr := scheme + "://" + silent(t)
			p := cp.run(t, func(c *Config) { c.Addrs = []string{addr} }, func(a *Agent) { a.waits.connect = time.Second })
			p.log.awaitTimes(t, 3, "can't reach the control plane", "a firewall may drop the connection")
			p.Drain()
			_ = p.exit(ExitOK)
		})
		t.Run(scheme+", drained at once", func(t *testing.T) {
			addr := scheme + "://" + silent(t)
			p := cp.run(t, func(c *Config) { c.Addrs = []string{addr} }, func(a *Agent) { a.waits.connect = time.Hour })
			p.log.await(t, "Outbound runner enrolment enabled")
			p.Drain()
			_ = p.exit(ExitOK)
		})
	}
	t.Run("cancelled", func(t *testing.T) {
		a, err := New(Config{Addrs: []string{"wss://" + silent(t)}, Token: cp.token, ID: "edge", TLS: true, StateDir: t.TempDir()})
		must(t, err)
		a.waits.connect = time.Hour
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- a.Run(ctx) }()
		cancel()
		if err := receive(t, ended, "end of the runner"); err == nil {
			t.Error("a cancelled runner ends well")
		}
	})
}
