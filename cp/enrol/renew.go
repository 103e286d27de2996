package enrol

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	// renewTimeout bounds one renewal from its first order on. A runner keeps its fresh key for one renewer for longer than that
	// (runner: renewalHold), so that two of them never install past each other.
	renewTimeout = 15 * time.Second
	// renewRetry is the pause after a renewal that failed; a twelfth of the leaf's life if that is shorter.
	renewRetry = time.Minute
)

// RenewerConfig is what a Renewer needs. All but Log are required.
type RenewerConfig struct {
	Enroller *Enroller
	// Linked reports whether this replica has the link to a runner, and makes no other one now: another replica renews the others.
	Linked func(runnerID string) bool
	// Order sends a control order to the runner's present session and waits for the answer.
	Order func(ctx context.Context, ref schemas.RunnerRef, order *runbusv1.RunnerControl) (*runbusv1.RunnerControlReply, error)
	// Redial opens a fresh link to the runner beside the present one. Its handshake presents the new certificate, which is promoted
	// then. It does not wait.
	Redial func(runnerID string)
	Log    *slog.Logger // nil: slog.Default()
}

// Renewer renews the certificates of linked runners over the bus, before a third of their life is left (SPEC C8).
type Renewer struct {
	c RenewerConfig

	mu      sync.Mutex
	again   map[string]time.Time // earliest next try, by runner id
	running map[string]bool      // runner ids
}

// NewRenewer makes one.
func NewRenewer(c RenewerConfig) *Renewer {
	if c.Log == nil {
		c.Log = slog.Default()
	}
	return &Renewer{c: c, again: map[string]time.Time{}, running: map[string]bool{}}
}

// Run renews what is due until ctx ends, and returns its error. A runner that does not answer holds nobody else back, and is not asked
// again meanwhile.
func (n *Renewer) Run(ctx context.Context) error {
	every := time.NewTicker(min(max(n.c.Enroller.c.LeafLife/20, time.Second), time.Minute))
	defer every.Stop()
	var running sync.WaitGroup
	defer running.Wait()
	for {
		for _, r := range n.due() {
			running.Go(func() {
				defer n.ended(r.ID)
				if err := n.Renew(ctx, r); err != nil && ctx.Err() == nil {
					n.c.Log.Warn("a runner's certificate was not renewed; trying again", "runner", r.ID, "tenant", r.Tenant, "until", r.Current.NotAfter, "error", err)
				}
			})
		}
		select {
		case <-every.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// due are the linked runners to renew now; each is given its next time already, and is running until ended.
func (n *Renewer) due() []roster.Runner {
	all, err := n.c.Enroller.c.Roster.All()
	if err != nil {
		n.c.Log.Warn("certificates can't be looked after", "error", err)
		return nil
	}
	now := n.c.Enroller.c.Now()
	n.mu.Lock()
	defer n.mu.Unlock()
	known := make(map[string]time.Time, len(n.again))
	var due []roster.Runner
	for _, r := range all {
		if at, ok := n.again[r.ID]; ok {
			known[r.ID] = at
		}
		if n.running[r.ID] || !Due(r, now) || now.Before(known[r.ID]) || !n.c.Linked(r.ID) {
			continue
		}
		// The link that there is now may have brought the next leaf into use since all was read.
		r, there, err := n.c.Enroller.c.Roster.ByID(r.ID)
		if err != nil || !there || !Due(r, now) {
			continue
		}
		known[r.ID] = now.Add(min(renewRetry, lifeOf(*r.Current)/12))
		n.running[r.ID] = true
		due = append(due, r)
	}
	n.again = known // who is gone is forgotten
	return due
}

func (n *Renewer) ended(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.running, id)
}

// Due reports whether the certificate of r is to be renewed at now: two fifths of its life are left, so that it is done before a
// third is. One whose successor is not promoted yet stays due.
func Due(r roster.Runner, now time.Time) bool {
	if r.State != roster.Active || r.Current == nil {
		return false
	}
	return r.Current.NotAfter.Sub(now) <= lifeOf(*r.Current)*2/5
}

// lifeOf is how long a leaf was to live when it was signed.
func lifeOf(l roster.Leaf) time.Duration { return max(l.NotAfter.Sub(l.NotBefore)-backDate, 0) }

// Renew renews one certificate: a request over a fresh key, recorded as the next, installed, and a fresh link, whose handshake
// promotes it. A cut at any step leaves the old certificate or the new one in use, and the next Renew goes on from there. It returns
// when the new one is installed.
func (n *Renewer) Renew(ctx context.Context, r roster.Runner) error {
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
	defer cancel()
	e := n.c.Enroller
	reply, err := n.order(ctx, r, &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Renew{Renew: &runbusv1.RenewOrder{}}})
	if err != nil {
		return fmt.Errorf("ask for a certificate request: %w", err)
	}
	e.c.Step("request received")
	if r.Next != nil && reply.GetLeafFingerprint() == r.Next.Fingerprint {
		n.c.Redial(r.ID) // installed already: only its promotion is missing
		return nil
	}
	if reply.GetLeafFingerprint() != r.Current.Fingerprint {
		return schemas.Errorf(schemas.CodeConflict, "the runner's certificate (%.16s…) is not the one in the registry (%.16s…)", reply.GetLeafFingerprint(), r.Current.Fingerprint)
	}
	chain, leaf, err := e.c.CA.SignLeaf(reply.GetCsrDer(), r.ID, e.c.LeafLife)
	if err != nil {
		return err
	}
	if err := e.c.Roster.SetNext(ctx, r.ID, r.Current.Fingerprint, leaf); err != nil {
		return fmt.Errorf("record the next certificate: %w", err)
	}
	e.c.Step("next recorded")
	reply, err = n.order(ctx, r, &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Install{
		Install: &runbusv1.InstallCertificateOrder{CertificatePem: chain},
	}})
	if err != nil {
		return fmt.Errorf("install the next certificate: %w", err)
	}
	if !reply.GetInstalled() || reply.GetLeafFingerprint() != leaf.Fingerprint {
		return errors.New("the runner did not install the next certificate")
	}
	e.c.Step("installed")
	n.c.Log.Info("a runner has its renewed certificate: the next link, which is made now, uses it", "runner", r.ID, "tenant", r.Tenant, "certificate", leaf.Fingerprint, "until", leaf.NotAfter)
	n.c.Redial(r.ID)
	return nil
}

// order sends an order; what the runner could not carry out is an error.
func (n *Renewer) order(ctx context.Context, r roster.Runner, order *runbusv1.RunnerControl) (*runbusv1.RunnerControlReply, error) {
	reply, err := n.c.Order(ctx, r.Ref(), order)
	if err != nil {
		return nil, err
	}
	return reply, schemas.FromDetail(reply.GetError())
}
