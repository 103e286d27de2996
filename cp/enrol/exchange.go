package enrol

import (
	"cmp"
	"context"
	"crypto"
	"crypto/hmac"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	// DefaultLeafLife is the life of a runner's certificate (SPEC C5; CORE_RUNNER_LEAF_LIFE).
	DefaultLeafLife = 24 * time.Hour
	// MinLeafLife is the least that it may be. What lives under three minutes is renewed all the time: for tests.
	MinLeafLife = 10 * time.Second
	// MaxLeafLife is the most that it may be.
	MaxLeafLife = 30 * 24 * time.Hour
	// RenewableFor is how long after its end a certificate can still be renewed, and do nothing else (SPEC C13).
	RenewableFor = 7 * 24 * time.Hour

	exchangeTimeout = 20 * time.Second
)

// Config is what an Enroller needs. CA, Roster and Audit are required.
type Config struct {
	CA       *CA
	Roster   *roster.Roster
	Audit    *audit.Log
	LeafLife time.Duration // zero: DefaultLeafLife; from MinLeafLife to MaxLeafLife
	Log      *slog.Logger  // nil: slog.Default()
	Now      func() time.Time
	// Step is told of each step that changes something on either side, for tests that end the process there.
	Step func(name string)
}

// Enroller issues certificates: the first by ticket, the next ones by renewal. It is safe for concurrent use.
type Enroller struct {
	c Config
}

// NewEnroller makes one.
func NewEnroller(c Config) *Enroller {
	c.LeafLife = cmp.Or(c.LeafLife, DefaultLeafLife)
	c.Log = cmp.Or(c.Log, slog.Default())
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Step == nil {
		c.Step = func(string) {}
	}
	return &Enroller{c: c}
}

// Protocols are the ALPNs to dial a runner with, as its certificate stands at now; the one that the runner picks says what the
// connection is for. A runner whose certificate can't be used any more, or that was revoked, is an error that says what to do.
func Protocols(r roster.Runner, now time.Time) ([]string, error) {
	switch {
	case r.State == roster.Revoked:
		return nil, schemas.ErrRunnerRevoked(r.Name)
	case r.State == roster.Pending || r.Current == nil:
		return []string{link.ProtoEnrol}, nil
	case now.Before(r.Current.NotAfter):
		// A runner that never got its certificate picks the second.
		return []string{link.ProtoLink, link.ProtoEnrol}, nil
	}
	end := r.Current.NotAfter
	if r.Next != nil && r.Next.NotAfter.After(end) {
		end = r.Next.NotAfter
	}
	if now.After(end.Add(RenewableFor)) {
		return nil, ErrExpired(end)
	}
	return []string{link.ProtoEnrol}, nil
}

// ErrExpired says that a certificate is past renewal (SPEC C13).
func ErrExpired(end time.Time) *schemas.Error {
	return schemas.Errorf(schemas.CodeForbidden, "certificate expired: revoke and create again").
		WithHint(fmt.Sprintf("it ended at %s, and can be renewed for %d days after that", end.UTC().Format(time.RFC3339), RenewableFor/(24*time.Hour)))
}

// Exchange carries out what a connection of link.ProtoEnrol is for, as the runner's state in the registry says, and closes it: the
// enrolment by ticket, the delivery of a certificate whose reply was lost, or the renewal of one that has expired. conn was made
// with config (CA.ClientTLS). Nil: the runner has its certificate, and link.ProtoLink is next. An attempt by somebody who is not the
// owner of the ticket, or of the certificate, changes nothing. An error says why, and the runner was told.
func (e *Enroller) Exchange(ctx context.Context, conn *tls.Conn, config *tls.Config, r roster.Runner) error {
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, exchangeTimeout)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	err := e.exchange(ctx, conn, config, r)
	var refused *link.RefusedError
	if err != nil && !errors.As(err, &refused) {
		link.SayRefused(conn, err)
	}
	return explain(err)
}

