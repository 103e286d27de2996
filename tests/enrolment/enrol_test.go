package enrolment

import (
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/cp/enrol"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
)

func TestATicketEnrolsItsRunner(t *testing.T) {
	p := start(t)
	r, ticket := p.create(t, "edge")
	h := newHost(t, &ticket)
	began := time.Now().Truncate(time.Second) // as certificates have it
	must(t, p.exchange(t.Context(), h.addr, r))
	ended := time.Now()
	must(t, h.served())
	p.one(t, h)
	cert := h.store.Leaf().Leaf
	if len(cert.URIs) != 1 || cert.URIs[0].String() != "spiffe://core.runink/runner/"+r.ID || len(cert.DNSNames)+len(cert.IPAddresses) > 0 ||
		len(cert.ExtKeyUsage) != 1 || cert.ExtKeyUsage[0] != x509.ExtKeyUsageServerAuth {
		t.Errorf("the certificate says %v %v %v %v", cert.URIs, cert.DNSNames, cert.IPAddresses, cert.ExtKeyUsage)
	}
	if end := cert.NotAfter; end.Before(began.Add(24*time.Hour)) || end.After(ended.Add(24*time.Hour)) {
		t.Errorf("it lives until %s, and was made between %s and %s", end, began, ended)
	}
	if h.store.Tenant() != ada.Tenant || h.store.Name() != "edge" {
		t.Errorf("the folder says %s/%s", h.store.Tenant(), h.store.Name())
	}
	if events := p.events(t, "runner.enrol"); !strings.Contains(events, "ok") || !strings.Contains(events, r.ID) {
		t.Errorf("the audit log has %q", events)
	}
	if protos, err := enrol.Protocols(p.runner(t, r.ID), time.Now()); err != nil || protos[0] != link.ProtoLink {
		t.Error(protos, err)
	}
	for _, secret := range []string{ticket.Encode(), ticket.Encode()[20:40]} {
		if strings.Contains(h.logged.String(), secret) {
			t.Error("the runner's log shows the ticket")
		}
	}
	// A restart with the command that is still in the shell's history.
	h.restart(&ticket)
	p.one(t, h)
	if !strings.Contains(h.logged.String(), "the ticket is not needed") {
		t.Error("nothing says that the ticket is not needed")
	}
}

func TestWhoIsNotTheOwnerSpendsNothing(t *testing.T) {
	p := start(t)
	r, ticket := p.create(t, "edge")
	other, otherTicket := p.create(t, "other")
	stranger := ticket
	stranger.CASHA256[0] ^= 1
	forged := ticket
	forged.Token = otherTicket.Token
	guessed := ticket
	guessed.Token = [32]byte{1}
	for what, c := range map[string]struct {
		ticket     schemas.Ticket
		cp, runner string // what each side's error says
	}{
		"a ticket of another runner": {otherTicket, "the control plane dialled for another one", "the control plane dialled for another one"},
		"a token of another runner":  {forged, "did not prove that it holds the ticket", "did not prove that it holds the ticket"},
		"a guessed token":            {guessed, "did not prove that it holds the ticket", "did not prove that it holds the ticket"},
		"a ticket of another CA":     {stranger, "is of another runner CA", "of another CA"},
	} {
		t.Run(what, func(t *testing.T) {
			h := newHost(t, &c.ticket)
			err := p.exchange(t.Context(), h.addr, r)
			if err == nil || !strings.Contains(err.Error(), c.cp) {
				t.Errorf("the control plane says %q, not %q", err, c.cp)
			}
			if hint(err) == "" {
				t.Errorf("%q does not say what to do", err)
			}
			if err := h.served(); err == nil || !strings.Contains(err.Error(), c.runner) {
				t.Errorf("the runner says %q, not %q", err, c.runner)
			}
			if h.store.State() != identity.Pending {
				t.Error("the runner is", h.store.State())
			}
			p.unspent(t, r.ID)
			p.unspent(t, other.ID)
		})
	}
	if events := p.events(t, "runner.enrol"); strings.Count(events, "wrong proof") != 2 {
		t.Errorf("the audit log has %q", events)
	}
	h := newHost(t, &ticket)
	must(t, p.exchange(t.Context(), h.addr, r))
	p.one(t, h)
}

