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
	"errors"
	"io/fs"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	buslink "github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/cp/enrol"
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

// shakeTLS ends the TLS of a NATS link: it passes the server's first line on, and shakes hands with both sides, which come to it only then.
func (i *inspection) shakeTLS(l *link) (bool, error) {
	return true, within(l, func() error {
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
		return finish(l, tls.Server(l.tcp[0], i.server), server)
	})
}

// shakeHTTPS ends the TLS of a WebSocket link.
func (i *inspection) shakeHTTPS(l *link) (bool, error) {
	return true, within(l, func() error { return finish(l, tls.Server(l.tcp[0], i.server), tls.Client(l.tcp[1], i.client)) })
}

// finish shakes hands with both sides and makes them the ends of the link.
func finish(l *link, runner, plane *tls.Conn) error {
	for _, c := range []*tls.Conn{plane, runner} {
		if err := c.Handshake(); err != nil {
			return err
		}
	}
	l.ends = [2]net.Conn{runner, plane}
	return nil
}

// within has the handshakes of a link end in time.
func within(l *link, shake func() error) error {
	for _, c := range l.tcp {
		if err := c.SetDeadline(time.Now().Add(stack.Patience)); err != nil {
			return err
		}
	}
	if err := shake(); err != nil {
		return err
	}
	for _, c := range l.tcp {
		if err := c.SetDeadline(time.Time{}); err != nil {
			return err
		}
	}
	return nil
}

// impersonation ends the TLS of both sides of a dialled link by the keys of both: nobody without them can. An enrolment passes as it is.
type impersonation struct {
	plane string // data folder of the control plane
	state string // folder of the runner
}

func (i impersonation) shake(l *link) (readable bool, err error) {
	body, err := os.ReadFile(filepath.Join(i.state, "identity.pem"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // it is being enrolled
	} else if err != nil {
		return false, err
	}
	leaf, err := tls.X509KeyPair(body, body)
	if err != nil {
		return false, err
	}
	ca, err := enrol.EnsureCA(filepath.Join(i.plane, "runner-ca"), slog.New(slog.DiscardHandler))
	if err != nil {
		return false, err
	}
	toRunner, err := ca.ClientTLS(buslink.ProtoLink)
	if err != nil {
		return false, err
	}
	toPlane := &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{leaf}, NextProtos: []string{buslink.ProtoLink},
		ClientAuth: tls.RequireAnyClientCert, SessionTicketsDisabled: true,
	}
	return true, within(l, func() error {
		return finish(l, tls.Client(l.tcp[0], toRunner), tls.Server(l.tcp[1], toPlane))
	})
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
