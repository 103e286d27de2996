package identity_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	buslink "github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// controlPlane is a client certificate of the control plane.
func (a *authority) controlPlane(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(7), URIs: []*url.URL{schemas.ControlPlaneURI()},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der, a.cert.Raw}, PrivateKey: key}
}

// exchange is a connection for an enrolment, shaken and served.
func exchange(t *testing.T, r *identity.Responder, client tls.Certificate) (*tls.Conn, <-chan error) {
	t.Helper()
	ours, theirs := net.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- r.Serve(t.Context(), tls.Server(theirs, r.TLS())) }()
	conn := tls.Client(ours, &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{buslink.ProtoEnrol}, Certificates: []tls.Certificate{client}, InsecureSkipVerify: true,
	})
	if err := conn.Handshake(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn, ended
}

// Of two control planes that renew an expired certificate at once, the second saw the one before the first had its own installed: what
// it would record as the next certificate takes the place of the one in use, and a cut then leaves none.
func TestARenewalThatSawTheCertificateBefore(t *testing.T) {
	dir := folder(t)
	synctest.Test(t, func(t *testing.T) {
		a := newAuthority(t)
		id := schemas.NewRunnerID()
		s := enrolledIn(t, dir, a, id)
		r := identity.NewResponder(identity.ResponderConfig{Store: s})
		client := a.controlPlane(t)
		first, installed := exchange(t, r, client)
		synctest.Wait() // it has its turn, and waits for the hello
		second, refused := exchange(t, r, client)
		synctest.Wait() // it waits for its turn
		hello := &runbusv1.EnrolFrame{Said: &runbusv1.EnrolFrame_Hello{Hello: &runbusv1.EnrolHello{
			RunnerId: id, Mode: runbusv1.EnrolMode_ENROL_MODE_RENEW, ServerTime: timestamppb.Now(),
		}}}
		if err := buslink.Say(first, hello); err != nil {
			t.Fatal(err)
		}
		f, err := buslink.Hear(first, "the runner")
		if err != nil {
			t.Fatal(err)
		}
		csr, err := x509.ParseCertificateRequest(f.GetProof().GetCsrDer())
		if err != nil {
			t.Fatal(err)
		}
		chain := a.sign(t, csr.PublicKey, leaf(id))
		if err := buslink.Say(first, &runbusv1.EnrolFrame{Said: &runbusv1.EnrolFrame_Grant{Grant: &runbusv1.EnrolGrant{CertificatePem: chain}}}); err != nil {
			t.Fatal(err)
		}
		if f, err = buslink.Hear(first, "the runner"); err != nil || f.GetDone() == nil {
			t.Fatal(f, err)
		}
		_ = first.Close()
		if err := <-installed; err != nil {
			t.Error(err)
		}
		_, err = buslink.Hear(second, "the runner")
		var said *buslink.RefusedError
		if !errors.As(err, &said) || schemas.CodeOf(err) != schemas.CodeConflict || !strings.Contains(err.Error(), "was replaced meanwhile") {
			t.Errorf("the second: %v", err)
		}
		_ = second.Close()
		if err := <-refused; err == nil {
			t.Error("the second was served")
		}
		_, ended := exchange(t, r, client) // a fresh handshake shows the new one
		synctest.Wait()
		select {
		case err := <-ended:
			t.Errorf("a fresh one: %v", err)
		default:
		}
	})
}