func TestTokensThatEnded(t *testing.T) {
	p := start(t)
	r, ticket := p.create(t, "edge")
	h := newHost(t, &ticket)
	refused := func(want string) {
		t.Helper()
		err := p.exchange(t.Context(), h.addr, p.runner(t, r.ID))
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(hint(err), "new token") && !strings.Contains(hint(err), "last ticket") {
			t.Errorf("%q (%q) does not say %q", err, hint(err), want)
		}
		if err := h.served(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the runner was told %q", err)
		}
		if h.store.State() != identity.Pending {
			t.Error(h.store.State())
		}
	}
	p.restart(t) // the proof key was in memory
	refused("no token that can be proven")
	_, _, err := p.roster.Mint(t.Context(), ada, r.ID)
	must(t, err)
	refused("did not prove that it holds the ticket") // the old one, by which the runner goes
	p.clock.advance(16 * time.Minute)
	h.clock.advance(16 * time.Minute)
	refused("no token that can be proven")
	_, minted, err := p.roster.Mint(t.Context(), ada, r.ID)
	must(t, err)
	must(t, p.roster.RevokeToken(t.Context(), ada, minted.TokenID))
	refused("no token that can be proven")
	_, minted, err = p.roster.Mint(t.Context(), ada, r.ID)
	must(t, err)
	fresh := p.ticket(r, minted)
	h.restart(&fresh) // the same folder, the same key
	must(t, p.exchange(t.Context(), h.addr, r))
	p.one(t, h)
}

func TestOneOfFiftyWins(t *testing.T) {
	p := start(t)
	r, ticket := p.create(t, "edge")
	const many = 50
	hosts := make([]*host, many)
	for i := range hosts {
		hosts[i] = newHost(t, &ticket)
	}
	errs := make([]error, many)
	var unavailable atomic.Int32 // attempts; the audit may have one as a double use all the same
	var claims sync.WaitGroup
	for i, h := range hosts {
		claims.Go(func() {
			for give := time.Now().Add(patience); ; { // the registry may have no time for so many at once: who is told so is dialled again
				errs[i] = p.exchange(t.Context(), h.addr, r)
				if schemas.CodeOf(errs[i]) != schemas.CodeUnavailable || time.Now().After(give) {
					return
				}
				unavailable.Add(1)
			}
		})
	}
	claims.Wait()
	var winner *host
	for i, err := range errs {
		switch {
		case err == nil && winner == nil:
			winner = hosts[i]
		case err == nil:
			t.Fatal("two have won")
		case !strings.Contains(err.Error(), "used already, with another key"):
			t.Errorf("a loser is told %q", err)
		case hosts[i].store.State() != identity.Pending:
			t.Error("a loser is", hosts[i].store.State())
		}
	}
	if winner == nil {
		t.Fatal("nobody has won")
	}
	p.one(t, winner)
	if n := strings.Count(p.events(t, "runner.enrol"), "double use"); n < many-1 || n > many-1+int(unavailable.Load()) {
		t.Errorf("the audit log has %d double uses, after %d attempts that the registry had no time for", n, unavailable.Load())
	}
}

func TestALostReplyIsDeliveredAgain(t *testing.T) {
	for what, after := range map[string]func(t *testing.T, p *plane, h *host, ticket *schemas.Ticket){
		"at once":                 func(*testing.T, *plane, *host, *schemas.Ticket) {},
		"the runner restarted":    func(_ *testing.T, _ *plane, h *host, ticket *schemas.Ticket) { h.restart(ticket) },
		"without its ticket":      func(_ *testing.T, _ *plane, h *host, _ *schemas.Ticket) { h.restart(nil) },
		"the control plane, too":  func(t *testing.T, p *plane, h *host, _ *schemas.Ticket) { p.restart(t); h.restart(nil) },
		"with its ticket, though": func(t *testing.T, p *plane, h *host, ticket *schemas.Ticket) { p.restart(t); h.restart(ticket) },
		"the ticket expired by then": func(_ *testing.T, p *plane, h *host, ticket *schemas.Ticket) {
			p.clock.advance(20 * time.Minute)
			h.clock.advance(20 * time.Minute)
			h.restart(ticket)
		},
	} {
		t.Run(what, func(t *testing.T) {
			p := start(t)
			r, ticket := p.create(t, "edge")
			h := newHost(t, &ticket)
			if !p.killedAt("token consumed", func() { _ = p.exchange(t.Context(), h.addr, r) }) {
				t.Fatal("the token was not consumed")
			}
			if err := h.served(); err == nil {
				t.Fatal("the cut was not noticed")
			}
			issued := p.settled(t, r.ID, func(r roster.Runner) bool { return r.State == roster.Active }).Current.Fingerprint
			after(t, p, h, &ticket)
			thief := newHost(t, &ticket) // has the ticket, not the key
			if err := p.exchange(t.Context(), thief.addr, p.runner(t, r.ID)); err == nil || thief.store.State() != identity.Pending {
				t.Fatal("the certificate went to another key", err)
			}
			must(t, p.exchange(t.Context(), h.addr, p.runner(t, r.ID)))
			must(t, h.served())
			p.one(t, h)
			if h.store.Fingerprint() != issued {
				t.Error("another certificate was issued")
			}
		})
	}
}

