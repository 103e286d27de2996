package identity

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net/url"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// exchangeTimeout bounds one enrolment on the runner's side, the control plane's durable decision in it included.
const exchangeTimeout = 20 * time.Second

// ResponderConfig is what a Responder needs.
type ResponderConfig struct {
	Store *Store
	// Ticket, when there is one: Store.Begin has taken it. Nil in a renewal, and when an enrolment waits for a certificate that
	// was issued already.
	Ticket *schemas.Ticket
	// OnEnrolled is called after a certificate was installed. May be nil.
	OnEnrolled func()
	Log        *slog.Logger     // nil: slog.Default()
	Now        func() time.Time // nil: time.Now
}

// Responder answers a control plane that dialled for an enrolment or for the renewal of an expired certificate. It is safe for
// concurrent use; exchanges take turns.
type Responder struct {
	c    ResponderConfig
	turn chan struct{} // of size 1

	mu    sync.Mutex
	cover *tls.Certificate // self-signed, over the pending key
}

// NewResponder makes one. Nothing is read or written.
func NewResponder(c ResponderConfig) *Responder {
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Responder{c: c, turn: make(chan struct{}, 1)}
}

// TLS is the server's side of link.ProtoEnrol. Its handshake fails for whoever shows no control plane's certificate of the CA that
// the ticket, or the state folder, names; what a certificate says of time is judged after the clocks were compared.
func (r *Responder) TLS() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{link.ProtoEnrol}, SessionTicketsDisabled: true,
		ClientAuth:       tls.RequireAnyClientCert,
		GetCertificate:   func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return r.certificate() },
		VerifyConnection: r.verify, // whoever listens logs what comes of it, not more often than a stranger may fill a disk
	}
}

// certificate is what this side presents: the certificate it has, else one over the pending key, so that the handshake proves the
// possession of the key that is to be certified.
func (r *Responder) certificate() (*tls.Certificate, error) {
	if leaf := r.c.Store.Leaf(); leaf != nil {
		return leaf, nil
	}
	key, err := r.c.Store.PendingKey()
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cover != nil && r.cover.PrivateKey == crypto.PrivateKey(key) {
		return r.cover, nil
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), URIs: []*url.URL{schemas.RunnerURI(r.c.Store.RunnerID())},
		NotBefore: r.c.Now().Add(-24 * time.Hour), NotAfter: r.c.Now().Add(365 * 24 * time.Hour), // nobody judges it
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make a self-signed certificate: %w", err)
	}
	r.cover = &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	return r.cover, nil
}

// verify checks who dialled, but not the time.
func (r *Responder) verify(cs tls.ConnectionState) error {
	want, ok := r.c.Store.caSHA256()
	if !ok {
		return errors.New("this runner is neither to be enrolled nor to be renewed")
	}
	return verifyControlPlane(cs, want)
}

// verifyControlPlane checks that the peer's chain ends in the CA of that hash and that its leaf is the control plane's.
func verifyControlPlane(cs tls.ConnectionState, caSHA256 [32]byte) error {
	if cs.Version != tls.VersionTLS13 || cs.NegotiatedProtocol != link.ProtoEnrol {
		return errors.New("this is no TLS 1.3 connection for an enrolment")
	}
	if len(cs.PeerCertificates) == 0 {
		return errors.New("whoever dialled showed no certificate")
	}
	leaf := cs.PeerCertificates[0]
	roots := x509.NewCertPool()
	found := false
	for _, cert := range cs.PeerCertificates[1:] {
		if sha256.Sum256(cert.Raw) == caSHA256 {
			roots.AddCert(cert)
			found = true
		}
	}
	if !found {
		return errors.New("whoever dialled has a certificate of another CA than the one that this runner is enrolled, or to be enrolled, with")
	}
	if _, err := leaf.Verify(x509.VerifyOptions{
		Roots: roots, CurrentTime: leaf.NotAfter, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}); err != nil {
		return fmt.Errorf("whoever dialled has no client certificate of the runner CA: %w", err)
	}
	if len(leaf.URIs) != 1 || !schemas.IsControlPlaneURI(leaf.URIs[0]) {
		return fmt.Errorf("whoever dialled is not %s", schemas.ControlPlaneURI())
	}
	return nil
}