// exchange picks the exchange. Only the proofs on the connection decide what is issued, never what r says.
func (e *Enroller) exchange(ctx context.Context, conn *tls.Conn, config *tls.Config, r roster.Runner) error {
	if err := conn.HandshakeContext(ctx); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	cs := conn.ConnectionState()
	if cs.Version != tls.VersionTLS13 || cs.NegotiatedProtocol != link.ProtoEnrol || len(cs.PeerCertificates) == 0 || len(config.Certificates) == 0 {
		return schemas.Errorf(schemas.CodeInvalid, "the connection is not one for an enrolment")
	}
	x := &exchange{Enroller: e, conn: conn, runner: r, peer: cs.PeerCertificates[0]}
	var err error
	if x.binding, err = link.Bind(cs, r.ID, config.Certificates[0].Certificate[0], x.peer.Raw); err != nil {
		return err
	}
	switch {
	case r.State == roster.Pending:
		return x.enrol(ctx)
	case r.State != roster.Active || r.Current == nil:
		return schemas.ErrRunnerRevoked(r.Name)
	case e.c.Now().Before(r.Current.NotAfter):
		return x.redeliver(ctx)
	}
	return x.renew(ctx)
}

// exchange is one connection.
type exchange struct {
	*Enroller
	conn    *tls.Conn
	runner  roster.Runner
	peer    *x509.Certificate // the runner's
	binding link.Binding
}

// enrol is the enrolment by ticket: hear the request and its proof, verify both, and only then consume the token.
func (x *exchange) enrol(ctx context.Context) error {
	key, token, _, err := x.c.Roster.Proof(ctx, x.runner.ID)
	if err != nil {
		return proofError(err)
	}
	request, err := x.request(runbusv1.EnrolMode_ENROL_MODE_TICKET)
	if err != nil {
		return err
	}
	if err := x.checkProof(ctx, key, request); err != nil {
		return err
	}
	x.c.Step("proof verified")
	return x.claim(ctx, key, token, request)
}

// claim signs, decides in the registry whether the certificate counts, and hands out the one that does.
func (x *exchange) claim(ctx context.Context, key [32]byte, token string, request *runbusv1.EnrolProof) error {
	chain, leaf, err := x.c.CA.SignLeaf(request.GetCsrDer(), x.runner.ID, x.c.LeafLife)
	if err != nil {
		return err
	}
	issued, again, err := x.c.Roster.Consume(ctx, roster.Claim{
		RunnerID: x.runner.ID, TokenID: token, KeySHA256: keySHA256(leaf.PublicKey), Leaf: leaf, CertificatePEM: chain,
	})
	if err != nil {
		return proofError(err)
	}
	x.c.Step("token consumed")
	return x.grant(&runbusv1.EnrolGrant{
		Mac:            x.binding.ControlPlaneMAC(key, issued, x.runner.Tenant),
		CertificatePem: issued, Again: again,
	})
}

// redeliver answers a runner that waits for the certificate that it was issued: the key of its request, proven by the handshake,
// must be the one that the token was used with.
func (x *exchange) redeliver(ctx context.Context) error {
	request, err := x.request(runbusv1.EnrolMode_ENROL_MODE_TICKET)
	if err != nil {
		return err
	}
	if key, token, _, err := x.c.Roster.Proof(ctx, x.runner.ID); err == nil && len(request.GetMac()) > 0 {
		if err := x.checkProof(ctx, key, request); err != nil {
			return err
		}
		return x.claim(ctx, key, token, request)
	}
	// The proof key went with the memory of a control plane, or the runner has lost its ticket: the certificate is public, and of use
	// to the holder of that key alone.
	tokens, err := x.c.Roster.Tokens(x.runner.Tenant)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(tokens, func(t roster.Token) bool {
		return t.RunnerID == x.runner.ID && t.UsedBy == keySHA256(x.peer.RawSubjectPublicKeyInfo) && len(t.Certificate) > 0
	})
	if i < 0 || certificateFingerprint(tokens[i].Certificate) != x.runner.Current.Fingerprint {
		return schemas.Errorf(schemas.CodeConflict, "the runner at this address has lost its certificate, or is another one: it has not the key that %q is enrolled with", x.runner.Name).
			WithHint("correct the address; if the runner's state folder was lost, revoke the runner and create it again")
	}
	return x.grant(&runbusv1.EnrolGrant{CertificatePem: tokens[i].Certificate, Again: true})
}

