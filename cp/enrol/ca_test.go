package enrol

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/schemas"
)

func newCA(t testing.TB) *CA {
	t.Helper()
	ca, err := EnsureCA(filepath.Join(t.TempDir(), "ca"), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func csr(t testing.TB, key crypto.Signer, template *x509.CertificateRequest) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func p256(t testing.TB) crypto.Signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// TestALeafNamesItsRunnerAlone asks for all that a runner must not get.
func TestALeafNamesItsRunnerAlone(t *testing.T) {
	ca, id := newCA(t), schemas.NewRunnerID()
	_, edKey, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []crypto.Signer{p256(t), edKey} {
		greedy := csr(t, key, &x509.CertificateRequest{
			DNSNames: []string{"control-plane"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, EmailAddresses: []string{"a@b.example"},
			URIs: []*url.URL{schemas.ControlPlaneURI(), schemas.RunnerURI(schemas.NewRunnerID())},
		})
		chain, pinned, err := ca.SignLeaf(greedy, id, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		if certificateFingerprint(chain) != pinned.Fingerprint || len(pinned.PublicKey) == 0 {
			t.Error("what is pinned is not the certificate", pinned)
		}
		block := strings.SplitAfter(string(chain), "-----END CERTIFICATE-----\n")[0]
		leaf := decode(t, block)
		if len(leaf.URIs) != 1 || leaf.URIs[0].String() != schemas.RunnerURI(id).String() || len(leaf.DNSNames)+len(leaf.IPAddresses)+len(leaf.EmailAddresses) > 0 || leaf.Subject.String() != "" || leaf.IsCA {
			t.Errorf("%v %v %v %v %q", leaf.URIs, leaf.DNSNames, leaf.IPAddresses, leaf.EmailAddresses, leaf.Subject)
		}
		for usage, want := range map[x509.ExtKeyUsage]bool{x509.ExtKeyUsageServerAuth: true, x509.ExtKeyUsageClientAuth: false} {
			if _, err := leaf.Verify(x509.VerifyOptions{Roots: ca.Pool(), KeyUsages: []x509.ExtKeyUsage{usage}}); (err == nil) != want {
				t.Errorf("usage %v: %v", usage, err)
			}
		}
		if back := time.Until(leaf.NotBefore); back > -link.MaxSkew+time.Minute || !pinned.NotAfter.Equal(leaf.NotAfter) || lifeOf(pinned) != time.Hour {
			t.Errorf("from %s to %s", leaf.NotBefore, leaf.NotAfter)
		}
	}
}

func decode(t testing.TB, text string) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode([]byte(text))
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func TestRequestsThatAreNotSigned(t *testing.T) {
	ca, id := newCA(t), schemas.NewRunnerID()
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	good := csr(t, p256(t), &x509.CertificateRequest{})
	forged := append([]byte{}, good...)
	forged[len(forged)-4] ^= 1
	for what, c := range map[string]struct {
		der  []byte
		want string
	}{
		"nothing":                         {nil, "can't be read"},
		"no request":                      {[]byte("hello"), "can't be read"},
		"something behind it":             {append(append([]byte{}, good...), 0), "can't be read"},
		"RSA":                             {csr(t, rsaKey, &x509.CertificateRequest{}), "P-256 or Ed25519"},
		"P-384":                           {csr(t, p384, &x509.CertificateRequest{}), "P-256 or Ed25519"},
		"a signature that is not the key": {forged, "not signed by its key"},
	} {
		if _, _, err := ca.SignLeaf(c.der, id, time.Hour); err == nil || !strings.Contains(err.Error(), c.want) || schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, bad := range []string{"", "edge", "console", id + "x"} {
		if _, _, err := ca.SignLeaf(good, bad, time.Hour); err == nil {
			t.Errorf("signed for %q", bad)
		}
	}
}

func TestTheControlPlanesOwnCertificateIsRenewedInMemory(t *testing.T) {
	ca := newCA(t)
	off := time.Duration(0)
	ca.SetClock(func() time.Time { return time.Now().Add(off) })
	own := func() string {
		t.Helper()
		config, err := ca.ClientTLS(link.ProtoLink)
		if err != nil {
			t.Fatal(err)
		}
		leaf, err := x509.ParseCertificate(config.Certificates[0].Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		if len(leaf.URIs) != 1 || !schemas.IsControlPlaneURI(leaf.URIs[0]) {
			t.Fatal(leaf.URIs)
		}
		if _, err := leaf.Verify(x509.VerifyOptions{Roots: ca.Pool(), CurrentTime: ca.now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
			t.Fatal(err)
		}
		return fingerprintOf(leaf.Raw)
	}
	first := own()
	if off = 11 * time.Hour; own() != first {
		t.Error("renewed too early")
	}
	off = 13 * time.Hour
	second := own()
	if second == first {
		t.Error("not renewed")
	}
	if off = time.Hour; own() == second { // the clock was set back
		t.Error("not renewed")
	}
}

// TestTheCAVouchesForNothingElse: its name constraints hold whoever gets hold of its key.
func TestTheCAVouchesForNothingElse(t *testing.T) {
	ca := newCA(t)
	u, err := url.Parse("spiffe://elsewhere.example/runner/a")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := ca.sign(p256(t).Public(), u, x509.ExtKeyUsageServerAuth, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cert.Verify(x509.VerifyOptions{Roots: ca.Pool()}); err == nil {
		t.Error("a name of another trust domain was taken")
	}
}

// TestACAOfSomebodyElse: whoever owns the folder, or a file in it, has the key, whatever the mode.
func TestACAOfSomebodyElse(t *testing.T) {
	foreign := func(err error, what, uid string) {
		t.Helper()
		var e *schemas.Error
		if !errors.As(err, &e) || e.Code != schemas.CodeInvalid || !strings.Contains(e.Message, what) || !strings.Contains(e.Message, "belongs to the user "+uid+", and this process runs as ") || !strings.Contains(e.Hint, "chown") {
			t.Errorf("%v, want %s of user %s", err, what, uid)
		}
	}
	log := slog.New(slog.DiscardHandler)
	if os.Geteuid() != 0 { // only root gives files away: those of root stand for them
		_, err := EnsureCA("/etc", log)
		foreign(err, "the folder of the runner CA", "0")
		_, err = readCAFile("/etc", "hostname")
		foreign(err, "the file /etc/hostname", "0")
		return
	}
	dir := filepath.Join(t.TempDir(), "ca")
	if _, err := EnsureCA(dir, log); err != nil {
		t.Fatal(err)
	}
	chown := func(name string, uid int) {
		t.Helper()
		if err := os.Chown(filepath.Join(dir, name), uid, -1); err != nil {
			t.Fatal(err)
		}
	}
	for name, what := range map[string]string{".": "the folder of the runner CA", fileCA: fileCA + " of the runner CA", fileCAKey: fileCAKey + " of the runner CA"} {
		chown(name, 12345)
		_, err := EnsureCA(dir, log)
		foreign(err, what, "12345")
		chown(name, 0)
	}
	if _, err := EnsureCA(dir, log); err != nil {
		t.Error(err)
	}
}

func FuzzRequestKey(f *testing.F) {
	f.Add(csr(f, p256(f), &x509.CertificateRequest{}))
	f.Add([]byte("hello"))
	f.Fuzz(func(t *testing.T, der []byte) {
		key, err := requestKey(der)
		if (key == nil) == (err == nil) {
			t.Fatal(key, err)
		}
	})
}
