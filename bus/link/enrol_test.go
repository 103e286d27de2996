package link_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// shaken is the state of a real connection.
func shaken(t *testing.T) tls.ConnectionState {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	client, server := net.Pipe()
	t.Cleanup(func() { _, _ = client.Close(), server.Close() })
	served := make(chan error, 1)
	go func() {
		served <- tls.Server(server, &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}}).Handshake()
	}()
	conn := tls.Client(client, &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true})
	if err := errors.Join(conn.Handshake(), <-served); err != nil {
		t.Fatal(err)
	}
	return conn.ConnectionState()
}

func bind(t *testing.T, cs tls.ConnectionState, runnerID, controlPlane, runner string) link.Binding {
	t.Helper()
	b, err := link.Bind(cs, runnerID, []byte(controlPlane), []byte(runner))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestEveryPartOfAProofCounts(t *testing.T) {
	key, other := [32]byte{1}, [32]byte{2}
	cs := shaken(t)
	b := bind(t, cs, "r-a", "control plane", "runner")
	want := b.RunnerMAC(key, []byte("csr"))
	if !bytes.Equal(want, b.RunnerMAC(key, []byte("csr"))) || len(want) != 32 {
		t.Fatal("a proof is not the same twice")
	}
	for what, got := range map[string][]byte{
		"another key":        b.RunnerMAC(other, []byte("csr")),
		"another request":    b.RunnerMAC(key, []byte("csr2")),
		"another role":       b.ControlPlaneMAC(key, []byte("csr"), ""),
		"another connection": bind(t, shaken(t), "r-a", "control plane", "runner").RunnerMAC(key, []byte("csr")),
		"another runner":     bind(t, cs, "r-b", "control plane", "runner").RunnerMAC(key, []byte("csr")),
		"another client":     bind(t, cs, "r-a", "control plane 2", "runner").RunnerMAC(key, []byte("csr")),
		"another server":     bind(t, cs, "r-a", "control plane", "runner 2").RunnerMAC(key, []byte("csr")),
		"the two swapped":    bind(t, cs, "r-a", "runner", "control plane").RunnerMAC(key, []byte("csr")),
	} {
		if bytes.Equal(want, got) {
			t.Errorf("%s has the same proof", what)
		}
	}
	grant := b.ControlPlaneMAC(key, []byte("chain"), "acme")
	for what, got := range map[string][]byte{
		"another tenant":      b.ControlPlaneMAC(key, []byte("chain"), "acmf"),
		"another certificate": b.ControlPlaneMAC(key, []byte("chaim"), "acme"),
		"another key":         b.ControlPlaneMAC(other, []byte("chain"), "acme"),
	} {
		if bytes.Equal(grant, got) {
			t.Errorf("%s has the same proof", what)
		}
	}
}

func TestClocks(t *testing.T) {
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	for _, near := range []time.Duration{0, link.MaxSkew, -link.MaxSkew, time.Second} {
		if err := link.CheckClocks(now, now.Add(near)); err != nil {
			t.Errorf("%s: %v", near, err)
		}
	}
	for apart, want := range map[time.Duration]string{
		20 * time.Minute:           "(2026-11-30T12:20:00Z) is 20m0s ahead of the control plane's (2026-11-30T12:00:00Z)",
		-20 * time.Minute:          "(2026-11-30T11:40:00Z) is 20m0s behind the control plane's",
		link.MaxSkew + time.Second: "5m1s ahead of",
	} {
		err := link.CheckClocks(now, now.Add(apart))
		var e *schemas.Error
		if !errors.As(err, &e) || !strings.Contains(e.Message, want) || !strings.Contains(e.Hint, "NTP") {
			t.Errorf("%s: %v", apart, err)
		}
	}
}

func TestRefusalsAreTheOtherSidesWords(t *testing.T) {
	a, b := net.Pipe()
	defer func() { _, _ = a.Close(), b.Close() }()
	go func() {
		link.SayRefused(a, schemas.Errorf(schemas.CodeForbidden, "no").WithHint("ask again"))
		link.SayRefused(a, errors.New("a cause that stays here"))
		_ = a.Close()
	}()
	_, err := link.Hear(b, "the runner")
	var refused *link.RefusedError
	if !errors.As(err, &refused) || err.Error() != "the runner refused: no" || schemas.CodeOf(err) != schemas.CodeForbidden {
		t.Error(err)
	}
	if _, err = link.Hear(b, "the runner"); err == nil || strings.Contains(err.Error(), "stays here") {
		t.Error(err)
	}
	if _, err = link.Hear(b, "the runner"); err == nil || err.Error() != "the runner ended the connection" {
		t.Error(err)
	}
}

// What a stranger says gets into logs and answers: in one line, and not much of it.
func TestAStrangersWordsAreBounded(t *testing.T) {
	a, b := net.Pipe()
	defer func() { _, _ = a.Close(), b.Close() }()
	go link.SayRefused(a, schemas.Errorf(schemas.CodeForbidden, "no\x1b[2J\nlevel=ERROR %s", strings.Repeat("é", 5000)).WithHint(strings.Repeat("h", 5000)))
	_, err := link.Hear(b, "the runner")
	var said *schemas.Error
	if !errors.As(err, &said) || !strings.HasPrefix(said.Message, "no [2J level=ERROR é") || len(said.Message) > 1024 || len(said.Hint) > 1024 {
		t.Errorf("%.60q, %d and %d bytes", err, len(said.Message), len(said.Hint))
	}
}

// reader is a connection that has only something to read.
type reader struct {
	net.Conn
	io.Reader
}

func (r reader) Read(p []byte) (int, error) { return r.Reader.Read(p) }

func FuzzHear(f *testing.F) {
	for _, m := range []*runbusv1.EnrolFrame{
		{Said: &runbusv1.EnrolFrame_Hello{Hello: &runbusv1.EnrolHello{RunnerId: "r-a"}}},
		{Said: &runbusv1.EnrolFrame_Proof{Proof: &runbusv1.EnrolProof{CsrDer: []byte("csr"), Mac: make([]byte, 32)}}},
		{Said: &runbusv1.EnrolFrame_Grant{Grant: &runbusv1.EnrolGrant{CertificatePem: []byte("pem"), Tenant: "acme"}}},
		{Said: &runbusv1.EnrolFrame_Refused{Refused: &runbusv1.ErrorDetail{Code: "invalid", Message: "no"}}},
		{},
	} {
		var b bytes.Buffer
		if err := link.WriteFrame(&b, m); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		m, err := link.Hear(reader{Reader: bytes.NewReader(body)}, "the runner")
		if (m == nil) == (err == nil) {
			t.Fatal(m, err)
		}
		if m.GetRefused() != nil {
			t.Fatal("a refusal is no error")
		}
	})
}
