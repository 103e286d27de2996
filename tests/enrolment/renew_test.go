package enrolment

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/cp/enrol"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// enrolled is a runner that has its first certificate.
func (p *plane) enrolled(t *testing.T, name string) (roster.Runner, *host) {
	t.Helper()
	r, ticket := p.create(t, name)
	h := newHost(t, &ticket)
	must(t, p.exchange(t.Context(), h.addr, r))
	must(t, h.served())
	p.one(t, h)
	return p.runner(t, r.ID), h
}

// link is a fresh handshake of a link: it presents the runner's certificate, and promotes it if it is the next one. It is what the
// dialler does, without the bus.
func (p *plane) link(t *testing.T, h *host) error {
	t.Helper()
	id := h.store.RunnerID()
	shown, err := presented(t, p, h)
	if err != nil {
		return err
	}
	r := p.runner(t, id)
	switch {
	case r.Current.Fingerprint == shown:
		return nil
	case r.Next != nil && r.Next.Fingerprint == shown:
		_, err := p.roster.Promote(t.Context(), id, shown)
		return err
	}
	return errors.New("the certificate is not pinned")
}

// presented is the fingerprint of the certificate that the runner shows and proves to hold in a handshake.
func presented(t *testing.T, p *plane, h *host) (string, error) {
	t.Helper()
	leaf := h.store.Leaf()
	addr := listen(t, &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{link.ProtoLink}, Certificates: []tls.Certificate{*leaf}}, func(c *tls.Conn) {
		_ = c.HandshakeContext(t.Context())
	})
	config, err := p.ca.ClientTLS(link.ProtoLink)
	must(t, err)
	config.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: p.ca.Pool(), CurrentTime: p.clock.now()})
		return err
	}
	conn, err := tls.Dial("tcp", addr, config)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	return h.store.Fingerprint(), nil
}

// orders is the bus between a renewer and a runner, which a test can cut.
type orders struct {
	renewals *identity.Renewals
	cut      func(order *runbusv1.RunnerControl, reply bool) bool // before it is delivered, or before its reply is; may be nil
}

var errCut = errors.New("the link was cut")

func (o *orders) order(_ context.Context, _ schemas.RunnerRef, m *runbusv1.RunnerControl) (*runbusv1.RunnerControlReply, error) {
	if o.cut != nil && o.cut(m, false) {
		return nil, errCut
	}
	reply := new(runbusv1.RunnerControlReply)
	var err error
	switch order := m.GetOrder().(type) {
	case *runbusv1.RunnerControl_Renew:
		reply.CsrDer, reply.LeafFingerprint, err = o.renewals.Request("replica")
	case *runbusv1.RunnerControl_Install:
		reply.LeafFingerprint, err = o.renewals.Install("replica", order.Install.GetCertificatePem())
		reply.Installed = err == nil
	}
	reply.Error = schemas.ToDetail(err)
	if o.cut != nil && o.cut(m, true) {
		return nil, errCut
	}
	return reply, nil
}

func (p *plane) renewer(o *orders, redial func(string)) *enrol.Renewer {
	return enrol.NewRenewer(enrol.RenewerConfig{
		Enroller: p.enrol, Linked: func(string) bool { return true }, Order: o.order, Redial: redial, Log: p.Log,
	})
}

// rightly checks the rule that must hold at every moment: the runner's certificate is pinned, and after a promotion it alone.
func (p *plane) rightly(t *testing.T, h *host) {
	t.Helper()
	r := p.runner(t, h.store.RunnerID())
	f := h.store.Fingerprint()
	if r.Pinned(f) == nil {
		t.Fatalf("the runner has %.16s…, the registry pins %+v and %+v: none is valid", f, r.Current, r.Next)
	}
}

