package identity_test

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
)

func TestEnrolmentLeavesTheFilesOfTheSpecification(t *testing.T) {
	ca, id, dir := newAuthority(t), schemas.NewRunnerID(), folder(t)
	s := open(t, dir)
	if s.State() != identity.Empty || s.RunnerID() != "" || s.Leaf() != nil || s.CA() != nil {
		t.Fatal("a fresh folder is not empty")
	}
	if err := s.Usable(time.Now()); err == nil || !strings.Contains(err.Error(), "not enrolled and has no ticket") {
		t.Fatal(err)
	}
	if err := s.Begin(ca.ticket(id)); err != nil {
		t.Fatal(err)
	}
	if got := files(t, dir); len(got) != 2 || got["key.pending.pem"] != 0o600 || got["runner.json"] != 0o600 || s.State() != identity.Pending {
		t.Fatal(got, s.State())
	}
	key, err := s.PendingKey()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.InstallFirst(ca.sign(t, key.Public(), leaf(id)), "acme"); err != nil {
		t.Fatal(err)
	}
	if got := files(t, dir); len(got) != 3 || got["identity.pem"] != 0o600 || got["ca.pem"] != 0o600 || got["runner.json"] != 0o600 {
		t.Fatal(got)
	}
	_ = s.Close()

	s = open(t, dir)
	if s.State() != identity.Enrolled || s.RunnerID() != id || s.Tenant() != "acme" || s.Name() != "edge" || len(s.Fingerprint()) != 64 {
		t.Fatal(s.State(), s.RunnerID(), s.Tenant(), s.Name())
	}
	if _, err := s.Leaf().Leaf.Verify(x509.VerifyOptions{Roots: s.CA()}); err != nil {
		t.Fatal(err)
	}
	old := s.Fingerprint()
	next, err := s.RenewalKey()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.InstallNext(ca.sign(t, key.Public(), leaf(id))); err == nil || !strings.Contains(err.Error(), "another key") {
		t.Fatal("a certificate for an old key was installed", err)
	}
	if err := s.InstallNext(ca.sign(t, next.Public(), leaf(id))); err != nil {
		t.Fatal(err)
	}
	if s.Fingerprint() == old || len(files(t, dir)) != 3 {
		t.Fatal("not renewed", files(t, dir))
	}
	if err := s.InstallNext(ca.sign(t, next.Public(), leaf(id))); err == nil {
		t.Fatal("a certificate was installed with no renewal under way")
	}
	if err := s.MarkRevoked("by ada\nat noon"); err != nil {
		t.Fatal(err)
	}
	_ = s.Close()
	s = open(t, dir)
	err = s.Usable(time.Now())
	if s.State() != identity.Revoked || schemas.CodeOf(err) != schemas.CodeRunnerRevoked || !strings.Contains(err.Error(), "by ada at noon") {
		t.Fatal(s.State(), err)
	}
	if _, err := s.Admit(nil, time.Now()); schemas.CodeOf(err) != schemas.CodeRunnerRevoked {
		t.Fatal(err)
	}
	again := ca.ticket(schemas.NewRunnerID())
	if _, err := s.Admit(&again, time.Now()); schemas.CodeOf(err) != schemas.CodeRunnerRevoked {
		t.Fatal(err)
	}
}

