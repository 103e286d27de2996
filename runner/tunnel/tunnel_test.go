package tunnel_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/runner/tunnel"
	"github.com/org-runink/runbus/runner/tunnel/tunneltest"
)

func TestMain(m *testing.M) { leak.Main(m) }

// target is the address that every test dials; it resolves nowhere but at a proxy.
const target = "control-plane.test:443"

// greeter is a server that speaks first, as NATS does, and then gives back what it gets.
func greeter(t *testing.T, listen string) string {
	t.Helper()
	l, err := net.Listen("tcp", listen)
	must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "hello\n")
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	return l.Addr().String()
}

// talk checks that both directions work, from the first byte.
func talk(t *testing.T, d *tunnel.Dialer, addr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", addr)
	must(t, err)
	defer c.Close()
	cancel() // bounds the dial only
	_, err = io.WriteString(c, "ping\n")
	must(t, err)
	got := make([]byte, len("hello\nping\n"))
	_, err = io.ReadFull(c, got)
	must(t, err)
	if string(got) != "hello\nping\n" {
		t.Errorf("got %q", got)
	}
}

func certificate(t *testing.T) (*tls.Certificate, *x509.CertPool) {
	t.Helper()
	cert, key, ca, err := embedded.EnsureCertificate(filepath.Join(t.TempDir(), "tls"), nil)
	must(t, err)
	pair, err := tls.LoadX509KeyPair(cert, key)
	must(t, err)
	pem, err := os.ReadFile(ca)
	must(t, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	return &pair, roots
}

func TestTunnels(t *testing.T) {
	server := greeter(t, "127.0.0.1:0")
	cert, roots := certificate(t)
	knows := map[string]string{target: server}
	plain := tunneltest.Start(t, &tunneltest.Proxy{Knows: knows}, nil)
	login := tunneltest.Start(t, &tunneltest.Proxy{Knows: knows, User: "me", Password: "p@ss:word"}, nil)
	secured := tunneltest.Start(t, &tunneltest.Proxy{Knows: knows, User: "me", Password: "secret"}, cert)
	for name, proxy := range map[string]string{
		"URL":           "http://" + plain.Addr(),
		"host and port": plain.Addr(),
		"password":      "http://me:p%40ss%3Aword@" + login.Addr(),
		"https proxy":   "https://me:secret@" + secured.Addr(),
	} {
		t.Run(name, func(t *testing.T) {
			d, err := tunnel.New(tunnel.Settings{Proxy: proxy}, roots)
			must(t, err)
			talk(t, d, target)
		})
	}
	t.Run("server's first words in one packet with the proxy's", func(t *testing.T) {
		eager := tunneltest.Start(t, &tunneltest.Proxy{Answer: "HTTP/1.1 200 OK\r\n\r\nhello\nping\n"}, nil)
		d, err := tunnel.New(tunnel.Settings{Proxy: eager.Addr()}, nil)
		must(t, err)
		talk(t, d, target)
	})
}

// Both address families are dialled.
func TestDirectly(t *testing.T) {
	d, err := tunnel.New(tunnel.Settings{}, nil)
	must(t, err)
	four, six := greeter(t, "127.0.0.1:0"), greeter(t, "[::1]:0")
	talk(t, d, four)
	talk(t, d, six)
}

// What goes wrong with a proxy is told with what to do, and never with the password.
func TestRefusedTunnels(t *testing.T) {
	const nobody = "127.0.0.1:1"
	cert, _ := certificate(t)
	start := func(p *tunneltest.Proxy) string { return tunneltest.Start(t, p, nil).Addr() }
	for name, c := range map[string]struct {
		proxy  string
		status int
		text   string
		hint   string
	}{
		"no login": {start(&tunneltest.Proxy{User: "me", Password: "secret"}), 407,
			"asks for a user and password (407 Proxy Authentication Required)", "http://user:password@host:port"},
		"wrong login": {"http://me:hunter2@" + start(&tunneltest.Proxy{User: "me", Password: "secret"}), 407,
			"refuses the user and password in HTTPS_PROXY (407", "%XX"},
		"another kind of login": {"http://me:hunter2@" + start(&tunneltest.Proxy{User: "me", Password: "secret", Challenge: "Negotiate"}), 407,
			"a kind of login that the runner does not speak (407 Proxy Authentication Required): negotiate", "Basic"},
		"refused":         {start(&tunneltest.Proxy{}), 403, "refuses a tunnel to control-plane.test:443 (403 Forbidden)", "port 443 only"},
		"unreachable":     {start(&tunneltest.Proxy{Knows: map[string]string{target: nobody}}), 502, "can't reach control-plane.test:443 (502 Bad Gateway)", "does its name resolve"},
		"no HTTP":         {start(&tunneltest.Proxy{Answer: "220 mail.example ESMTP\r\n"}), 0, "the answer of the proxy is not HTTP", "is what HTTPS_PROXY names an HTTP proxy"},
		"endless answer":  {start(&tunneltest.Proxy{Answer: "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<20)}), 0, "the answer of the proxy is not HTTP", ""},
		"nobody listens":  {nobody, 0, "connection refused", "check HTTPS_PROXY, or name the control plane in NO_PROXY"},
		"plaintext proxy": {"https://me:hunter2@" + start(&tunneltest.Proxy{}), 0, "no TLS with the proxy", "http:// in HTTPS_PROXY"},
		"unknown CA":      {"https://me:hunter2@" + tunneltest.Start(t, &tunneltest.Proxy{}, cert).Addr(), 0, "certificate signed by unknown authority", "RUNNER_ENROLL_CA"},
		"silent":          {start(&tunneltest.Proxy{Silent: true}), 0, "no answer from the proxy", "does it answer others"},
	} {
		t.Run(name, func(t *testing.T) {
			d, err := tunnel.New(tunnel.Settings{Proxy: c.proxy, ProxyFrom: "HTTPS_PROXY", ExceptFrom: "NO_PROXY"}, nil)
			must(t, err)
			dial := func(limit time.Duration) error {
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				conn, err := d.DialContext(ctx, "tcp", target)
				if err == nil {
					_ = conn.Close()
					t.Fatal("a tunnel")
				}
				return err
			}
			if name != "silent" {
				err = dial(time.Minute)
			}
			for limit := time.Second; name == "silent" && limit < time.Minute; limit *= 4 { // in which it must be connected, too
				if err = dial(limit); strings.Contains(err.Error(), c.text) {
					break
				}
			}
			var e *tunnel.Error
			if !errors.As(err, &e) || e.Status != c.status || !strings.Contains(err.Error(), c.text) || !strings.Contains(e.Hint, c.hint) {
				t.Errorf("got %v (hint %q), want %q, %q", err, e.Hint, c.text, c.hint)
			}
			if strings.Contains(err.Error()+e.Hint, "hunter2") {
				t.Error("the password is shown")
			}
		})
	}
}

func TestSettings(t *testing.T) {
	env := func(vars map[string]string) tunnel.Settings {
		return tunnel.FromEnv(func(name string) string { return vars[name] })
	}
	for name, c := range map[string]struct {
		vars       map[string]string
		addr       string
		proxy, why string
	}{
		"none":             {nil, target, "", "HTTPS_PROXY is not set"},
		"set":              {map[string]string{"HTTPS_PROXY": "http://u:p@proxy.test:3128"}, target, "http://proxy.test:3128", "set by HTTPS_PROXY"},
		"small letters":    {map[string]string{"https_proxy": "proxy.test", "HTTPS_PROXY": "other.test"}, target, "http://proxy.test:80", "set by https_proxy"},
		"https":            {map[string]string{"HTTPS_PROXY": "https://[fd00::1]"}, target, "https://[fd00::1]:443", "set by HTTPS_PROXY"},
		"HTTP_PROXY alone": {map[string]string{"HTTP_PROXY": "proxy.test"}, target, "", "HTTPS_PROXY is not set"},
		"except domain":    {map[string]string{"HTTPS_PROXY": "proxy.test", "NO_PROXY": "example.com, .test"}, target, "", "NO_PROXY names it"},
		"except port":      {map[string]string{"HTTPS_PROXY": "proxy.test", "no_proxy": "control-plane.test:4222"}, target, "http://proxy.test:80", "set by HTTPS_PROXY"},
		"except network":   {map[string]string{"HTTPS_PROXY": "proxy.test", "no_proxy": "fd00::/8"}, "[fd00::2]:443", "", "no_proxy names it"},
		"except all":       {map[string]string{"HTTPS_PROXY": "proxy.test", "NO_PROXY": "*"}, target, "", "NO_PROXY names it"},
		"loopback":         {map[string]string{"HTTPS_PROXY": "proxy.test"}, "[::1]:443", "", "loopback is always dialled directly"},
		"localhost":        {map[string]string{"HTTPS_PROXY": "proxy.test"}, "localhost:443", "", "loopback is always dialled directly"},
	} {
		d, err := tunnel.New(env(c.vars), nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if r := d.Route(c.addr); r.Proxy != c.proxy || r.Why != c.why {
			t.Errorf("%s: %+v, want %q, %q", name, r, c.proxy, c.why)
		}
	}
	for _, bad := range []string{"socks5://u:hunter2@proxy.test:1080", "http://u:hunter2@", "http://u:hunter2@proxy.test:port", "http://u:hunter2@proxy.test/path", "http://u:hunter2@pro xy.test"} {
		if _, err := tunnel.New(env(map[string]string{"https_proxy": bad}), nil); err == nil || strings.Contains(err.Error(), "hunter2") || !strings.HasPrefix(err.Error(), "https_proxy: ") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// Whatever a proxy answers, the dial ends, and nothing but a 2xx is a tunnel.
func FuzzAnswer(f *testing.F) {
	for _, seed := range []string{"HTTP/1.1 200 OK\r\n\r\nINFO {}", "HTTP/1.0 407 x\r\nProxy-Authenticate: NTLM\r\nProxy-Authenticate:\r\n\r\n", "HTTP/1.1 100 Continue\r\n\r\n", "\x00"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		if len(answer) == 0 {
			return // tunneltest takes that as none given
		}
		p := tunneltest.Start(t, &tunneltest.Proxy{Answer: string(answer)}, nil)
		d, err := tunnel.New(tunnel.Settings{Proxy: p.Addr()}, nil)
		must(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		c, err := d.DialContext(ctx, "tcp", target)
		if err == nil {
			_ = c.Close()
			if first, _, _ := strings.Cut(string(answer), "\n"); !strings.Contains(first, " 2") {
				t.Errorf("%q is a tunnel", answer)
			}
		} else if ctx.Err() != nil {
			t.Errorf("%q hangs: %v", answer, err)
		}
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
