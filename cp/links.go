package cp

import (
	"context"
	"net"
	"time"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/api"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/enrol"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// openLinks makes what enrols, links and renews dialled runners. It dials from dialRunners on.
func (c *ControlPlane) openLinks(ctx context.Context) error {
	presence, err := c.conn(ctx, embedded.UserSec)
	if err != nil {
		return err
	}
	log := c.cfg.Log.With("part", "enrol")
	c.tokens = enrol.NewLinkTokens(c.keys.Issuer())
	enroller := enrol.NewEnroller(enrol.Config{CA: c.runnerCA, Roster: c.roster, Audit: c.audit, LeafLife: c.cfg.LeafLife, Log: log, Step: c.cfg.Step})
	err = patiently(ctx, c.cfg.Log, "links", func() (err error) {
		c.dialler, err = enrol.NewDialler(ctx, enrol.DiallerDeps{
			Roster: c.roster, Store: c.store, CA: c.runnerCA, Tokens: c.tokens, Presence: presence,
			Replica: c.replica, ServerID: c.server.ID(), Server: c.takenLink, Exchange: enroller.Exchange, Order: c.order,
			Handover: c.registry.Handover, Rules: c.dialRules(), Log: log,
		})
		return err
	})
	if err != nil {
		return err
	}
	c.onClose(c.dialler.Close)
	c.renewer = enrol.NewRenewer(enrol.RenewerConfig{
		Enroller: enroller, Linked: c.dialler.Linked, Order: c.order, Redial: c.dialler.Redial, Log: log,
	})
	return nil
}

// takenLink is the server's end of a link that a runner has taken.
func (c *ControlPlane) takenLink() (net.Conn, error) {
	c.cfg.Step("link taken")
	return c.server.Dial()
}

// dialRunners starts dialling, when the callout lets in who is dialled.
func (c *ControlPlane) dialRunners(_, runCtx context.Context) error {
	c.task("dialler", func() error { return c.dialler.Run(runCtx) })
	c.task("renewal", func() error { return c.renewer.Run(runCtx) })
	return nil
}

// order sends an order to the session that a runner has now, and waits for the reply.
func (c *ControlPlane) order(ctx context.Context, ref schemas.RunnerRef, order *runbusv1.RunnerControl) (*runbusv1.RunnerControlReply, error) {
	session, ok := c.registry.Session(ref)
	if !ok {
		return nil, schemas.ErrRunnerOffline(ref.Runner, "not connected")
	}
	return c.dispatch.Order(ctx, ref, session, order)
}

// linkConfig lets dialled runners in.
func (c *ControlPlane) linkConfig() auth.LinkConfig {
	return auth.LinkConfig{
		Token: c.tokens.Take,
		Leaf: func(ref schemas.RunnerRef, fingerprint string) (time.Time, error) {
			if ref.Runner == schemas.ConsoleRunner {
				return c.managedLeaf(ref, fingerprint)
			}
			r, known, err := c.roster.ByID(ref.Runner)
			switch {
			case err != nil:
				return time.Time{}, schemas.Wrap(schemas.CodeUnavailable, err, "the registry of dialled runners can't be read")
			case !known || r.Tenant != ref.Tenant:
				return time.Time{}, schemas.ErrRunnerUnknown(ref.Runner)
			}
			leaf := r.Pinned(fingerprint)
			if leaf == nil {
				return time.Time{}, schemas.Errorf(schemas.CodeForbidden, "it is not the one on record")
			}
			return leaf.NotAfter, nil
		},
		InProcess: true, // the server is embedded
		OnEnded:   c.dialler.OnLeafEnded,
	}
}

// dialling is what the API asks of the part that dials runners.
func (c *ControlPlane) dialling() api.Dialling {
	return api.Dialling{
		CASHA256: c.runnerCA.SHA256,
		Connect:  c.dialler.Connect,
		Link:     func(id string) api.LinkState { return api.LinkState(c.dialler.Link(id)) },
		Order:    c.order,
	}
}