// renew gives a new certificate to the holder of one that has expired lately (SPEC C13).
func (x *exchange) renew(ctx context.Context) error {
	if err := x.checkExpired(); err != nil {
		return err
	}
	if next := x.runner.Next; next != nil && next.Fingerprint == fingerprintOf(x.peer.Raw) {
		promoted, err := x.c.Roster.Promote(ctx, x.runner.ID, next.Fingerprint) // this handshake has shown that it is installed
		if err != nil {
			return err
		}
		x.runner = promoted
	}
	request, err := x.request(runbusv1.EnrolMode_ENROL_MODE_RENEW)
	if err != nil {
		return err
	}
	chain, leaf, err := x.c.CA.SignLeaf(request.GetCsrDer(), x.runner.ID, x.c.LeafLife)
	if err != nil {
		return err
	}
	if err := x.c.Roster.SetNext(ctx, x.runner.ID, x.runner.Current.Fingerprint, leaf); err != nil {
		return err
	}
	x.c.Step("next recorded")
	return x.grant(&runbusv1.EnrolGrant{CertificatePem: chain})
}

// checkExpired checks a presented certificate in all but its time, and that within RenewableFor.
func (x *exchange) checkExpired() error {
	fingerprint := fingerprintOf(x.peer.Raw)
	pinned := x.runner.Current.Fingerprint == fingerprint || x.runner.Next != nil && x.runner.Next.Fingerprint == fingerprint
	_, err := x.peer.Verify(x509.VerifyOptions{
		Roots: x.c.CA.Pool(), CurrentTime: x.peer.NotAfter, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	if !pinned || err != nil {
		return schemas.Errorf(schemas.CodeForbidden, "the runner at this address has not the certificate of %q", x.runner.Name).
			WithHint("correct the address; if the runner's state folder was lost, revoke the runner and create it again")
	}
	if x.c.Now().After(x.peer.NotAfter.Add(RenewableFor)) {
		return ErrExpired(x.peer.NotAfter)
	}
	return nil
}

// request says hello and hears the runner's request, and checks what needs no secret: clocks, form, and that whoever asks by ticket
// holds the key of the request.
func (x *exchange) request(mode runbusv1.EnrolMode) (*runbusv1.EnrolProof, error) {
	err := link.Say(x.conn, &runbusv1.EnrolFrame{Said: &runbusv1.EnrolFrame_Hello{Hello: &runbusv1.EnrolHello{
		RunnerId: x.runner.ID, Mode: mode, ServerTime: timestamppb.New(x.c.Now()),
	}}})
	if err != nil {
		return nil, err
	}
	x.c.Step("hello sent")
	f, err := link.Hear(x.conn, "the runner")
	if err != nil {
		return nil, err
	}
	proof := f.GetProof()
	if proof.GetRunnerTime() == nil {
		return nil, errUnexpected("its request")
	}
	if err := link.CheckClocks(x.c.Now(), proof.GetRunnerTime().AsTime()); err != nil {
		return nil, err
	}
	key, err := requestKey(proof.GetCsrDer())
	if err != nil {
		return nil, err
	}
	if mode == runbusv1.EnrolMode_ENROL_MODE_TICKET {
		if public, ok := key.(interface{ Equal(crypto.PublicKey) bool }); !ok || !public.Equal(x.peer.PublicKey) {
			return nil, schemas.Errorf(schemas.CodeForbidden, "the request is for another key than the one of the runner's connection")
		}
	}
	x.c.Step("request heard")
	return proof, nil
}

// checkProof verifies that the runner holds the ticket's token. A wrong proof is recorded, and spends nothing.
func (x *exchange) checkProof(ctx context.Context, key [32]byte, request *runbusv1.EnrolProof) error {
	if hmac.Equal(request.GetMac(), x.binding.RunnerMAC(key, request.GetCsrDer())) {
		return nil
	}
	err := schemas.Errorf(schemas.CodeForbidden, "the runner at this address did not prove that it holds the ticket of %q; the token is still good", x.runner.Name).
		WithHint("start the runner with the last ticket that was issued for it; if it has that one, somebody may stand between it and the control plane")
	event := audit.Event(audit.ActorPlatform, "runner.enrol", "runner:"+x.runner.ID, string(schemas.CodeForbidden),
		"reason", "wrong proof", "peer", x.conn.RemoteAddr().String())
	event.Tenant = x.runner.Tenant
	if recordErr := x.c.Audit.Record(ctx, event); recordErr != nil {
		x.c.Log.Warn("a refused enrolment was not recorded", "runner", x.runner.ID, "error", recordErr)
	}
	return err
}

// grant hands a certificate over and waits until it is on the runner's disk.
func (x *exchange) grant(g *runbusv1.EnrolGrant) error {
	g.Tenant, g.ServerTime = x.runner.Tenant, timestamppb.New(x.c.Now())
	if err := link.Say(x.conn, &runbusv1.EnrolFrame{Said: &runbusv1.EnrolFrame_Grant{Grant: g}}); err != nil {
		return err
	}
	x.c.Step("grant sent")
	f, err := link.Hear(x.conn, "the runner")
	if err != nil {
		return err
	}
	if f.GetDone() == nil {
		return errUnexpected("that the certificate is installed")
	}
	x.c.Step("installed")
	x.c.Log.Info("a runner has its certificate", "runner", x.runner.ID, "tenant", x.runner.Tenant, "name", x.runner.Name,
		"certificate", certificateFingerprint(g.GetCertificatePem()), "again", g.GetAgain(), "peer", x.conn.RemoteAddr().String())
	return nil
}

// proofError is the safe face of what the registry says about a token.
func proofError(err error) error {
	switch {
	case errors.Is(err, roster.ErrNoProof):
		return schemas.Wrap(schemas.CodeForbidden, err, "the runner has no token that can be proven: it expired, was revoked, or its proof went with a restart of the control plane").
			WithHint("issue a new token: `runink runner token NAME`")
	case errors.Is(err, roster.ErrTokenUsed):
		return schemas.Wrap(schemas.CodeForbidden, err, "the token was used already, with another key").
			WithHint("if that was not you, somebody else has the ticket: revoke the runner and create it again")
	case errors.Is(err, roster.ErrTokenEnded):
		return schemas.Wrap(schemas.CodeForbidden, err, "the token was revoked or has expired").WithHint("issue a new token: `runink runner token NAME`")
	}
	return err
}

// explain turns the alerts of a runner's TLS into what they mean here.
func explain(err error) error {
	var remote *net.OpError
	if !errors.As(err, &remote) || remote.Op != "remote error" {
		return err
	}
	switch text := remote.Err.Error(); {
	case strings.HasSuffix(text, "bad certificate"):
		return schemas.Wrap(schemas.CodeForbidden, err, "the runner at this address does not take the control plane's certificate: its ticket, or its state folder, is of another runner CA").
			WithHint("the runner's log says why; start it with a ticket of this control plane, on a state folder of its own")
	case strings.HasSuffix(text, "no application protocol"):
		return schemas.Wrap(schemas.CodeConflict, err, "the runner at this address is not waiting for an enrolment").
			WithHint("start it with its ticket; its log says what it waits for")
	}
	return err
}

func errUnexpected(wanted string) error {
	return schemas.Errorf(schemas.CodeInvalid, "the runner said something else than %s: its version may not fit the control plane's", wanted)
}