func TestWhatIsNotInstalled(t *testing.T) {
	ca, other, id := newAuthority(t), newAuthority(t), schemas.NewRunnerID()
	strange, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, folder(t))
	if err := s.Begin(ca.ticket(id)); err != nil {
		t.Fatal(err)
	}
	key, err := s.PendingKey()
	if err != nil {
		t.Fatal(err)
	}
	with := func(change func(*x509.Certificate)) []byte {
		template := leaf(id)
		change(template)
		return ca.sign(t, key.Public(), template)
	}
	good := with(func(*x509.Certificate) {})
	for what, chain := range map[string][]byte{
		"another CA":            other.sign(t, key.Public(), leaf(id)),
		"another key":           ca.sign(t, strange.Public(), leaf(id)),
		"another runner":        with(func(c *x509.Certificate) { c.URIs[0] = schemas.RunnerURI(schemas.NewRunnerID()) }),
		"no URI":                with(func(c *x509.Certificate) { c.URIs = nil }),
		"two URIs":              with(func(c *x509.Certificate) { c.URIs = append(c.URIs, schemas.RunnerURI(id)) }),
		"a DNS name too":        with(func(c *x509.Certificate) { c.DNSNames = []string{"edge.example.com"} }),
		"an IP address too":     with(func(c *x509.Certificate) { c.IPAddresses = []net.IP{loopback} }),
		"the control plane's":   with(func(c *x509.Certificate) { c.URIs = []*url.URL{schemas.ControlPlaneURI()} }),
		"a client's":            with(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }),
		"nothing":               nil,
		"no CA behind it":       good[:strings.LastIndex(string(good), "-----BEGIN")],
		"something behind it":   append(append([]byte{}, good...), good...),
		"a certificate and key": append(append([]byte{}, good[:strings.LastIndex(string(good), "-----BEGIN")]...), encode("PRIVATE KEY", []byte("x"))...),
		"no PEM":                []byte("hello"),
		"a leaf with a CA swapped in": append(other.sign(t, key.Public(), leaf(id))[:strings.LastIndex(string(other.sign(t, key.Public(), leaf(id))), "-----BEGIN")],
			encode("CERTIFICATE", ca.cert.Raw)...),
	} {
		if err := s.InstallFirst(chain, "acme"); err == nil {
			t.Fatalf("%s was installed", what)
		}
		if s.State() != identity.Pending {
			t.Fatalf("%s changed the state to %s", what, s.State())
		}
	}
	if err := s.InstallFirst(good, "Not a tenant"); err == nil {
		t.Fatal("a tenant that is none was taken")
	}
	if err := s.InstallFirst(good, "acme"); err != nil {
		t.Fatal(err)
	}
}

func TestTheFolderIsCheckedBeforeAnythingIsTrusted(t *testing.T) {
	ca, id := newAuthority(t), schemas.NewRunnerID()
	for what, c := range map[string]struct {
		spoil func(t *testing.T, dir string) string // may name another folder
		want  string
	}{
		"open to the group":   {func(t *testing.T, dir string) string { return chmod(t, dir, 0o750) }, "mode 0750"},
		"open to all":         {func(t *testing.T, dir string) string { return chmod(t, dir, 0o777) }, "mode 0777"},
		"not writable":        {func(t *testing.T, dir string) string { return chmod(t, dir, 0o500) }, "mode 0500"},
		"a file":              {func(_ *testing.T, dir string) string { return filepath.Join(dir, "identity.pem") }, "state folder can't be"},
		"a symbolic link":     {link, "symbolic link"},
		"a link with a slash": {func(t *testing.T, dir string) string { return link(t, dir) + "/" }, "symbolic link"},
		"key open to others":  {func(t *testing.T, dir string) string { chmod(t, filepath.Join(dir, "identity.pem"), 0o644); return dir }, "mode 0644"},
		"identity is a link":  {func(t *testing.T, dir string) string { return relink(t, dir, "identity.pem") }, "symbolic link"},
		"ca.pem is a link":    {func(t *testing.T, dir string) string { return relink(t, dir, "ca.pem") }, "symbolic link"},
		"revoked is a folder": {func(t *testing.T, dir string) string { return mkdir(t, dir, "revoked") }, "not a regular file"},
		"identity is a FIFO":  {func(t *testing.T, dir string) string { return fifo(t, dir, "identity.pem") }, "not a regular file"},
		"identity is huge": {func(t *testing.T, dir string) string {
			return write(t, dir, "identity.pem", strings.Repeat("x", 1<<17))
		}, "over 65536 bytes"},
		"identity is empty": {func(t *testing.T, dir string) string { return write(t, dir, "identity.pem", "") }, "identity.pem: it is not a certificate"},
		"identity is cut":   {func(t *testing.T, dir string) string { return truncate(t, dir, "identity.pem") }, "identity.pem"},
		"ca.pem is missing": {func(t *testing.T, dir string) string { return remove(t, dir, "ca.pem") }, "ca.pem: it is missing"},
		"ca.pem is cut":     {func(t *testing.T, dir string) string { return truncate(t, dir, "ca.pem") }, "ca.pem: it is not one certificate"},
		"another CA": {func(t *testing.T, dir string) string {
			return write(t, dir, "ca.pem", string(encode("CERTIFICATE", newAuthority(t).cert.Raw)))
		}, "not the CA that the runner was enrolled with"},
		"runner.json is missing": {func(t *testing.T, dir string) string { return remove(t, dir, "runner.json") }, "runner.json: it is missing"},
		"runner.json is cut":     {func(t *testing.T, dir string) string { return truncate(t, dir, "runner.json") }, "runner.json: it is not valid JSON"},
		"another runner": {func(t *testing.T, dir string) string {
			body := strings.Replace(read(t, dir, "runner.json"), id, schemas.NewRunnerID(), 1)
			return write(t, dir, "runner.json", body)
		}, "of another runner"},
		"a newer version": {func(t *testing.T, dir string) string {
			return write(t, dir, "runner.json", strings.Replace(read(t, dir, "runner.json"), `"version": 1`, `"version": 2`, 1))
		}, "version is 2"},
	} {
		t.Run(what, func(t *testing.T) {
			dir := c.spoil(t, enrolled(t, ca, id))
			s, err := identity.Open(dir)
			if err == nil {
				t.Fatalf("it was opened: %s", s.State())
			}
			if !strings.Contains(err.Error(), c.want) || schemas.CodeOf(err) != schemas.CodeInvalid {
				t.Errorf("%q (%s) does not say %q", err, schemas.CodeOf(err), c.want)
			}
			if hint := hintOf(err); hint == "" && !strings.Contains(err.Error(), "name the file itself") && !strings.Contains(err.Error(), "not a regular file") && !strings.Contains(err.Error(), "over") {
				t.Errorf("%q does not say what to do", err)
			}
			if _, seen := identity.Look(dir); what != "a file" && (seen == nil || seen.Error() != err.Error() || hintOf(seen) != hintOf(err)) || schemas.CodeOf(seen) != schemas.CodeInvalid {
				t.Errorf("who only looks sees %v, and not %v", seen, err)
			}
		})
	}
	t.Run("in use", func(t *testing.T) {
		dir := enrolled(t, ca, id)
		open(t, dir)
		if _, err := identity.Open(dir); schemas.CodeOf(err) != schemas.CodeConflict || !strings.Contains(err.Error(), "in use") {
			t.Fatal(err)
		}
	})
	t.Run("files of others stay", func(t *testing.T) {
		dir := enrolled(t, ca, id)
		write(t, dir, "runner-id", "edge\n")
		write(t, dir, ".identity.pem.123", "left by a crash")
		open(t, dir)
		if got := files(t, dir); len(got) != 4 || got["runner-id"] == 0 {
			t.Fatal(got)
		}
	})
}