// Serve carries out one exchange over conn, which was accepted with the TLS of this Responder, and closes it. Nil: a certificate was
// installed. An error says what was wrong, in words that the other side has been told too if they are ours; it is in the log, once.
func (r *Responder) Serve(ctx context.Context, conn *tls.Conn) error {
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, exchangeTimeout)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	if err := conn.HandshakeContext(ctx); err != nil {
		return r.failed(conn, fmt.Errorf("handshake: %w", err))
	}
	shown := r.c.Store.Fingerprint()
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done():
		return r.failed(conn, fmt.Errorf("another enrolment or renewal is under way: %w", ctx.Err()))
	}
	if err := r.serve(conn, shown); err != nil {
		return r.failed(conn, err)
	}
	return nil
}

// failed tells the other side, and the log, why an exchange failed.
func (r *Responder) failed(conn *tls.Conn, err error) error {
	peer := conn.RemoteAddr().String()
	if refused := new(link.RefusedError); errors.As(err, &refused) {
		r.c.Log.Warn("the control plane refused", "peer", peer, "error", refused.Why, "hint", hintOf(err))
		return err
	}
	if coded := new(schemas.Error); errors.As(err, &coded) {
		link.SayRefused(conn, err)
	}
	r.c.Log.Warn("an enrolment or renewal did not succeed; the control plane will try again", "peer", peer, "error", err, "hint", hintOf(err))
	return err
}

// serve is the exchange, from the control plane's first word to the end. shown is the certificate in place at the handshake: who saw
// another one than is there now would record the next one in the place of the one that was just installed.
func (r *Responder) serve(conn *tls.Conn, shown string) error {
	if r.c.Store.Fingerprint() != shown {
		return schemas.Errorf(schemas.CodeConflict, "the certificate of this runner was replaced meanwhile").WithHint("it is tried again by itself")
	}
	cs := conn.ConnectionState()
	if err := r.verify(cs); err != nil { // what was true at the handshake may have changed
		return err
	}
	hello, err := r.greet(conn, cs.PeerCertificates[0])
	if err != nil {
		return err
	}
	own, err := r.certificate()
	if err != nil {
		return err
	}
	binding, err := link.Bind(cs, hello.GetRunnerId(), cs.PeerCertificates[0].Raw, own.Certificate[0])
	if err != nil {
		return err
	}
	if hello.GetMode() == runbusv1.EnrolMode_ENROL_MODE_RENEW {
		return r.renew(conn)
	}
	return r.enrol(conn, binding)
}

// greet hears what the connection is for and checks it against the state folder and the clock.
func (r *Responder) greet(conn *tls.Conn, peer *x509.Certificate) (*runbusv1.EnrolHello, error) {
	f, err := link.Hear(conn, "the control plane")
	if err != nil {
		return nil, err
	}
	hello := f.GetHello()
	if hello.GetServerTime() == nil {
		return nil, errUnexpected("its hello")
	}
	now := r.c.Now()
	if err := link.CheckClocks(hello.GetServerTime().AsTime(), now); err != nil {
		return nil, err
	}
	if now.Before(peer.NotBefore.Add(-link.MaxSkew)) || now.After(peer.NotAfter.Add(link.MaxSkew)) {
		return nil, schemas.Errorf(schemas.CodeForbidden, "the control plane's certificate is not valid now: it is from %s to %s", stamp(peer.NotBefore), stamp(peer.NotAfter))
	}
	if id := r.c.Store.RunnerID(); hello.GetRunnerId() != id {
		return nil, schemas.Errorf(schemas.CodeConflict, "the runner at this address is %s, and the control plane dialled for another one", id).
			WithHint("correct the address of the runner (`runink runner edit`), or start the runner with the ticket that belongs to it")
	}
	state := r.c.Store.State()
	switch {
	case hello.GetMode() == runbusv1.EnrolMode_ENROL_MODE_TICKET && state == Pending,
		hello.GetMode() == runbusv1.EnrolMode_ENROL_MODE_RENEW && state == Enrolled:
		return hello, nil
	case hello.GetMode() == runbusv1.EnrolMode_ENROL_MODE_RENEW:
		return nil, schemas.Errorf(schemas.CodeConflict, "this runner has no certificate to renew: its state folder is %s", state).
			WithHint("if its state folder was lost, " + startOver)
	case hello.GetMode() == runbusv1.EnrolMode_ENROL_MODE_TICKET:
		return nil, schemas.Errorf(schemas.CodeConflict, "this runner is enrolled already: its state folder is %s", state)
	}
	return nil, errUnexpected("its hello")
}

