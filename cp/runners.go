package cp

import (
	"context"
	"net/netip"
	"path/filepath"

	"github.com/org-runink/runbus/cp/egress"
	"github.com/org-runink/runbus/cp/enrol"
	"github.com/org-runink/runbus/cp/roster"
)

// dirRunnerCA is where the runner CA is in the data folder, if CORE_RUNNER_CA_DIR names no other place.
const dirRunnerCA = "runner-ca"

// openCA opens the runner CA.
func (c *ControlPlane) openCA(context.Context, context.Context) (err error) {
	dir := c.cfg.RunnerCADir
	if dir == "" {
		dir = c.data.file(dirRunnerCA)
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	c.runnerCA, err = enrol.EnsureCA(dir, c.cfg.Log.With("part", "enrol"))
	return err
}

// openRunners opens the registry of dialled runners.
func (c *ControlPlane) openRunners(ctx, _ context.Context) error {
	if err := patiently(ctx, c.cfg.Log, "roster", func() (err error) {
		c.roster, err = roster.New(ctx, roster.Deps{
			Store: c.store, Audit: c.audit, Admins: c.cfg.RunnerAdmins, Dial: c.dialRules(), Step: c.cfg.Step, Log: c.cfg.Log.With("part", "roster"),
		})
		return err
	}); err != nil {
		return err
	}
	c.onClose(c.roster.Close)
	return nil
}

// dialRules are where this control plane dials runners.
func (c *ControlPlane) dialRules() egress.Rules {
	return egress.Rules{Allow: c.cfg.DialAllow, Deny: c.cfg.DialDeny, Shared: c.cfg.shared(), Own: c.listeners}
}

// listeners are the ports that this control plane has.
func (c *ControlPlane) listeners() (own []netip.AddrPort) {
	for _, text := range []string{c.listener.Addr().String(), c.server.Addr(), c.server.WebSocketAddr()} {
		if at, err := netip.ParseAddrPort(text); err == nil {
			own = append(own, at)
		}
	}
	return own
}