func TestTicketsAndFoldersThatDontFit(t *testing.T) {
	ca, id, now := newAuthority(t), schemas.NewRunnerID(), time.Now()
	admit := func(s *identity.Store, ticket schemas.Ticket, want string) {
		t.Helper()
		if _, err := s.Admit(&ticket, now); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
	s := open(t, enrolled(t, ca, id))
	admit(s, ca.ticket(schemas.NewRunnerID()), "the state folder belongs to the runner "+id)
	if use, err := s.Admit(ptr(ca.ticket(id)), now); use != nil || err != nil { // pasted again: not needed
		t.Error(use, err)
	}
	if err := s.Begin(ca.ticket(id)); err == nil || !strings.Contains(err.Error(), "enrolled already") {
		t.Error(err)
	}
	s = open(t, folder(t))
	expired := ca.ticket(id)
	expired.ExpiresAt = now.Add(-time.Second)
	admit(s, expired, "the ticket expired at")
	if s.State() != identity.Empty {
		t.Error("an expired ticket began an enrolment")
	}
	first := ca.ticket(id)
	if use, err := s.Admit(&first, now); use == nil || err != nil {
		t.Fatal(use, err)
	}
	key, err := s.PendingKey()
	if err != nil {
		t.Fatal(err)
	}
	admit(s, ca.ticket(schemas.NewRunnerID()), "the state folder belongs to the runner "+id)
	admit(s, newAuthority(t).ticket(id), "another runner CA")
	for _, goesOn := range []*schemas.Ticket{&first, ptr(ca.ticket(id)), &expired, nil} { // a new token of the same runner, too
		if _, err := s.Admit(goesOn, now); err != nil {
			t.Error(err)
		}
		if again, err := s.PendingKey(); err != nil || again != key {
			t.Error("the key changed", err)
		}
	}
}

func TestAnExpiredCertificateIsUsableForSevenDays(t *testing.T) {
	ca, id := newAuthority(t), schemas.NewRunnerID()
	s := open(t, enrolled(t, ca, id))
	end := s.Leaf().Leaf.NotAfter
	for after, want := range map[time.Duration]bool{-time.Minute: true, time.Minute: true, 7*24*time.Hour - time.Minute: true, 7*24*time.Hour + time.Minute: false} {
		err := s.Usable(end.Add(after))
		if (err == nil) != want {
			t.Errorf("%s after the end: %v", after, err)
		}
		if err != nil && (!strings.Contains(err.Error(), "certificate expired: revoke and create again") || hintOf(err) == "") {
			t.Error(err)
		}
	}
}

func TestEd25519KeysOfOthersAreRead(t *testing.T) {
	// The key of identity.pem is whatever the certificate is for; this program makes P-256.
	ca, id := newAuthority(t), schemas.NewRunnerID()
	dir := enrolled(t, ca, id)
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	chain := string(ca.sign(t, public, leaf(id)))
	write(t, dir, "identity.pem", chain[:strings.LastIndex(chain, "-----BEGIN")]+string(encode("PRIVATE KEY", der)))
	if s := open(t, dir); s.State() != identity.Enrolled {
		t.Fatal(s.State())
	}
}

func TestRenewalsBelongToOneReplica(t *testing.T) {
	ca, id := newAuthority(t), schemas.NewRunnerID()
	s := open(t, enrolled(t, ca, id))
	now := time.Now()
	r := identity.NewRenewals(s)
	r.SetClock(func() time.Time { return now })
	install := func(replica string, csr []byte) error {
		request, err := x509.ParseCertificateRequest(csr)
		if err != nil {
			t.Fatal(err)
		}
		_, err = r.Install(replica, ca.sign(t, request.PublicKey, leaf(id)))
		return err
	}
	csr, fingerprint, err := r.Request("a")
	if err != nil || fingerprint != s.Fingerprint() {
		t.Fatal(fingerprint, err)
	}
	if _, _, err := r.Request("b"); schemas.CodeOf(err) != schemas.CodeConflict {
		t.Fatal(err)
	}
	if err := install("b", csr); schemas.CodeOf(err) != schemas.CodeConflict {
		t.Fatal(err)
	}
	again, _, err := r.Request("a") // its first answer was lost
	if err != nil {
		t.Fatal(err)
	}
	if err := install("a", csr); err == nil {
		t.Fatal("a certificate for a forgotten key was installed")
	}
	if err := install("a", again); err != nil {
		t.Fatal(err)
	}
	if s.Fingerprint() == fingerprint {
		t.Fatal("not renewed")
	}
	if _, _, err = r.Request("a"); err != nil {
		t.Fatal(err)
	}
	now = now.Add(31 * time.Second)
	if _, _, err = r.Request("b"); err != nil { // a died in the middle
		t.Fatal(err)
	}
}

func ptr[T any](v T) *T { return &v }

func chmod(t *testing.T, name string, mode os.FileMode) string {
	t.Helper()
	if err := os.Chmod(name, mode); err != nil {
		t.Fatal(err)
	}
	return name
}

func link(t *testing.T, dir string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, name); err != nil {
		t.Fatal(err)
	}
	return name
}

func relink(t *testing.T, dir, name string) string {
	t.Helper()
	elsewhere := filepath.Join(t.TempDir(), name)
	if err := os.Rename(filepath.Join(dir, name), elsewhere); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(elsewhere, filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func mkdir(t *testing.T, dir, name string) string {
	t.Helper()
	if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func fifo(t *testing.T, dir, name string) string {
	t.Helper()
	remove(t, dir, name)
	if err := syscall.Mkfifo(filepath.Join(dir, name), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func remove(t *testing.T, dir, name string) string {
	t.Helper()
	if err := os.Remove(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func write(t *testing.T, dir, name, body string) string {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func read(t *testing.T, dir, name string) string {
	t.Helper()
	body, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

func truncate(t *testing.T, dir, name string) string {
	t.Helper()
	return write(t, dir, name, read(t, dir, name)[:30])
}
