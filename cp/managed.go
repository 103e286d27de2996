package cp

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/managed"
	"github.com/org-runink/runbus/schemas"
)

// The values of Config.ManagedEndpoint beside an address.
const (
	ManagedLocal = "local" // the managed runner is a child of the control plane
	ManagedNone  = "none"  // there is none
)

// dirManaged is where the managed runners keep their state in the data folder.
const dirManaged = "managed"

// ManagedConfig is the managed runner as child processes of this control plane (SPEC M1, `local`).
type ManagedConfig struct {
	// Command starts a runner, Env is set for it (managed.Config).
	Command []string
	Env     map[string]string
	// Policy is MANAGED_RUNNER_POLICY: the local policy of every tenant's. Empty: that of LocalTenant reaches what this host reaches, the
	// others no address of this host or a private network.
	Policy string
	// FileRoots is MANAGED_RUNNER_FILE_ROOTS: what that of LocalTenant may read; the others read no files.
	FileRoots []string
	// Concurrency is MANAGED_RUNNER_CONCURRENCY: works at once of each. Zero means the runner's default, 4.
	Concurrency int
	// Most is MANAGED_RUNNER_MAX: tenants whose runner is up at once. Zero means 16.
	Most int
	// Stderr is where they log. Nil: this process's standard error.
	Stderr io.Writer
}

// managedFromEnv reads the MANAGED_RUNNER_… variables but the endpoint.
func managedFromEnv(getenv func(string) string) (c ManagedConfig, err error) {
	c.Policy = getenv("MANAGED_RUNNER_POLICY")
	if program := getenv("MANAGED_RUNNER_BINARY"); program != "" {
		c.Command = []string{program, "serve"}
	}
	if roots := getenv("MANAGED_RUNNER_FILE_ROOTS"); roots != "" {
		c.FileRoots = slices.DeleteFunc(filepath.SplitList(roots), func(dir string) bool { return dir == "" })
	}
	for name, field := range map[string]*int{"MANAGED_RUNNER_CONCURRENCY": &c.Concurrency, "MANAGED_RUNNER_MAX": &c.Most} {
		if v := getenv(name); v != "" {
			if *field, err = strconv.Atoi(v); err != nil || *field < 1 || *field > 10_000 {
				return ManagedConfig{}, schemas.Errorf(schemas.CodeInvalid, "%s is %q: use a number from 1 to 10000", name, v)
			}
		}
	}
	return c, nil
}

// validEndpoint says what is wrong with a Config.ManagedEndpoint.
func validEndpoint(endpoint string) error {
	if endpoint == ManagedLocal || endpoint == ManagedNone {
		return nil
	}
	host, port, err := net.SplitHostPort(endpoint)
	if n, portErr := strconv.ParseUint(port, 10, 16); err != nil || host == "" || portErr != nil || n == 0 {
		return schemas.Errorf(schemas.CodeInvalid, "MANAGED_RUNNER_ENDPOINT is %q: use local, none, or an address as host:port", endpoint)
	}
	return nil
}

// openManaged checks that managed runners can be started. They are from startManaged on.
func (c *ControlPlane) openManaged(context.Context, context.Context) (err error) {
	if c.cfg.ManagedEndpoint != ManagedLocal {
		if c.cfg.Managed.Policy != "" {
			c.cfg.Log.Warn("MANAGED_RUNNER_POLICY is set and holds for nothing: there is no managed runner on this host (MANAGED_RUNNER_ENDPOINT)",
				"endpoint", c.cfg.ManagedEndpoint)
		}
		return nil
	}
	m := c.cfg.Managed
	if len(m.Command) == 0 {
		return schemas.Errorf(schemas.CodeInvalid, "no program is known that could be the managed runner").
			WithHint("name a core-runner with MANAGED_RUNNER_BINARY, or say MANAGED_RUNNER_ENDPOINT=none")
	}
	c.managed, err = managed.New(managed.Config{
		Command: m.Command, Env: m.Env, StateDir: c.data.file(dirManaged), Own: LocalTenant, FileRoots: m.FileRoots, Policy: m.Policy,
		Concurrency: m.Concurrency, Most: m.Most, DrainGrace: c.cfg.StopGrace, Stderr: m.Stderr, Replica: c.replica,
		ServerID: func() string { return c.server.ID() },
		Server:   func() (net.Conn, error) { return c.server.Dial() },
		Sign: func(who auth.LinkIdentity, serverID string, now time.Time) (string, error) {
			return c.tokens.Sign(who, serverID, now)
		},
		Fit:     c.managedFit,
		Changed: func() <-chan struct{} { return c.registry.Changed() },
		Ended:   func(ctx context.Context, tenant string) { c.registry.ManagedEnded(ctx, tenant) },
		Log:     c.cfg.Log.With("part", "managed"),
	})
	return err
}

// startManaged starts the managed runner of LocalTenant, and lets fetches start those of others.
func (c *ControlPlane) startManaged(_, runCtx context.Context) error {
	if c.managed != nil {
		c.task("managed runner", func() error { return c.managed.Run(runCtx) })
	}
	return nil
}

// managedFit reports whether the managed runner of a tenant can be given work.
func (c *ControlPlane) managedFit(tenant string) bool {
	list, err := c.registry.Named(tenant, schemas.ConsoleRunner)
	return err == nil && len(list) == 1 && list[0].Offline == "" && list[0].Connected && list[0].Session != ""
}

// managedKey is the key of the process that is a tenant's managed runner now.
func (c *ControlPlane) managedKey(tenant string) (publicKey []byte, ok bool) {
	if c.managed == nil {
		return nil, false
	}
	return c.managed.Key(tenant)
}

// managedWaits reports whether a tenant's managed runner is one that its next fetch starts.
func (c *ControlPlane) managedWaits(tenant string) bool {
	return c.managed != nil && tenant != LocalTenant && !c.managed.Started(tenant)
}

// useManaged is dispatch.Deps.Managed.
func (c *ControlPlane) useManaged() func(ctx context.Context, tenant string) (release func(), err error) {
	if c.managed != nil {
		return c.managed.Use
	}
	why := errors.New("no address of a managed runner is dialled yet: MANAGED_RUNNER_ENDPOINT=local has one on the control plane's own host")
	if c.cfg.ManagedEndpoint == ManagedNone {
		why = errors.New("there is none (MANAGED_RUNNER_ENDPOINT=none)")
	}
	return func(context.Context, string) (func(), error) { return nil, why }
}

// managedLeaf is auth.LinkConfig.Leaf for `console`.
func (c *ControlPlane) managedLeaf(ref schemas.RunnerRef, fingerprint string) (time.Time, error) {
	if c.managed != nil {
		if notAfter, ok := c.managed.Leaf(ref.Tenant, fingerprint); ok {
			return notAfter, nil
		}
	}
	return time.Time{}, schemas.Errorf(schemas.CodeForbidden, "it is not that of a managed runner of this host")
}
