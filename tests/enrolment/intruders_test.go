package enrolment

import (
	"crypto/tls"
	"crypto/x509"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// TestARelayCannotEnrol stands between both with TLS connections of its own. What it has towards the runner is even the control
// plane's own certificate, which it could have only by having stolen it.
func TestARelayCannotEnrol(t *testing.T) {
	p := start(t)
	r, ticket := p.create(t, "edge")
	for what, meddle := range map[string]func(t *testing.T, own *tls.Certificate, f *frame) *frame{
		"passes all on": func(_ *testing.T, _ *tls.Certificate, f *frame) *frame { return f },
		"asks for its own key": func(t *testing.T, own *tls.Certificate, f *frame) *frame {
			csr, err := identity.Request(own.PrivateKey.(signer), r.ID)
			must(t, err)
			f.GetProof().CsrDer = csr
			return f
		},
	} {
		t.Run(what, func(t *testing.T) {
			h := newHost(t, &ticket)
			own := selfSigned(t, r.ID)
			relay := listen(t, &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{link.ProtoEnrol}, Certificates: []tls.Certificate{own}}, func(fromPlane *tls.Conn) {
				config, err := p.ca.ClientTLS(link.ProtoEnrol)
				if err != nil {
					return
				}
				toRunner, err := tls.Dial("tcp", h.addr, config)
				if err != nil {
					return
				}
				defer func() { _ = toRunner.Close() }()
				hello := new(frame)
				if link.ReadFrame(fromPlane, hello) != nil || link.WriteFrame(toRunner, hello) != nil {
					return
				}
				proof := new(frame)
				if link.ReadFrame(toRunner, proof) != nil || link.WriteFrame(fromPlane, meddle(t, &own, proof)) != nil {
					return
				}
				answer := new(frame)
				if link.ReadFrame(fromPlane, answer) == nil {
					_ = link.WriteFrame(toRunner, answer)
				}
			})
			err := p.exchange(t.Context(), relay, r)
			if err == nil || schemas.CodeOf(err) != schemas.CodeForbidden {
				t.Error("the control plane took the relay for the runner:", err)
			}
			if err := h.served(); err == nil || h.store.State() != identity.Pending {
				t.Error("the runner took the relay for the control plane")
			}
			p.unspent(t, r.ID)
		})
	}
	t.Run("a proof that is replayed", func(t *testing.T) {
		h := newHost(t, &ticket)
		var old *frame
		for range 2 {
			own := selfSigned(t, r.ID)
			relay := listen(t, &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{link.ProtoEnrol}, Certificates: []tls.Certificate{own}}, func(fromPlane *tls.Conn) {
				hello := new(frame)
				if link.ReadFrame(fromPlane, hello) != nil {
					return
				}
				if old == nil {
					config, err := p.ca.ClientTLS(link.ProtoEnrol)
					if err != nil {
						return
					}
					toRunner, err := tls.Dial("tcp", h.addr, config)
					if err != nil {
						return
					}
					defer func() { _ = toRunner.Close() }()
					proof := new(frame)
					if link.WriteFrame(toRunner, hello) == nil && link.ReadFrame(toRunner, proof) == nil {
						old = proof
					}
					return
				}
				_ = link.WriteFrame(fromPlane, old)
				_ = link.ReadFrame(fromPlane, new(frame)) // the refusal
			})
			if err := p.exchange(t.Context(), relay, r); err == nil {
				t.Error("the control plane took a replay for the runner")
			}
			p.unspent(t, r.ID)
		}
		if old == nil {
			t.Fatal("nothing was recorded")
		}
	})
	t.Run("somebody without a certificate of the CA", func(t *testing.T) {
		h := newHost(t, &ticket)
		stranger := selfSigned(t, r.ID)
		conn, err := tls.Dial("tcp", h.addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{link.ProtoEnrol}, Certificates: []tls.Certificate{stranger}})
		if err == nil {
			defer func() { _ = conn.Close() }()
			if err = link.ReadFrame(conn, new(frame)); err == nil {
				t.Error("the runner said something to a stranger")
			}
		}
		if err := h.served(); err == nil || !strings.Contains(err.Error(), "another CA") {
			t.Error(err)
		}
	})
	h := newHost(t, &ticket)
	must(t, p.exchange(t.Context(), h.addr, r))
	p.one(t, h)
}

