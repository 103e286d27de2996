package chaos

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// inspection ends the TLS of both sides of a link, as a proxy of a company does whose CA its hosts trust: what happens to messages
// can happen there, since below TLS a byte too many ends the link.
type inspection struct {
	server *tls.Config // towards the runner
	client *tls.Config // towards the bus
	ca     string      // PEM file of the CA that the runner is to trust
}

func newInspection(t testing.TB, busCA string) *inspection {
	t.Helper()
	pool := caPool(t, busCA)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	self := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "chaos"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, self, self, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	i := &inspection{
		ca:     filepath.Join(t.TempDir(), "inspection.pem"),
		server: &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}},
		client: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool, ServerName: "127.0.0.1"},
	}
	if err := os.WriteFile(i.ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return i
}

// shake passes the server's first line on, and shakes hands with both sides, which come to it only then.
func (i *inspection) shake(l *link) error {
	give := time.Now().Add(stack.Patience)
	for _, c := range l.tcp {
		if err := c.SetDeadline(give); err != nil {
			return err
		}
	}
	info, err := bufio.NewReaderSize(oneByte{l.tcp[1]}, 64<<10).ReadBytes('\n')
	if err != nil {
		return err
	}
	server := tls.Client(l.tcp[1], i.client)
	if err := server.Handshake(); err != nil {
		return err
	}
	if _, err := l.tcp[0].Write(info); err != nil {
		return err
	}
	client := tls.Server(l.tcp[0], i.server)
	if err := client.Handshake(); err != nil {
		return err
	}
	l.ends = [2]net.Conn{client, server}
	for _, c := range l.tcp {
		if err := c.SetDeadline(time.Time{}); err != nil {
			return err
		}
	}
	return nil
}

// oneByte reads one at a time: nothing of what comes behind a line is taken with it.
type oneByte struct{ net.Conn }

func (o oneByte) Read(p []byte) (int, error) { return o.Conn.Read(p[:1]) }

// caPool is the CAs of a PEM file.
func caPool(t testing.TB, file string) *x509.CertPool {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		t.Fatalf("no certificate in %s", filepath.Base(file))
	}
	return pool
}
