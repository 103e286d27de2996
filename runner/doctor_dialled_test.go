package runner

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
)

// The doctor of a runner that is dialled says what its start says, of the state folder and of the ticket, and changes neither.
func TestDoctorOfARunnerThatIsDialled(t *testing.T) {
	ca := newRunnerCA(t)
	file := func(dir, name string) string { return filepath.Join(dir, name) }
	const month = 30 * 24 * time.Hour
	for what, c := range map[string]struct {
		prepare func(t *testing.T, c *Config) // of a fresh folder that is not there yet
		check   string                        // that fails; empty: none
		verdict Verdict                       // of the whole
		saw     string
	}{
		"enrolled": {func(t *testing.T, c *Config) { ca.enrol(t, c.StateDir, time.Hour) }, "", CheckOK, ""},
		"enrolled, with the old ticket": {func(t *testing.T, c *Config) {
			c.Ticket = ca.enrol(t, c.StateDir, time.Hour)
			c.Ticket.ExpiresAt = time.Now().Add(-month)
		}, "", CheckOK, ""},
		"enrolled, without the file": {func(t *testing.T, c *Config) {
			ca.enrol(t, c.StateDir, time.Hour)
			c.TicketGone = identity.ErrTicketGone
		}, "", CheckOK, ""},
		"revoked": {func(t *testing.T, c *Config) {
			ca.enrol(t, c.StateDir, time.Hour)
			s := openStore(t, c.StateDir)
			must(t, s.MarkRevoked("stolen"))
			must(t, s.Close())
		}, "state", CheckFail, "this runner was revoked and can't be started again"},
		"expired for good": {func(t *testing.T, c *Config) { ca.enrol(t, c.StateDir, -8*24*time.Hour) },
			"state", CheckFail, "certificate expired: revoke and create again"},
		"no CA": {func(t *testing.T, c *Config) {
			ca.enrol(t, c.StateDir, time.Hour)
			must(t, os.Remove(file(c.StateDir, "ca.pem")))
		}, "state", CheckFail, "ca.pem: it is missing"},
		"a cut certificate": {func(t *testing.T, c *Config) {
			ca.enrol(t, c.StateDir, time.Hour)
			must(t, os.Truncate(file(c.StateDir, "identity.pem"), 100))
		}, "state", CheckFail, "the state folder is damaged: identity.pem"},
		"an open key": {func(t *testing.T, c *Config) {
			ca.enrol(t, c.StateDir, time.Hour)
			must(t, os.Chmod(file(c.StateDir, "identity.pem"), 0o644))
		}, "state", CheckFail, "mode 0644"},
		"an open folder": {func(t *testing.T, c *Config) {
			ca.enrol(t, c.StateDir, time.Hour)
			must(t, os.Chmod(c.StateDir, 0o755))
		}, "state", CheckFail, "mode 0755"},
		"a link": {func(t *testing.T, c *Config) {
			ca.enrol(t, c.StateDir, time.Hour)
			link := file(t.TempDir(), "link")
			must(t, os.Symlink(c.StateDir, link))
			c.StateDir = link
		}, "state", CheckFail, "is a symbolic link"},
		"no ticket":     {func(*testing.T, *Config) {}, "ticket", CheckFail, "not enrolled and has no ticket"},
		"no such file":  {func(_ *testing.T, c *Config) { c.TicketGone = identity.ErrTicketGone }, "ticket", CheckFail, "the ticket file is gone"},
		"a late ticket": {func(_ *testing.T, c *Config) { c.Ticket = ca.ticket(-time.Minute) }, "ticket", CheckFail, "the ticket expired at"},
		"a fresh ticket": {func(t *testing.T, c *Config) {
			c.Ticket = ca.ticket(time.Minute)
			must(t, os.Mkdir(c.StateDir, 0o700))
		}, "", CheckOK, ""},
		"a fresh ticket, no folder": {func(_ *testing.T, c *Config) { c.Ticket = ca.ticket(time.Minute) }, "", CheckWarn, ""},
		"another's ticket": {func(t *testing.T, c *Config) {
			ca.enrol(t, c.StateDir, time.Hour)
			c.Ticket = ca.ticket(time.Minute)
		}, "ticket", CheckFail, "the state folder belongs to the runner"},
		"an enrolment without ticket": {func(t *testing.T, c *Config) { ca.begin(t, c.StateDir) }, "", CheckWarn, ""},
		"an enrolment with a late one": {func(t *testing.T, c *Config) {
			c.Ticket = ca.begin(t, c.StateDir)
			c.Ticket.ExpiresAt = time.Now().Add(-time.Minute)
		}, "", CheckWarn, ""},
		"nowhere to listen": {func(t *testing.T, c *Config) {
			ca.enrol(t, c.StateDir, time.Hour)
			c.Listen = "7443"
		}, "configuration", CheckFail, "is not host:port"},
	} {
		t.Run(what, func(t *testing.T) {
			cfg := Config{StateDir: filepath.Join(t.TempDir(), "state"), Log: slog.New(newJournal())}
			c.prepare(t, &cfg)
			d := Diagnose(t.Context(), cfg, DoctorOptions{})
			if d.Verdict != c.verdict {
				t.Errorf("%+v", d)
			}
			a, err := New(cfg)
			if err == nil {
				defer func() { _ = a.env.Roots.Close() }()
				defer a.dialled.close()
			}
			failed := 0
			for _, check := range d.Checks {
				if check.Verdict != CheckFail {
					continue
				}
				failed++
				if check.Name != c.check || err == nil || untimed(check.Saw) != untimed(err.Error()) || hintOf(err) != "" && check.Todo != hintOf(err) ||
					check.Todo == "" || !strings.Contains(check.Saw, c.saw) {
					t.Errorf("%+v, and the start says %v", check, err)
				}
			}
			if (failed == 1) != (c.check != "") || (err != nil) != (c.check != "") {
				t.Errorf("%d checks failed, and the start says %v", failed, err)
			}
			if err == nil { // beside the runner that holds the folder it sees no more than before
				if again := Diagnose(t.Context(), cfg, DoctorOptions{}); again.Verdict == CheckFail {
					t.Errorf("beside the runner: %+v", again)
				}
			}
		})
	}
}

