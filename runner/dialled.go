package runner

import (
	"context"
	"crypto"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	buslink "github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/runner/intake"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// dialledURL stands for the control plane in nats.go, which dials by a name; the dialer knows better.
const dialledURL = "nats://link.invalid:4222"

// lookAgain is how often the NATS client looks for a link beside being told of one: nats.go forgets a ForceReconnect that comes
// between two of its pauses.
const lookAgain = 250 * time.Millisecond

// dialled is what a runner that its control plane dials has instead of an address and a key: a port, a state folder with a leaf, and
// the one link in use (SPEC C1).
type dialled struct {
	store     *identity.Store
	responder *identity.Responder
	renewals  *renewals
	listener  *intake.Intake
	slot      intake.Slot
	log       *slog.Logger

	enrolled chan struct{} // a certificate is there; of size 1
	attached chan struct{} // closed when nc is set
	nc       atomic.Pointer[nats.Conn]
}

// openDialled takes the state folder and, for a runner that is not enrolled, begins with the ticket.
func openDialled(c *Config) (*dialled, error) {
	store, err := identity.OpenWith(c.StateDir, identity.Options{Log: c.Log})
	if err != nil {
		return nil, &ExitError{Code: ExitConfig, Err: err}
	}
	d := &dialled{store: store, renewals: newRenewals(store), log: c.Log, enrolled: make(chan struct{}, 1), attached: make(chan struct{})}
	d.slot.Answers, d.slot.Arrived = d.answers, d.arrived
	if err := d.begin(c); err != nil {
		_ = store.Close()
		return nil, err
	}
	return d, nil
}

func (d *dialled) begin(c *Config) error {
	use, err := d.store.Admit(c.Ticket, time.Now())
	if err != nil {
		return exitFor(err)
	}
	d.responder = identity.NewResponder(identity.ResponderConfig{
		Store: d.store, Ticket: use, Log: c.Log, OnEnrolled: func() { signal(d.enrolled) },
	})
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

// listen takes the port.
func (d *dialled) listen(ctx context.Context, addr string) (err error) {
	d.listener, err = intake.Open(ctx, intake.Config{Listen: addr, TLS: d.tls, Enrol: d.responder.Serve, Link: d.offer, Log: d.log})
	if err != nil {
		return err
	}
	d.log.Info("listening for the control plane", "addr", d.listener.Addr().String(), "runner", d.store.RunnerID(), "state", d.store.State().String())
	return nil
}

// listen takes the port of a runner that is dialled and waits until it is enrolled. The listener runs in group. It is errDrained when
// the runner is drained before.
func (a *Agent) listen(ctx context.Context, group *errgroup.Group) error {
	if err := a.dialled.listen(ctx, a.cfg.Listen); err != nil {
		return err
	}
	group.Go(guard("listener", func() error {
		if err := a.dialled.listener.Serve(ctx); err != nil {
			return err
		}
		return ctx.Err()
	}))
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-a.drainNow:
			stop()
		case <-waiting.Done():
		}
	})
	defer watch.Wait()
	defer stop()
	ref, err := a.dialled.who(waiting)
	switch {
	case err != nil && ctx.Err() == nil:
		return errDrained
	case err != nil:
		return err
	}
	a.ref = ref
	if a.cfg.Name == "" {
		a.cfg.Name = a.dialled.store.Name()
	}
	return nil
}

// dialer is how nats.go gets at a connection.
func (a *Agent) dialer(dialling context.Context) nats.CustomDialer {
	if a.dialled != nil {
		return &a.dialled.slot
	}
	return &dialer{dialling, a.tunnel, a.waits.connect}
}

// servers are the URLs for nats.go.
func (a *Agent) servers() string {
	if a.dialled != nil {
		return dialledURL
	}
	return strings.Join(a.cfg.Addrs, ",")
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

// attach gives the NATS connection to those who decide on links.
func (d *dialled) attach(nc *nats.Conn) {
	d.nc.Store(nc)
	close(d.attached)
	if d.slot.Waiting() {
		d.arrived()
	}
}

// arrived makes the NATS client take the link that waits. It leaves one that it has.
func (d *dialled) arrived() {
	nc := d.nc.Load()
	if nc == nil {
		return // its first dial is to come
	}
	if err := nc.ForceReconnect(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
		d.log.Warn("take the new link", "error", err)
	}
}

// answers reports whether the link in use answers before ctx ends; one that the NATS client is still taking gets the time to.
func (d *dialled) answers(ctx context.Context) bool {
	select {
	case <-d.attached:
	case <-ctx.Done():
		return false
	}
	nc := d.nc.Load()
	connected := nc.StatusChanged(nats.CONNECTED)
	defer nc.RemoveStatusListener(connected)
	for {
		if nc.IsConnected() && nc.FlushWithContext(ctx) == nil {
			return true
		}
		select {
		case <-connected:
		case <-ctx.Done():
			return false
		}
	}
}

// option shows the token of the link.
func (d *dialled) option() nats.Option { return nats.UserInfoHandler(d.slot.UserInfo) }

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
