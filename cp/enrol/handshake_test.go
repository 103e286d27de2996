package enrol

import (
	"bytes"
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
)

// patience is what a dial of a test may take: none is cut for its time, however slow this machine is.
const patience = 2 * time.Minute

// issue signs a certificate that is right but for what change makes of it, and returns it with the leaf that would be pinned.
func issue(t *testing.T, ca *CA, id string, change func(*x509.Certificate)) (tls.Certificate, roster.Leaf) {
	t.Helper()
	key := p256(t)
	now := time.Now()
	c := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()), NotBefore: now.Add(-time.Minute), NotAfter: now.Add(time.Hour),
		URIs: []*url.URL{schemas.RunnerURI(id)}, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	change(c)
	der := create(t, c, ca.cert, key.Public(), ca.key)
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der, ca.cert.Raw}, PrivateKey: key},
		roster.Leaf{Fingerprint: fingerprintOf(der), PublicKey: leaf.RawSubjectPublicKeyInfo, NotBefore: leaf.NotBefore, NotAfter: leaf.NotAfter}
}

func create(t *testing.T, c, parent *x509.Certificate, public, signer any) []byte {
	t.Helper()
	der, err := x509.CreateCertificate(nil, c, parent, public.(crypto.PublicKey), signer)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

// serveTLS shakes hands with whoever comes, and passes on what came of it.
func serveTLS(t *testing.T, config *tls.Config) (address string, shaken <-chan error) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	result := make(chan error, 16)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			conn := tls.Server(raw, config)
			result <- conn.HandshakeContext(context.Background())
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-ended })
	return l.Addr().String(), result
}

// C1: who is at the other end is decided at the handshake, each wrong certificate by a reason and a line in the log of its own.
func TestEachWrongCertificateIsRefusedAtTheHandshake(t *testing.T) {
	ca, other := newCA(t), newCA(t)
	id, stranger := schemas.NewRunnerID(), schemas.NewRunnerID()
	keep := func(*x509.Certificate) {}
	texts := map[string]string{}
	for _, c := range []struct {
		name   string
		ca     *CA
		change func(*x509.Certificate)
		tls    func(*tls.Config)
		pinned bool // what is shown is what is on record
		reason string
		text   string
	}{
		{name: "right", ca: ca, change: keep, pinned: true},
		{name: "wrong SPIFFE id", ca: ca, pinned: true, reason: ReasonSPIFFE, text: "another runner listens at this address",
			change: func(c *x509.Certificate) { c.URIs = []*url.URL{schemas.RunnerURI(stranger)} }},
		{name: "no runner's SPIFFE id", ca: ca, pinned: true, reason: ReasonSPIFFE, text: "its SPIFFE id is not",
			change: func(c *x509.Certificate) { c.URIs = []*url.URL{schemas.ControlPlaneURI()} }},
		{name: "expired", ca: ca, pinned: true, reason: ReasonExpired, text: "expired at",
			change: func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
			}},
		{name: "not yet valid", ca: ca, pinned: true, reason: ReasonNotYetValid, text: "not valid before",
			change: func(c *x509.Certificate) { c.NotBefore = time.Now().Add(20 * time.Minute) }},
		{name: "another CA", ca: other, change: keep, pinned: true, reason: ReasonOtherCA, text: "not of this control plane's runner CA"},
		{name: "two URI names", ca: ca, pinned: true, reason: ReasonNames, text: "2 URI names",
			change: func(c *x509.Certificate) { c.URIs = append(c.URIs, schemas.RunnerURI(stranger)) }},
		{name: "a DNS name beside", ca: ca, pinned: true, reason: ReasonNames, text: "1 others",
			change: func(c *x509.Certificate) { c.DNSNames = []string{"edge.example.com"} }},
		{name: "a client's certificate", ca: ca, pinned: true, reason: ReasonUsage, text: "not one for a server",
			change: func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }},
		{name: "one for clients too", ca: ca, pinned: true, reason: ReasonUsage, text: "not one for a server",
			change: func(c *x509.Certificate) {
				c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
			}},
		{name: "one that was replaced", ca: ca, change: keep, reason: ReasonNotPinned, text: "not the one on record"},
		{name: "TLS 1.2", ca: ca, change: keep, pinned: true, reason: ReasonVersion, text: "TLS 1.3",
			tls: func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12 }},
		{name: "another protocol", ca: ca, change: keep, pinned: true, reason: ReasonProtocol, text: "is no runner",
			tls: func(c *tls.Config) { c.NextProtos = []string{"h2"} }},
		{name: "no protocol", ca: ca, change: keep, pinned: true, reason: ReasonProtocol, text: "is no runner",
			tls: func(c *tls.Config) { c.NextProtos = nil }},
	} {
		t.Run(c.name, func(t *testing.T) {
			cert, leaf := issue(t, c.ca, id, c.change)
			config := &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{link.ProtoLink}, ClientAuth: tls.RequireAnyClientCert, MinVersion: tls.VersionTLS13}
			if c.tls != nil {
				c.tls(config)
			}
			address, shaken := serveTLS(t, config)
			_, onRecord := issue(t, ca, id, keep)
			if c.pinned {
				onRecord = leaf
			}
			onRecord.NotAfter = time.Now().Add(time.Hour) // what the registry has is no reason not to dial
			r := roster.Runner{ID: id, Tenant: "acme", Name: "edge", Address: address, State: roster.Active, Current: &onRecord}

			var logged bytes.Buffer
			d := &Dialler{d: DiallerDeps{
				CA: ca, Now: time.Now, DialWithin: patience, FirstRetry: time.Second, SlowestRetry: time.Second,
				Log: slog.New(slog.NewTextHandler(&logged, nil)),
			}}
			tend := newTender(d, id)
			own, err := ca.ClientTLS(link.ProtoLink)
			if err != nil {
				t.Fatal(err)
			}
			conn, fingerprint, err := tend.shake(t.Context(), r, own)
			if c.reason == "" {
				if err != nil || fingerprint != onRecord.Fingerprint {
					t.Fatalf("%v, %s", err, fingerprint)
				}
				_ = conn.Close()
				if err := <-shaken; err != nil {
					t.Errorf("the runner's side: %v", err)
				}
				return
			}
			if err == nil {
				t.Fatal("it was taken")
			}
			if server := <-shaken; server == nil {
				t.Error("the handshake went through on the runner's side")
			}
			err = explainDial(err, address)
			var refused *HandshakeError
			if !errors.As(err, &refused) || refused.Reason != c.reason || !strings.Contains(refused.Text, c.text) {
				t.Fatalf("%T %v, want %s: %q", err, err, c.reason, c.text)
			}
			over, cancel := context.WithCancel(t.Context())
			cancel()
			tend.wait(over, r, err)
			if line := logged.String(); !strings.Contains(line, "level=WARN") || !strings.Contains(line, "reason="+c.reason) || !strings.Contains(line, c.text) {
				t.Errorf("logged %s", line)
			}
			if s := tend.snapshot(); s.LastError != refused.Text || s.NextTry == nil {
				t.Errorf("the API shows %+v", s)
			}
			texts[c.name] = c.reason
		})
	}
	if len(texts) != 13 {
		t.Errorf("%d wrong certificates were refused", len(texts))
	}
}

