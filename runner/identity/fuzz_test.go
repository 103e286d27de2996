package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"math/big"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// FuzzInstall feeds the decoder of what a control plane sends, and that of identity.pem, which is made of it.
func FuzzInstall(f *testing.F) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		f.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		f.Fatal(err)
	}
	ca, err := x509.ParseCertificate(der)
	if err != nil {
		f.Fatal(err)
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		f.Fatal(err)
	}
	one := encodeCertificate(der)
	f.Add(one)
	f.Add(append(bytes.Clone(one), one...))
	f.Add(append(bytes.Clone(one), keyPEM...))
	f.Add([]byte("hello"))
	f.Fuzz(func(t *testing.T, body []byte) {
		if leaf, authority, err := splitChain(body); err == nil && (leaf == nil || authority == nil) {
			t.Fatal("a chain without its parts")
		}
		if cert, err := parseIdentity(body, ca, "r-aaaaaaaaaaaaaaaaaaaaaaaaaa"); err == nil {
			t.Fatal("a certificate that names no runner was taken", cert.Leaf.Subject)
		}
		if key, err := parseKey(body); (key == nil) == (err == nil) {
			t.Fatal(key, err)
		}
	})
}

func FuzzRunnerFile(f *testing.F) {
	f.Add(who{ID: schemas.NewRunnerID(), Name: "edge", Tenant: "acme"}.encode())
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		w, err := parseWho(body)
		if err != nil {
			return
		}
		if again, err := parseWho(w.encode()); err != nil || again != w {
			t.Fatal(again, err)
		}
	})
}
