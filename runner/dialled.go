package runner

import (
	"context"
	"crypto"
	"crypto/tls"
	"errors"
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	buslink "github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/runner/intake"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// dialled is what a runner that its control plane dials has instead of an address and a key: a port, a state folder with a leaf, and
// the one link in use (SPEC C1).
type dialled struct {
	linked
	store     *identity.Store
	responder *identity.Responder
	renewals  *renewals
	listener  *intake.Intake

	enrolled chan struct{} // a certificate is there; of size 1
}

// openDialled takes the state folder and, for a runner that is not enrolled, begins with the ticket.
func openDialled(c *Config) (*dialled, error) {
	store, err := identity.OpenWith(c.StateDir, identity.Options{Log: c.Log, Step: c.Step})
	if err != nil {
		return nil, &ExitError{Code: ExitConfig, Err: err}
	}
	d := &dialled{store: store, renewals: newRenewals(store), enrolled: make(chan struct{}, 1)}
	d.open(c.Log)
	if err := d.begin(c); err != nil {
		_ = store.Close()
		return nil, err
	}
	return d, nil
}

func (d *dialled) begin(c *Config) error {
	if err := ticketMissed(c.TicketGone, d.store.State()); err != nil {
		return &ExitError{Code: ExitConfig, Err: err}
	}
	use, err := d.store.Admit(c.Ticket, time.Now())
	if err != nil {
		return exitFor(err)
	}
	if c.TicketGone != nil {
		c.Log.Warn("the ticket file is gone: this runner goes on without it, and needs "+identity.EnvTicketFile+" no more", "state", d.store.State().String())
	}
	d.responder = identity.NewResponder(identity.ResponderConfig{
		Store: d.store, Ticket: use, Log: c.Log, OnEnrolled: func() { signal(d.enrolled) },
	})
	return nil
}

// ticketMissed is gone, the reason why there is no ticket, if the runner can't start without one.
func ticketMissed(gone error, state identity.State) error {
	if state == identity.Empty {
		return gone
	}
	return nil
}

// exitFor chooses the status for what is wrong with a state folder or ticket: what was revoked or has expired can't be mended by
// another start.
func exitFor(err error) error {
	switch schemas.CodeOf(err) {
	case schemas.CodeRunnerRevoked, schemas.CodeForbidden:
		return &ExitError{Code: ExitRefused, Err: err}
	}
	return &ExitError{Code: ExitConfig, Err: err}
}

// listen takes the port. The connections poll as poll says.
func (d *dialled) listen(ctx context.Context, addr string, poll *polling) (err error) {
	d.listener, err = intake.Open(ctx, intake.Config{Listen: addr, TLS: d.tls, Enrol: d.responder.Serve, Link: d.offer, Conn: poll.conn, Log: d.log})
	switch {
	case errors.Is(err, syscall.EADDRINUSE), errors.Is(err, syscall.EACCES): // another start finds the same
		return &ExitError{Code: ExitConfig, Err: err}
	case err != nil:
		return err
	}
	d.log.Info("listening for the control plane", "addr", d.listener.Addr().String(), "runner", d.store.RunnerID(), "state", d.store.State().String())
	return nil
}

// listen takes the port of a runner that is dialled. The listener runs in group.
func (a *Agent) listen(ctx context.Context, group *errgroup.Group) error {
	if err := a.dialled.listen(ctx, a.cfg.Listen, a.polling()); err != nil {
		return err
	}
	group.Go(guard("listener", func() error {
		if err := a.dialled.listener.Serve(ctx); err != nil {
			return err
		}
		return ctx.Err()
	}))
	return nil
}

// who waits until the runner is enrolled and returns its reference.
func (d *dialled) who(ctx context.Context) (schemas.RunnerRef, error) {
	for d.store.State() != identity.Enrolled {
		select {
		case <-d.enrolled:
		case <-ctx.Done():
			return schemas.RunnerRef{}, ctx.Err()
		}
	}
	return schemas.RunnerRef{Tenant: d.store.Tenant(), Runner: d.store.RunnerID()}, nil
}

// tls is the configuration of a connection of this ALPN.
func (d *dialled) tls(proto string) (*tls.Config, error) {
	if proto == buslink.ProtoEnrol {
		return d.responder.TLS(), nil
	}
	leaf, roots := d.store.Leaf(), d.store.CA()
	switch {
	case d.store.State() != identity.Enrolled || leaf == nil || roots == nil:
		return nil, fmt.Errorf("this runner has no certificate for a link: its state is %s", d.store.State())
	case time.Now().After(leaf.Leaf.NotAfter):
		return nil, fmt.Errorf("the certificate of this runner expired at %s", leaf.Leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*leaf},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: roots, VerifyConnection: isControlPlane,
	}, nil
}

// isControlPlane accepts the one client that a runner has. Its chain and usage were verified.
func isControlPlane(s tls.ConnectionState) error {
	if len(s.PeerCertificates) == 0 {
		return errors.New("the client shows no certificate")
	}
	cert := s.PeerCertificates[0]
	if len(cert.URIs) != 1 || !schemas.IsControlPlaneURI(cert.URIs[0]) {
		return fmt.Errorf("the client's certificate is not %s", schemas.ControlPlaneURI())
	}
	return nil
}

// offer decides on one link.
func (d *dialled) offer(ctx context.Context, conn *tls.Conn, p *runbusv1.LinkPreface, leaf string) error {
	ref := schemas.RunnerRef{Tenant: d.store.Tenant(), Runner: d.store.RunnerID()}
	if p.GetRunnerId() != ref.Runner || p.GetTenant() != ref.Tenant {
		return schemas.Errorf(schemas.CodeInvalid, "another runner listens at this address: %s", ref.Runner)
	}
	err := d.slot.Offer(ctx, &intake.Link{Conn: conn, Leaf: leaf, Replica: p.GetReplica(), User: ref.String(), Password: p.GetToken()})
	if err == nil {
		d.log.Info("the control plane has dialled", "peer", conn.RemoteAddr().String(), "replica", p.GetReplica())
	}
	return err
}

// sign signs a hello with the leaf.
func (d *dialled) sign(ref schemas.RunnerRef, h *runbusv1.RunnerHello) error {
	leaf := d.store.Leaf()
	if leaf == nil {
		return errors.New("sign the hello: there is no certificate")
	}
	key, ok := leaf.PrivateKey.(crypto.Signer)
	if !ok {
		return errors.New("sign the hello: the key of the certificate can't sign")
	}
	sig, err := schemas.SignHello(key, schemas.HelloSigningInput(ref, h))
	if err != nil {
		return fmt.Errorf("sign the hello: %w", err)
	}
	h.PublicKey, h.Signature = schemas.LeafKey(identity.FingerprintOf(leaf.Leaf)), sig
	return nil
}

// close frees what is left when the agent has ended.
func (d *dialled) close() {
	d.slot.Close()
	if d.listener != nil {
		_ = d.listener.Close()
	}
	_ = d.store.Close()
}
