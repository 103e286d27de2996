package runner

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
)

func plaintext(c *embedded.Config) { c.Plaintext = true }

// What keeps a runner from its control plane is in the log at each try, with what to do about it, and the runner goes on trying.
func TestWhyALinkDoesNotComeUp(t *testing.T) {
	secured, open := newControlPlane(t), newControlPlane(t, plaintext)
	stranger, _, err := schemas.NewServiceToken(edge.Tenant)
	must(t, err)
	for name, c := range map[string]struct {
		cp         *controlPlane
		change     func(*Config)
		text, hint string
	}{
		"server has no TLS": {open, func(c *Config) { c.Addrs = []string{open.Addr()} },
			"the control plane offers no TLS at this address", "check the address"},
		"server requires TLS": {secured, func(c *Config) { c.Addrs, c.TLS, c.CA = []string{secured.Addr()}, false, "" },
			"the control plane requires TLS, and RUNNER_ENROLL_TLS=false turns it off here: remove that setting", ""},
		"unknown CA": {secured, func(c *Config) { c.CA = "" },
			"certificate signed by unknown authority", "set RUNNER_ENROLL_CA"},
		"unknown CA, WebSocket": {secured, func(c *Config) { c.Addrs, c.CA = []string{secured.WebSocketURL()}, "" },
			"certificate signed by unknown authority", "set RUNNER_ENROLL_CA"},
		"unknown key": {secured, func(c *Config) { c.Token = stranger },
			"Authorization", "check RUNNER_ENROLL_TOKEN"},
		"nobody listens": {secured, func(c *Config) { c.Addrs = []string{"127.0.0.1:1"} },
			"connection refused", "nothing listens there"},
	} {
		t.Run(name, func(t *testing.T) {
			p := c.cp.run(t, c.change, nil)
			if first := p.log.awaitTimes(t, 1, "can't reach the control plane"); !strings.Contains(first, c.text) || !strings.Contains(first, c.hint) {
				t.Errorf("the first line is %q", first)
			}
			p.log.awaitTimes(t, 2, "can't reach the control plane", c.text, c.hint)
			p.Drain()
			p.exit(ExitOK)
		})
	}
}

// Every way to reach a control plane ends in an enrolment.
func TestWaysToAControlPlane(t *testing.T) {
	secured, open := newControlPlane(t), newControlPlane(t, plaintext)
	for name, c := range map[string]struct {
		cp     *controlPlane
		change func(*Config)
	}{
		"host and port": {secured, func(c *Config) { c.Addrs = []string{secured.Addr()} }},
		"WebSocket":     {secured, func(c *Config) { c.Addrs = []string{secured.WebSocketURL()} }},
		"second of two": {secured, func(c *Config) { c.Addrs = []string{"127.0.0.1:1", secured.Addr()} }},
		"plaintext":     {open, func(c *Config) { c.Addrs, c.TLS, c.CA = []string{open.Addr()}, false, "" }},
		"plaintext ws":  {open, func(c *Config) { c.Addrs, c.TLS, c.CA = []string{open.WebSocketURL()}, false, "" }},
	} {
		t.Run(name, func(t *testing.T) {
			p := c.cp.start(t, c.change, playing(newGate().fetch))
			p.Drain()
			p.exit(ExitOK)
			receive(t, c.cp.goodbyes, "goodbye")
		})
	}
}

func TestMixedSchemesAreAConfigurationError(t *testing.T) {
	cp := newControlPlane(t)
	p := cp.run(t, func(c *Config) { c.Addrs = []string{cp.URL(), cp.WebSocketURL()} }, nil)
	p.exit(ExitConfig)
}

// A control plane that is still starting is waited for.
func TestARunnerWaitsForItsControlPlane(t *testing.T) {
	cp := newControlPlane(t)
	proxy := bustest.NewProxy(t, cp.Addr())
	proxy.Cut(true)
	p := cp.run(t, func(c *Config) { c.Addrs = []string{proxy.Addr()} }, playing(func(_ context.Context, _ source.Request, out *source.Output) error { return oneRow(out) }))
	p.log.awaitTimes(t, 2, "can't reach the control plane")
	proxy.Cut(false)
	p.session = receive(t, p.enrolled, "enrolment").Session
	receive(t, cp.beats, "heartbeat")
	p.assign(nil).completes()
}

// nats.go closes a connection for good at an error that it doesn't know. A runner without a connection would sit there for
// ever: it ends instead, so that it is started anew.
func TestAConnectionThatIsClosedForGoodEndsTheRunner(t *testing.T) {
	cp := newControlPlane(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	served := make(chan struct{})
	go func() {
		defer close(served)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.WriteString(c, `INFO {"server_id":"X","version":"2.14.10","headers":true,"max_payload":1048576,"nonce":"abc","auth_required":true}`+"\r\n")
		for lines := bufio.NewScanner(c); lines.Scan(); {
			if lines.Text() == "PING" {
				_, _ = io.WriteString(c, "PONG\r\n-ERR 'Something Nobody Knows'\r\n")
			}
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-served
	})
	p := cp.run(t, func(c *Config) { c.Addrs, c.TLS, c.CA = []string{l.Addr().String()}, false, "" }, nil)
	if err := p.exit(ExitFailed); !strings.Contains(strings.ToLower(err.Error()), "something nobody knows") {
		t.Errorf("ends with %v", err)
	}
}

// A person's session token connects as what it is; the control plane's text ends the runner (SPEC E5; the callout's side is
// tested there).
func TestAPersonsTokenIsShownAsItIs(t *testing.T) {
	cred, err := parseCredential(schemas.NewSessionToken())
	must(t, err)
	if cred.tenant != schemas.NoTenant || cred.public != "" || cred.session == "" {
		t.Errorf("credential of a person: tenant %q, public key %q", cred.tenant, cred.public)
	}
	if _, err := parseCredential("rst1.short"); err == nil {
		t.Error("a damaged session token is taken")
	}
}

// What an error of connecting means, for those that a test can't bring about with the server's own certificate.
func TestExplainLink(t *testing.T) {
	for text, hint := range map[string]string{
		"tls: failed to verify certificate: x509: certificate is valid for a, not b":                    "a name that is in its certificate",
		"tls: failed to verify certificate: x509: certificate has expired or is not yet valid: in 1970": "check the clock",
		"dial tcp: lookup nowhere.invalid: no such host":                                                "does not resolve",
		"something else": "",
	} {
		if got, h := explainLink(errors.New(text)); got != text || !strings.Contains(h, hint) || hint == "" && h != "" {
			t.Errorf("%q: %q, hint %q", text, got, h)
		}
	}
}