func TestRenewalGoesOnFromEveryCut(t *testing.T) {
	cutAt := func(kind func(*runbusv1.RunnerControl) bool, reply bool) func(*runbusv1.RunnerControl, bool) bool {
		return func(m *runbusv1.RunnerControl, r bool) bool { return kind(m) && r == reply }
	}
	renew := func(m *runbusv1.RunnerControl) bool { return m.GetRenew() != nil }
	install := func(m *runbusv1.RunnerControl) bool { return m.GetInstall() != nil }
	for what, c := range map[string]struct {
		cut  func(*runbusv1.RunnerControl, bool) bool
		kill string // step of the control plane
	}{
		"no cut":                                    {},
		"the request is lost":                       {cut: cutAt(renew, false)},
		"its reply is lost":                         {cut: cutAt(renew, true)},
		"the certificate is lost":                   {cut: cutAt(install, false)},
		"the receipt is lost":                       {cut: cutAt(install, true)},
		"the control plane dies with the request":   {kill: "request received"},
		"the control plane dies with the next one":  {kill: "next recorded"},
		"the control plane dies after the receipt":  {kill: "installed"},
		"the runner restarts without a certificate": {cut: cutAt(install, false)},
	} {
		t.Run(what, func(t *testing.T) {
			p := start(t)
			r, h := p.enrolled(t, "edge")
			first := h.store.Fingerprint()
			o := &orders{renewals: identity.NewRenewals(h.store), cut: c.cut}
			redialled := 0
			err := error(nil)
			if c.kill != "" {
				if !p.killedAt(c.kill, func() { _ = p.renewer(o, func(string) { redialled++ }).Renew(t.Context(), r) }) {
					t.Fatal("the step was not reached")
				}
				p.restart(t)
			} else {
				err = p.renewer(o, func(string) { redialled++ }).Renew(t.Context(), r)
			}
			if (err == nil) != (c.cut == nil) {
				t.Fatal(err)
			}
			if strings.HasPrefix(what, "the runner restarts") {
				h.restart(nil)
			}
			p.rightly(t, h)
			must(t, p.link(t, h)) // a link comes about whatever was cut
			p.rightly(t, h)
			r = p.settled(t, r.ID, func(r roster.Runner) bool { return r.Current.Fingerprint == h.store.Fingerprint() })
			if h.store.Fingerprint() == first { // once more
				o = &orders{renewals: identity.NewRenewals(h.store)}
				must(t, p.renewer(o, func(string) { redialled++ }).Renew(t.Context(), r))
				p.rightly(t, h)
				must(t, p.link(t, h))
			}
			p.one(t, h)
			if h.store.Fingerprint() == first {
				t.Fatal("not renewed")
			}
			if p.runner(t, r.ID).Pinned(first) != nil {
				t.Error("the old certificate is still valid")
			}
			if events := p.events(t, "runner.certificate.promote"); !strings.Contains(events, h.store.Fingerprint()) {
				t.Errorf("the audit log has %q", events)
			}
		})
	}
}

func TestAnInstalledCertificateIsOnlyPromoted(t *testing.T) {
	p := start(t)
	r, h := p.enrolled(t, "edge")
	o := &orders{renewals: identity.NewRenewals(h.store)}
	redialled := make(chan string, 2)
	n := p.renewer(o, func(id string) { redialled <- id })
	must(t, n.Renew(t.Context(), r))
	installed := h.store.Fingerprint()
	r = p.settled(t, r.ID, func(r roster.Runner) bool { return r.Next != nil })
	must(t, n.Renew(t.Context(), r)) // the dialler did not come to it
	if len(redialled) != 2 || h.store.Fingerprint() != installed {
		t.Fatal(len(redialled), "redials")
	}
	must(t, p.link(t, h))
	p.one(t, h)
}

func TestRenewalsAreDueBeforeAThirdOfTheLifeIsLeft(t *testing.T) {
	p := start(t)
	r, _ := p.enrolled(t, "edge")
	end := r.Current.NotAfter
	for left, want := range map[time.Duration]bool{23 * time.Hour: false, 10 * time.Hour: false, 9 * time.Hour: true, 8 * time.Hour: true, time.Minute: true, -time.Hour: true} {
		if got := enrol.Due(r, end.Add(-left)); got != want {
			t.Errorf("with %s left: %v", left, got)
		}
	}
	for _, state := range []roster.State{roster.Pending, roster.Revoked} {
		r := r
		r.State = state
		if enrol.Due(r, end) {
			t.Errorf("a %s runner is due", state)
		}
	}
}