// An address at which there is no runner is told apart by words, without a stack of wrapped errors.
func TestWhatFailedDialsSay(t *testing.T) {
	address, _ := serveTLS(t, &tls.Config{MinVersion: tls.VersionTLS13})
	const closed = "127.0.0.1:1" // not one that was given back: that may be somebody's again
	ca := newCA(t)
	d := &Dialler{d: DiallerDeps{CA: ca, Now: time.Now, DialWithin: patience, Log: slog.New(slog.DiscardHandler)}}
	for where, want := range map[string]string{
		closed:  "nothing listens at " + closed,
		address: "handshake", // it has no certificate: its alert says so
	} {
		own, err := ca.ClientTLS(link.ProtoLink)
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = newTender(d, "r").shake(t.Context(), roster.Runner{Address: where}, own)
		if err == nil {
			t.Fatalf("%s: linked", where)
		}
		if text := explainDial(err, where).Error(); !strings.Contains(text, want) {
			t.Errorf("%s: %q, want %q", where, text, want)
		}
	}
}

// What tenants read of a dial that failed names neither the resolvers nor the addresses of this network.
func TestAFailedDialTellsNothingOfTheNetwork(t *testing.T) {
	for text, cause := range map[string]*net.DNSError{
		"no such host":                 {Err: "no such host", Name: "edge.example", Server: "192.0.2.53:53", IsNotFound: true},
		"the resolver does not answer": {Err: "read udp 192.0.2.7:4000->192.0.2.53:53: i/o timeout", Name: "edge.example", Server: "192.0.2.53:53", IsTimeout: true},
		"the resolver failed":          {Err: "server misbehaving", Name: "edge.example", Server: "192.0.2.53:53", IsTemporary: true},
	} {
		err := explainDial(&net.OpError{Op: "dial", Net: "tcp", Err: cause}, "edge.example:7443")
		var dns *net.DNSError
		if want := "the name in edge.example:7443 does not resolve: lookup edge.example: " + text; err.Error() != want || !errors.As(err, &dns) {
			t.Errorf("%q, want %q", err, want)
		}
	}
	reset := &net.OpError{Op: "read", Net: "tcp", Source: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 7)}, Addr: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 9)}, Err: syscall.ECONNRESET}
	if err := explainDial(reset, "edge.example:7443"); err.Error() != "edge.example:7443 can't be reached: connection reset by peer" || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%q", err)
	}
}

// A name that leads to cloud metadata is refused once it is resolved, and nothing is sent there.
func TestMetadataIsNotDialled(t *testing.T) {
	ca := newCA(t)
	d := &Dialler{d: DiallerDeps{CA: ca, Now: time.Now, DialWithin: patience, Log: slog.New(slog.DiscardHandler)}}
	for _, address := range []string{"169.254.169.254:80", "[fd00:ec2::254]:7443", "[::ffff:169.254.169.254]:80", "168.63.129.16:80"} {
		own, err := ca.ClientTLS(link.ProtoLink)
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = newTender(d, "r").shake(t.Context(), roster.Runner{Address: address}, own)
		var refused *HandshakeError
		if !errors.As(err, &refused) || refused.Reason != ReasonForbidden {
			t.Errorf("%s: %v", address, err)
		}
		if text := explainDial(err, address).Error(); !strings.HasPrefix(text, "the control plane dials no runner there: ") {
			t.Errorf("%s: %q", address, text)
		}
	}
}
