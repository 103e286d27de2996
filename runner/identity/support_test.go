package identity_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
)

func TestMain(m *testing.M) {
	if job := os.Getenv(envJob); job != "" {
		childMain(job)
	}
	leak.Main(m)
}

// authority is a runner CA of a test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key}
}

// leaf is what a certificate should say.
func leaf(id string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), URIs: []*url.URL{schemas.RunnerURI(id)},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
}

// sign makes a chain for key.
func (a *authority) sign(t testing.TB, key crypto.PublicKey, template *x509.Certificate) []byte {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return append(encode("CERTIFICATE", der), encode("CERTIFICATE", a.cert.Raw)...)
}

func (a *authority) ticket(id string) schemas.Ticket {
	t := schemas.Ticket{RunnerID: id, Name: "edge", ExpiresAt: time.Now().Add(15 * time.Minute).UTC().Truncate(time.Second), CASHA256: sha256.Sum256(a.cert.Raw)}
	_, _ = rand.Read(t.Token[:])
	return t
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func open(t testing.TB, dir string) *identity.Store {
	t.Helper()
	s, err := identity.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// folder is a fresh state folder's name.
func folder(t testing.TB) string { return filepath.Join(t.TempDir(), "state") }

// enrolled is a folder with a certificate, closed.
func enrolled(t testing.TB, a *authority, id string) string {
	t.Helper()
	dir := folder(t)
	if err := enrolledIn(t, dir, a, id).Close(); err != nil {
		t.Fatal(err)
	}
	return dir
}

// enrolledIn enrols a runner in dir.
func enrolledIn(t testing.TB, dir string, a *authority, id string) *identity.Store {
	t.Helper()
	s := open(t, dir)
	if err := s.Begin(a.ticket(id)); err != nil {
		t.Fatal(err)
	}
	key, err := s.PendingKey()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.InstallFirst(a.sign(t, key.Public(), leaf(id)), "acme"); err != nil {
		t.Fatal(err)
	}
	return s
}

func files(t testing.TB, dir string) map[string]os.FileMode {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]os.FileMode{}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		out[e.Name()] = info.Mode()
	}
	return out
}

var loopback = net.IPv4(127, 0, 0, 1)