func TestTheRenewerRenewsWhatIsDue(t *testing.T) {
	p := start(t)
	r, h := p.enrolled(t, "edge")
	first := h.store.Fingerprint()
	p.clock.advance(15 * time.Hour)
	o := &orders{renewals: identity.NewRenewals(h.store)}
	ctx, cancel := context.WithCancel(t.Context())
	redialled := make(chan string, 10)
	ended := make(chan error, 1)
	n := p.renewer(o, func(id string) { redialled <- id })
	go func() { ended <- n.Run(ctx) }()
	select {
	case id := <-redialled:
		if id != r.ID {
			t.Error(id)
		}
	case <-time.After(patience):
		t.Error("not renewed")
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	must(t, p.link(t, h))
	p.one(t, h)
	if h.store.Fingerprint() == first {
		t.Error("not renewed")
	}
}

// TestAnExpiredCertificate is SPEC C13.
func TestAnExpiredCertificate(t *testing.T) {
	away := func(p *plane, h *host, d time.Duration) {
		p.clock.advance(d)
		h.clock.advance(d)
	}
	t.Run("after six days", func(t *testing.T) {
		p := start(t)
		r, h := p.enrolled(t, "edge")
		old := h.store.Fingerprint()
		away(p, h, 7*24*time.Hour)
		if protos, err := enrol.Protocols(r, p.clock.now()); err != nil || len(protos) != 1 || protos[0] != link.ProtoEnrol {
			t.Fatal("it may do something else than be renewed:", protos, err)
		}
		h.restart(nil)
		must(t, p.exchange(t.Context(), h.addr, r))
		must(t, h.served())
		p.rightly(t, h)
		must(t, p.link(t, h))
		p.one(t, h)
		if h.store.Fingerprint() == old {
			t.Error("not renewed")
		}
	})
	t.Run("after eight days", func(t *testing.T) {
		p := start(t)
		r, h := p.enrolled(t, "edge")
		away(p, h, 9*24*time.Hour)
		if err := p.exchange(t.Context(), h.addr, r); err == nil || !strings.Contains(err.Error(), "certificate expired: revoke and create again") {
			t.Error(err)
		}
		h.stop()
		store, err := identity.Open(h.dir)
		must(t, err)
		defer func() { _ = store.Close() }()
		if _, err := store.Admit(nil, h.clock.now()); err == nil || !strings.Contains(err.Error(), "certificate expired: revoke and create again") {
			t.Error(err)
		}
	})
	t.Run("of somebody else", func(t *testing.T) {
		p := start(t)
		r, h := p.enrolled(t, "edge")
		_, other := p.enrolled(t, "other")
		away(p, h, 3*24*time.Hour)
		away(p, other, 0)
		other.clock.advance(3 * 24 * time.Hour)
		if err := p.exchange(t.Context(), other.addr, r); err == nil || !strings.Contains(err.Error(), "has not the certificate of") {
			t.Error(err)
		}
		if p.runner(t, r.ID).Next != nil {
			t.Error("a next certificate was recorded for somebody else")
		}
	})
	t.Run("of a revoked runner", func(t *testing.T) {
		p := start(t)
		r, h := p.enrolled(t, "edge")
		away(p, h, 3*24*time.Hour)
		_, err := p.roster.Revoke(t.Context(), ada, r.ID)
		must(t, err)
		if err := p.exchange(t.Context(), h.addr, r); err == nil { // by a view that lags behind
			t.Error("a revoked runner was renewed")
		}
		revoked := p.settled(t, r.ID, func(r roster.Runner) bool { return r.State == roster.Revoked })
		if err := p.exchange(t.Context(), h.addr, revoked); schemas.CodeOf(err) != schemas.CodeRunnerRevoked {
			t.Error(err)
		}
	})
	for _, step := range []string{"hello sent", "next recorded", "grant sent"} {
		t.Run("the control plane dies at: "+step, func(t *testing.T) {
			p := start(t)
			r, h := p.enrolled(t, "edge")
			away(p, h, 3*24*time.Hour)
			h.restart(nil)
			if !p.killedAt(step, func() { _ = p.exchange(t.Context(), h.addr, r) }) {
				t.Fatal("the step was not reached")
			}
			_ = h.served()
			p.restart(t)
			p.rightly(t, h)
			r = p.runner(t, r.ID)
			must(t, p.exchange(t.Context(), h.addr, r))
			p.settled(t, r.ID, func(r roster.Runner) bool { return r.Pinned(h.store.Fingerprint()) != nil })
			must(t, p.link(t, h))
			p.one(t, h)
		})
	}
}

func TestTheControlPlaneIsKilledAtEveryStepOfAnEnrolment(t *testing.T) {
	for _, step := range []string{"hello sent", "proof verified", "token consumed", "grant sent"} {
		t.Run(step, func(t *testing.T) {
			p := start(t)
			r, ticket := p.create(t, "edge")
			h := newHost(t, &ticket)
			if !p.killedAt(step, func() { _ = p.exchange(t.Context(), h.addr, r) }) {
				t.Fatal("the step was not reached")
			}
			_ = h.served() // however it ended: it may have its certificate
			p.restart(t)
			r = p.runner(t, r.ID)
			switch {
			case h.store.State() == identity.Enrolled:
			case r.State == roster.Active:
				must(t, p.exchange(t.Context(), h.addr, r))
			default: // the proof went with the control plane: it says what to do
				if err := p.exchange(t.Context(), h.addr, r); err == nil || !strings.Contains(hint(err), "issue a new token") {
					t.Fatal(err)
				}
				_, minted, err := p.roster.Mint(t.Context(), ada, r.ID)
				must(t, err)
				fresh := p.ticket(r, minted)
				h.restart(&fresh)
				must(t, p.exchange(t.Context(), h.addr, r))
			}
			must(t, p.link(t, h))
			p.one(t, h)
		})
	}
}
