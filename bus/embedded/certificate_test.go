package embedded

import (
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
)

func leafOf(t *testing.T, certFile, keyFile string) *x509.Certificate {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}
	return pair.Leaf
}

func authorityOf(t *testing.T, caFile string) *x509.Certificate {
	t.Helper()
	body, err := os.ReadFile(caFile)
	if err != nil {
		t.Fatal(err)
	}
	block, rest := pem.Decode(body)
	if block == nil || len(rest) != 0 {
		t.Fatal("the authority's file is not one certificate")
	}
	ca, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func verify(ca, leaf *x509.Certificate, host string, at time.Time) error {
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	_, err := leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: host, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	return err
}

func TestEnsureCertificate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tls")
	certFile, keyFile, caFile, err := EnsureCertificate(dir, []string{"bus.example.org", "192.0.2.7"})
	if err != nil {
		t.Fatal(err)
	}
	leaf, ca := leafOf(t, certFile, keyFile), authorityOf(t, caFile)
	for _, host := range []string{"localhost", "127.0.0.1", "::1", "bus.example.org", "192.0.2.7"} {
		if err := verify(ca, leaf, host, time.Now()); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
	if err := verify(ca, leaf, "other.example.org", time.Now()); err == nil {
		t.Error("good for a host that was not named")
	}
	key, ok := leaf.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Params().Name != "P-256" || leaf.IsCA || !ca.IsCA || !ca.MaxPathLenZero {
		t.Errorf("key %T, leaf CA %v, authority CA %v", leaf.PublicKey, leaf.IsCA, ca.IsCA)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 4 {
		t.Errorf("files %v, %v", entries, err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", e.Name(), info.Mode(), err)
		}
	}
}

// The server's certificate is kept while it is good, and made again under the same authority when it is not.
func TestEnsureCertificateRenews(t *testing.T) {
	now := time.Now()
	for name, c := range map[string]struct {
		change  func(t *testing.T, dir string)
		at      time.Time
		hosts   []string
		renewed bool
		newCA   bool
	}{
		"nothing changed":        {at: now},
		"two thirds of its life": {at: now.Add(serverLife*2/3 - time.Hour)},
		"less than a third left": {at: now.Add(serverLife*2/3 + time.Hour), renewed: true},
		"expired":                {at: now.Add(serverLife * 2), renewed: true},
		"one host more":          {at: now, hosts: []string{"a.example.org", "b.example.org"}, renewed: true},
		"one host less":          {at: now, hosts: []string{}},
		"the key is gone":        {at: now, change: func(t *testing.T, dir string) { remove(t, dir, "server.key") }, renewed: true},
		"another key":            {at: now, change: func(t *testing.T, dir string) { copyFile(t, dir, "ca.key", "server.key") }, renewed: true},
		"the key is open":        {at: now, change: func(t *testing.T, dir string) { chmod(t, dir, "server.key") }, renewed: true},
		"the certificate is cut": {at: now, change: func(t *testing.T, dir string) { write(t, dir, "server.pem", "x") }, renewed: true},
		"authority gone":         {at: now, change: func(t *testing.T, dir string) { remove(t, dir, "ca.pem") }, renewed: true, newCA: true},
		"authority about to end": {at: now.Add(authorityLife - serverLife + time.Hour), renewed: true, newCA: true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			certFile, keyFile, caFile, err := ensureCertificate(dir, []string{"a.example.org"}, now)
			if err != nil {
				t.Fatal(err)
			}
			leaf, ca := leafOf(t, certFile, keyFile), authorityOf(t, caFile)
			if c.change != nil {
				c.change(t, dir)
			}
			hosts := c.hosts
			if hosts == nil {
				hosts = []string{"a.example.org"}
			}
			if _, _, _, err := ensureCertificate(dir, hosts, c.at); err != nil {
				t.Fatal(err)
			}
			leaf2, ca2 := leafOf(t, certFile, keyFile), authorityOf(t, caFile)
			if renewed := !leaf.Equal(leaf2); renewed != c.renewed {
				t.Errorf("renewed %v, want %v", renewed, c.renewed)
			}
			if newCA := !ca.Equal(ca2); newCA != c.newCA {
				t.Errorf("another authority %v, want %v", newCA, c.newCA)
			}
			if err := verify(ca2, leaf2, "localhost", c.at); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestEnsureCertificateRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		change func(t *testing.T, dir string)
		hosts  []string
		want   string
	}{
		"open key of the authority": {change: func(t *testing.T, dir string) { chmod(t, dir, "ca.key") }, want: "open to others (mode 0644)"},
		"damaged authority":         {change: func(t *testing.T, dir string) { write(t, dir, "ca.pem", "x") }, want: "is damaged"},
		"damaged key":               {change: func(t *testing.T, dir string) { write(t, dir, "ca.key", "x") }, want: "is damaged"},
		"no authority": {change: func(t *testing.T, dir string) {
			copyFile(t, dir, "server.pem", "ca.pem")
			copyFile(t, dir, "server.key", "ca.key")
		}, want: "is not one"},
		"a wildcard":    {hosts: []string{"*.example.org"}, want: "neither a host name"},
		"a URL":         {hosts: []string{"https://x"}, want: "neither a host name"},
		"an empty host": {hosts: []string{""}, want: "neither a host name"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if _, _, _, err := EnsureCertificate(dir, nil); err != nil {
				t.Fatal(err)
			}
			if c.change != nil {
				c.change(t, dir)
			}
			_, _, _, err := EnsureCertificate(dir, c.hosts)
			if !errors.Is(err, &schemas.Error{Code: schemas.CodeInvalid}) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want CodeInvalid with %q", err, c.want)
			}
		})
	}
}

func remove(t *testing.T, dir, name string) {
	t.Helper()
	if err := os.Remove(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

func chmod(t *testing.T, dir, name string) {
	t.Helper()
	if err := os.Chmod(filepath.Join(dir, name), 0o644); err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, dir, name, body string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o600); err != nil {
		t.Fatal(err)
	}
}

func copyFile(t *testing.T, dir, from, to string) {
	t.Helper()
	body, err := os.ReadFile(filepath.Join(dir, from))
	if err != nil {
		t.Fatal(err)
	}
	write(t, dir, to, string(body))
}