func TestClocksThatAreApart(t *testing.T) {
	p := start(t)
	r, ticket := p.create(t, "edge")
	for _, apart := range []time.Duration{20 * time.Minute, -20 * time.Minute, 48 * time.Hour, -48 * time.Hour} {
		t.Run(apart.String(), func(t *testing.T) {
			h := newHost(t, &ticket)
			h.clock.advance(apart)
			began := time.Now()
			err := p.exchange(t.Context(), h.addr, r)
			off := time.Since(began) + time.Second // what was under way has aged, and they are told in whole seconds
			for side, err := range map[string]error{"control plane": err, "runner": h.served()} {
				if told, ok := clocksApart(err); !ok || (told-apart).Abs() > off {
					t.Errorf("the %s says %v, within %s", side, err, off)
				}
				if !strings.Contains(hint(err), "NTP") {
					t.Errorf("the %s does not say what to do: %q", side, hint(err))
				}
			}
			p.unspent(t, r.ID)
		})
	}
	h := newHost(t, &ticket)
	h.clock.advance(4 * time.Minute)
	must(t, p.exchange(t.Context(), h.addr, r))
	p.one(t, h)
}

// clocksApart is how far the runner's clock is ahead, as an error has it.
func clocksApart(err error) (apart time.Duration, ok bool) {
	if err == nil {
		return 0, false
	}
	said := regexp.MustCompile(`the clocks are apart: the runner's \([^)]*\) is (\S+) (ahead of|behind) the control plane's`).FindStringSubmatch(err.Error())
	if said == nil {
		return 0, false
	}
	apart, parsed := time.ParseDuration(said[1])
	if said[2] == "behind" {
		apart = -apart
	}
	return apart, parsed == nil
}

func TestTheCAIsMintedOnce(t *testing.T) {
	p := start(t)
	first := p.ca.SHA256()
	again := func(want string) {
		t.Helper()
		ca, err := enrol.EnsureCA(p.caDir, p.Log)
		switch {
		case want == "" && (err != nil || ca.SHA256() != first):
			t.Error("the CA has changed:", err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want) || hint(err) == ""):
			t.Errorf("%v does not say %q", err, want)
		}
	}
	again("")
	for _, name := range []string{"ca.pem", "ca.key"} {
		info, err := os.Stat(filepath.Join(p.caDir, name))
		must(t, err)
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", name, info.Mode())
		}
	}
	file := func(name string) string { return filepath.Join(p.caDir, name) }
	certificate, err := os.ReadFile(file("ca.pem"))
	must(t, err)
	key, err := os.ReadFile(file("ca.key"))
	must(t, err)
	must(t, os.Remove(file("ca.pem"))) // the crash of a mint
	again("")
	must(t, os.Chmod(p.caDir, 0o755))
	again("open to others")
	must(t, os.Chmod(p.caDir, 0o700))
	must(t, os.Chmod(file("ca.key"), 0o640))
	again("open to others")
	must(t, os.Chmod(file("ca.key"), 0o600))
	must(t, os.Remove(file("ca.key")))
	again("its key is missing")
	must(t, os.WriteFile(file("ca.key"), key[:100], 0o600))
	again("can't be read")
	block, _ := pem.Decode(key)
	must(t, os.WriteFile(file("ca.key"), pem.EncodeToMemory(block), 0o600)) // brought along by an operator: the key alone
	again("")
	must(t, os.Remove(file("ca.pem")))
	again("its certificate is missing")
	must(t, os.WriteFile(file("ca.pem"), certificate, 0o600))
	again("")
}