// untimed is what was said without the second at which it was.
func untimed(said string) string {
	return regexp.MustCompile(`the clock here says [^ )]+`).ReplaceAllString(said, "the clock")
}

// What is wrong with a ticket itself is told, and the host is looked at all the same.
func TestDoctorOfATicketThatCanNotBeRead(t *testing.T) {
	_, wrong := identity.TakeTicket(func(name string) string {
		return map[string]string{identity.EnvTicket: "crt1.x"}[name]
	}, func(...string) error { return nil })
	d := Diagnose(t.Context(), Config{StateDir: filepath.Join(t.TempDir(), "state")}, DoctorOptions{NoTicket: wrong})
	if got := d.only(t, "ticket"); got.Verdict != CheckFail || got.Saw != wrong.Error() || got.Todo == "" {
		t.Errorf("%+v", got)
	}
	if got := d.only(t, "configuration"); got.Verdict != CheckOK || !strings.Contains(got.Saw, DefaultListen) {
		t.Errorf("%+v", got)
	}
	d.only(t, "files")
}

// A port that another process has is a matter of configuration, and says what to do.
func TestATakenPort(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close() //nolint:errcheck // of a test
	cfg := Config{StateDir: filepath.Join(t.TempDir(), "state"), Listen: l.Addr().String(), Log: slog.New(newJournal())}
	newRunnerCA(t).enrol(t, cfg.StateDir, time.Hour)
	a, err := New(cfg)
	must(t, err)
	err = a.Run(t.Context())
	wantExit(t, err, ExitConfig, "listen for the control plane on "+cfg.Listen+": bind: address already in use")
	if !strings.Contains(hintOf(err), "another process listens there") {
		t.Errorf("%v does not say what to do: %q", err, hintOf(err))
	}
}

// runnerCA is the runner CA of a test.
type runnerCA struct {
	cert *x509.Certificate
	key  crypto.Signer
}

func newRunnerCA(t *testing.T) *runnerCA {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, NotBefore: time.Now().Add(-1000 * time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	cert, err := x509.ParseCertificate(der)
	must(t, err)
	return &runnerCA{cert, key}
}

// ticket is one of a new runner, valid for this long.
func (ca *runnerCA) ticket(life time.Duration) *schemas.Ticket {
	return &schemas.Ticket{RunnerID: schemas.NewRunnerID(), Name: "edge", ExpiresAt: time.Now().Add(life).UTC(), CASHA256: sha256.Sum256(ca.cert.Raw)}
}

// begin starts an enrolment in dir and returns its ticket.
func (ca *runnerCA) begin(t *testing.T, dir string) *schemas.Ticket {
	t.Helper()
	s, ticket := openStore(t, dir), ca.ticket(time.Minute)
	must(t, s.Begin(*ticket))
	must(t, s.Close())
	return ticket
}

// enrol enrols a runner in dir, whose certificate ends in this time, and returns its ticket.
func (ca *runnerCA) enrol(t *testing.T, dir string, left time.Duration) *schemas.Ticket {
	t.Helper()
	ticket := ca.begin(t, dir)
	s := openStore(t, dir)
	key, err := s.PendingKey()
	must(t, err)
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), URIs: []*url.URL{schemas.RunnerURI(ticket.RunnerID)}, NotBefore: time.Now().Add(left - 24*time.Hour), NotAfter: time.Now().Add(left),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, ca.cert, key.Public(), ca.key)
	must(t, err)
	chain := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	must(t, s.InstallFirst(append(chain, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.cert.Raw})...), "acme"))
	must(t, s.Close())
	return ticket
}

func openStore(t *testing.T, dir string) *identity.Store {
	t.Helper()
	s, err := identity.Open(dir)
	must(t, err)
	return s
}