// TestAControlPlaneThatDoesNotKnowTheToken has a certificate of the CA and signs what it is asked to.
func TestAControlPlaneThatDoesNotKnowTheToken(t *testing.T) {
	p := start(t)
	r, ticket := p.create(t, "edge")
	for what, spoil := range map[string]func(*runbusv1.EnrolGrant){
		"without a proof":       func(*runbusv1.EnrolGrant) {},
		"with a wrong proof":    func(g *runbusv1.EnrolGrant) { g.Mac = make([]byte, 32) },
		"wrong, and once again": func(g *runbusv1.EnrolGrant) { g.Mac, g.Again = make([]byte, 32), true },
	} {
		t.Run(what, func(t *testing.T) {
			h := newHost(t, &ticket)
			config, err := p.ca.ClientTLS(link.ProtoEnrol)
			must(t, err)
			conn, err := tls.Dial("tcp", h.addr, config)
			must(t, err)
			defer func() { _ = conn.Close() }()
			must(t, link.WriteFrame(conn, helloFor(r.ID, time.Now())))
			proof := new(frame)
			must(t, link.ReadFrame(conn, proof))
			chain, _, err := p.ca.SignLeaf(proof.GetProof().GetCsrDer(), r.ID, time.Hour)
			must(t, err)
			grant := &runbusv1.EnrolGrant{CertificatePem: chain, Tenant: "acme"}
			spoil(grant)
			must(t, link.WriteFrame(conn, &frame{Said: &runbusv1.EnrolFrame_Grant{Grant: grant}}))
			answer := new(frame)
			must(t, link.ReadFrame(conn, answer))
			if answer.GetRefused().GetCode() != string(schemas.CodeForbidden) || h.store.State() != identity.Pending {
				t.Error(answer, h.store.State())
			}
		})
	}
}

func TestWhoDialsForAnEnrolmentIsCheckedAtTheHandshake(t *testing.T) {
	p := start(t)
	r, ticket := p.create(t, "edge")
	h := newHost(t, &ticket)
	client := caSigner(t, p.caDir)
	good := func() *x509.Certificate {
		return &x509.Certificate{NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), URIs: uris(schemas.ControlPlaneURI()), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	}
	for what, c := range map[string]struct {
		spoil  func(*x509.Certificate)
		config func(*tls.Config)
		want   string
	}{
		"a runner's leaf": {func(c *x509.Certificate) { c.URIs = uris(schemas.RunnerURI(r.ID)) }, nil, "is not spiffe://core.runink/control-plane"},
		"two URIs":        {func(c *x509.Certificate) { c.URIs = append(c.URIs, schemas.ControlPlaneURI()) }, nil, "is not spiffe://core.runink/control-plane"},
		"a server's":      {func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }, nil, "no client certificate of the runner CA"},
		"TLS 1.2":         {nil, func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12 }, "unsupported versions"},
		"no certificate":  {nil, func(c *tls.Config) { c.Certificates = nil }, "client didn't provide a certificate"},
		"no CA behind it": {nil, func(c *tls.Config) { c.Certificates[0].Certificate = c.Certificates[0].Certificate[:1] }, "another CA"},
		"another ALPN":    {nil, func(c *tls.Config) { c.NextProtos = []string{"h2"} }, "unsupported application protocols"},
		"no ALPN":         {nil, func(c *tls.Config) { c.NextProtos = nil }, "no TLS 1.3 connection for an enrolment"},
	} {
		t.Run(what, func(t *testing.T) {
			template := good()
			if c.spoil != nil {
				c.spoil(template)
			}
			config := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{link.ProtoEnrol}, Certificates: []tls.Certificate{client(template)}}
			if c.config != nil {
				c.config(config)
			}
			conn, err := tls.Dial("tcp", h.addr, config)
			if err == nil {
				defer func() { _ = conn.Close() }()
				_ = link.WriteFrame(conn, helloFor(r.ID, time.Now()))
				if err = link.ReadFrame(conn, new(frame)); err == nil {
					t.Error("the runner answered")
				}
			}
			if err := h.served(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the runner says %q, not %q", err, c.want)
			}
		})
	}
	for what, c := range map[string]struct{ from, to, runner time.Duration }{
		"expired": {-time.Minute, time.Hour, 24 * time.Hour}, "not yet valid": {24 * time.Hour, 48 * time.Hour, 0},
	} {
		t.Run(what, func(t *testing.T) {
			h := newHost(t, &ticket)
			h.clock.advance(c.runner)
			template := good()
			template.NotBefore, template.NotAfter = time.Now().Add(c.from), time.Now().Add(c.to)
			conn, err := tls.Dial("tcp", h.addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{link.ProtoEnrol}, Certificates: []tls.Certificate{client(template)}})
			must(t, err)
			defer func() { _ = conn.Close() }()
			must(t, link.WriteFrame(conn, helloFor(r.ID, h.clock.now())))
			if err := h.served(); err == nil || !strings.Contains(err.Error(), "the control plane's certificate is not valid now") {
				t.Errorf("the runner says %q", err)
			}
		})
	}
	must(t, p.exchange(t.Context(), h.addr, r))
	p.one(t, h)
}

// caSigner signs with the CA in dir, whatever it is asked to.
func caSigner(t *testing.T, dir string) func(*x509.Certificate) tls.Certificate {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca.key"))
	must(t, err)
	return func(template *x509.Certificate) tls.Certificate {
		return signed(t, template, pair.Leaf, pair.PrivateKey)
	}
}