// enrol proves the ticket and installs the certificate that comes for it.
func (r *Responder) enrol(conn *tls.Conn, binding link.Binding) error {
	key, err := r.c.Store.PendingKey()
	if err != nil {
		return err
	}
	csr, err := Request(key, r.c.Store.RunnerID())
	if err != nil {
		return err
	}
	var secret [32]byte
	proof := &runbusv1.EnrolProof{CsrDer: csr, RunnerTime: timestamppb.New(r.c.Now())}
	if r.c.Ticket != nil {
		secret = schemas.EnrolmentKey(r.c.Ticket.Token, r.c.Ticket.RunnerID)
		proof.Mac = binding.RunnerMAC(secret, csr)
	}
	grant, err := r.ask(conn, proof)
	if err != nil {
		return err
	}
	// A certificate that is delivered again is good by itself: InstallFirst takes it only from the ticket's CA and for this key, which
	// has never been anywhere else. A first one must come with the proof.
	proven := r.c.Ticket != nil && hmac.Equal(grant.GetMac(), binding.ControlPlaneMAC(secret, grant.GetCertificatePem(), grant.GetTenant()))
	if !proven && (len(grant.GetMac()) > 0 || !grant.GetAgain()) {
		return schemas.Errorf(schemas.CodeForbidden, "the control plane did not prove that it issued the ticket").
			WithHint("somebody may stand between it and this runner: look at who can change the network's routes, and issue a new token")
	}
	return r.installed(conn, "enrolled", r.c.Store.InstallFirst(grant.GetCertificatePem(), grant.GetTenant()))
}

// renew gets a certificate for a fresh key; the connection, on which both sides showed a certificate, is the proof.
func (r *Responder) renew(conn *tls.Conn) error {
	key, err := r.c.Store.RenewalKey()
	if err != nil {
		return err
	}
	csr, err := Request(key, r.c.Store.RunnerID())
	if err != nil {
		return err
	}
	grant, err := r.ask(conn, &runbusv1.EnrolProof{CsrDer: csr, RunnerTime: timestamppb.New(r.c.Now())})
	if err != nil {
		return err
	}
	return r.installed(conn, "renewed an expired certificate", r.c.Store.InstallNext(grant.GetCertificatePem()))
}

func (r *Responder) ask(conn *tls.Conn, proof *runbusv1.EnrolProof) (*runbusv1.EnrolGrant, error) {
	if err := link.Say(conn, &runbusv1.EnrolFrame{Said: &runbusv1.EnrolFrame_Proof{Proof: proof}}); err != nil {
		return nil, err
	}
	f, err := link.Hear(conn, "the control plane")
	if err != nil {
		return nil, err
	}
	if f.GetGrant() == nil {
		return nil, errUnexpected("the certificate")
	}
	return f.GetGrant(), nil
}

// installed tells both sides how an installation ended.
func (r *Responder) installed(conn *tls.Conn, what string, err error) error {
	if err != nil {
		return err
	}
	leaf := r.c.Store.Leaf().Leaf
	r.c.Log.Info(what, "runner", r.c.Store.RunnerID(), "tenant", r.c.Store.Tenant(), "certificate", FingerprintOf(leaf), "until", leaf.NotAfter)
	if r.c.OnEnrolled != nil {
		r.c.OnEnrolled()
	}
	if err := link.Say(conn, &runbusv1.EnrolFrame{Said: &runbusv1.EnrolFrame_Done{Done: &runbusv1.EnrolDone{}}}); err != nil {
		r.c.Log.Debug("the control plane did not hear that the certificate is installed; it will find out at the next link", "error", err)
	}
	return nil
}

// Request is a certificate request (PKCS #10) for key, in DER.
func Request(key crypto.Signer, runnerID string) ([]byte, error) {
	template := &x509.CertificateRequest{URIs: []*url.URL{schemas.RunnerURI(runnerID)}}
	if _, ok := key.Public().(*ecdsa.PublicKey); ok {
		template.SignatureAlgorithm = x509.ECDSAWithSHA256
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate request: %w", err)
	}
	return der, nil
}

func errUnexpected(wanted string) error {
	return schemas.Errorf(schemas.CodeInvalid, "the control plane said something else than %s: its version may not fit this runner's", wanted)
}

func hintOf(err error) string {
	var e *schemas.Error
	if errors.As(err, &e) {
		return e.Hint
	}
	return ""
}
