// Package managed runs the managed runner, `console`, on the control plane's own host (SPEC M1, `local`): child processes of the control
// plane, one for each tenant that uses it. A child gets its links over a socket that only the two have, proves itself by a key that it
// made, and inherits nothing else: no variable, no file, no port.
package managed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/schemas"
)

// Defaults of a Config.
const (
	DefaultMost        = 16
	defaultUpWithin    = 15 * time.Second
	defaultDrainGrace  = 30 * time.Second
	defaultStopWithin  = 10 * time.Second
	defaultFirstRetry  = time.Second
	defaultSlowest     = 30 * time.Second
	greetingWithin     = 30 * time.Second
	answerWithin       = 5 * time.Second
	relinkAfter        = 100 * time.Millisecond
	deaf               = 3                // links in a row that a process did not take: it is stuck
	steady             = 10 * time.Second // a process that lasted as long has not failed to start
	linkLife           = 24 * time.Hour   // as long as the certificate of a dialled runner: then it is let in anew
	lifelineDescriptor = 3                // the first of exec.Cmd.ExtraFiles
)

// Config is what Runners needs. All fields but those with a default are required.
type Config struct {
	// Command starts a runner: a program and its arguments, `core-runner serve` or what does the same. Env is set beside what every child
	// gets.
	Command []string
	Env     map[string]string
	// StateDir has a folder for each tenant: journal and counts of its runner. Made when missing, mode 0700.
	StateDir string
	// Own is the tenant of whoever operates this host. Its runner is started at once and never gives way; it may reach what the host
	// reaches, and read FileRoots. Those of other tenants are started by their first fetch, read no files, and reach no address of this
	// host or of a private network, unless Policy says what they may.
	Own       string
	FileRoots []string
	// Policy is the file of the local policy (docs/policy.md) of all children. Empty: the default above.
	Policy string
	// Concurrency is how many works each runs at once; zero means the runner's own default.
	Concurrency int
	// Most is how many children there are at most. Zero means DefaultMost.
	Most int
	// Replica names this replica, ServerID the NATS server that links are spliced into, which Server connects to.
	Replica  string
	ServerID func() string
	Server   func() (net.Conn, error)
	// Sign makes the token that lets a link in.
	Sign func(who auth.LinkIdentity, serverID string, now time.Time) (string, error)
	// Fit says whether the runner of a tenant can be given work now, and Changed is closed when the answer may be another one.
	Fit     func(tenant string) bool
	Changed func() <-chan struct{}
	// Ended is told of each process that has ended, before there is another one for the tenant.
	Ended func(ctx context.Context, tenant string)
	// UpWithin is how long a fetch waits for a runner that is not up. Zero means 15s.
	UpWithin time.Duration
	// StopWithin is how long a child that Run stops may take before it is killed. Zero means 10s. DrainGrace is how long its works may go
	// on when somebody else stops it, such as a service manager that stops all processes of a service. Zero means 30s.
	StopWithin, DrainGrace time.Duration
	// FirstRetry and SlowestRetry bound the pause before a child that died is started again. Zero means 1s and 30s.
	FirstRetry, SlowestRetry time.Duration
	// Stderr is where the children log. Nil: this process's standard error.
	Stderr io.Writer
	Log    *slog.Logger // nil: slog.Default()
}

// Runners are the children of one control plane. Safe for concurrent use.
type Runners struct {
	c     Config
	began chan struct{} // closed by Run
	done  chan struct{} // closed when Run stops

	mu       sync.Mutex
	life     context.Context //nolint:containedctx // that of Run, which Use starts children in
	ended    bool
	children map[string]*child // by tenant
	running  sync.WaitGroup    // of their tasks
}

// New checks what can be checked before anything is started. An error of CodeInvalid says what is missing.
func New(c Config) (*Runners, error) {
	if len(c.Command) == 0 {
		return nil, errors.New("managed: no command")
	}
	program, err := exec.LookPath(c.Command[0])
	if err == nil {
		program, err = filepath.Abs(program)
	}
	if err != nil {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the managed runner can't be started: %w", err).
			WithHint("install core-runner beside the control plane, name it with MANAGED_RUNNER_BINARY, or say MANAGED_RUNNER_ENDPOINT=none")
	}
	c.Command = append([]string{program}, c.Command[1:]...)
	if c.StateDir, err = filepath.Abs(c.StateDir); err != nil {
		return nil, err
	}
	if c.Policy != "" {
		if c.Policy, err = filepath.Abs(c.Policy); err == nil {
			_, err = os.Stat(c.Policy)
		}
		if err != nil {
			return nil, schemas.Errorf(schemas.CodeInvalid, "MANAGED_RUNNER_POLICY: %w", err)
		}
	}
	for _, dir := range c.FileRoots {
		if err := readable(dir); err != nil {
			return nil, schemas.Errorf(schemas.CodeInvalid, "MANAGED_RUNNER_FILE_ROOTS: %w", err).
				WithHint("list folders that this process can read, each from / on")
		}
	}
	for field, fallback := range map[*time.Duration]time.Duration{
		&c.UpWithin: defaultUpWithin, &c.StopWithin: defaultStopWithin, &c.DrainGrace: defaultDrainGrace, &c.FirstRetry: defaultFirstRetry, &c.SlowestRetry: defaultSlowest,
	} {
		if *field == 0 {
			*field = fallback
		}
	}
	if c.Most == 0 {
		c.Most = DefaultMost
	}
	if c.Stderr == nil {
		c.Stderr = os.Stderr
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	keepFiles()
	return &Runners{c: c, began: make(chan struct{}), done: make(chan struct{}), children: make(map[string]*child)}, nil
}

// readable says why the runner could not read below dir.
func readable(dir string) error {
	if !filepath.IsAbs(dir) {
		return fmt.Errorf("%q is not an absolute path", dir)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	return root.Close()
}

// Run starts the runner of Own and lets others be started, until ctx ends; then it stops them all and returns nil when none is left.
func (r *Runners) Run(ctx context.Context) error {
	life, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	r.mu.Lock()
	r.life = life
	if r.c.Own != "" {
		r.start(r.c.Own)
	}
	close(r.began)
	r.mu.Unlock()
	<-ctx.Done()
	r.mu.Lock()
	r.ended = true
	close(r.done)
	r.mu.Unlock()
	stop()
	r.running.Wait()
	return nil
}

// Use makes sure that the runner of tenant is up, starting it if need be, and keeps it from giving way to another tenant's until
// release is called. The error says why it is not up in UpWithin; it is for whoever wanted the fetch.
func (r *Runners) Use(ctx context.Context, tenant string) (release func(), err error) {
	limit := time.NewTimer(r.c.UpWithin)
	defer limit.Stop()
	var c *child
	for c == nil {
		var gone <-chan struct{}
		if c, gone, err = r.take(tenant); err != nil {
			return nil, err
		}
		if c != nil {
			break
		}
		select {
		case <-gone:
		case <-limit.C:
			return nil, errors.New("another tenant's managed runner that gives way to it has not stopped yet")
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	release = sync.OnceFunc(func() { r.release(c) })
	for {
		changed := r.c.Changed()
		if r.c.Fit(tenant) {
			return release, nil
		}
		select {
		case <-changed:
			continue
		case <-c.failed():
			err = errors.New("the managed runner does not come up" + c.because())
		case <-limit.C:
			err = fmt.Errorf("the managed runner is not up within %s%s", r.c.UpWithin, c.because())
		case <-ctx.Done():
			err = context.Cause(ctx)
		case <-r.done:
			err = errStops
		}
		release()
		return nil, err
	}
}

var errStops = errors.New("the control plane stops")

// take counts one more user of the tenant's child, which it starts if there is none. Without a child there is a channel: when it is
// closed, there may be room.
func (r *Runners) take(tenant string) (c *child, gone <-chan struct{}, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch c = r.children[tenant]; {
	case r.life == nil || r.ended:
		return nil, nil, errStops
	case c != nil && c.leaving:
		return nil, c.ended, nil
	case c != nil:
	case len(r.children) < r.c.Most:
		c = r.start(tenant)
	default:
		idle := r.idlest()
		if idle == nil {
			return nil, nil, fmt.Errorf("%d tenants use a managed runner, and there is room for no more on this host", r.c.Most)
		}
		if !idle.leaving {
			idle.leaving = true
			r.c.Log.Info("a managed runner gives way to another tenant's", "tenant", idle.tenant, "to", tenant)
			idle.stop()
		}
		return nil, idle.ended, nil
	}
	c.users++
	return c, nil, nil
}

// idlest is the child that may give way: one that leaves already, else the one that was used last the longest ago. r.mu must be held.
func (r *Runners) idlest() *child {
	var found *child
	for _, c := range r.children {
		switch {
		case c.leaving:
			return c
		case c.users > 0 || c.tenant == r.c.Own:
		case found == nil || c.usedAt.Before(found.usedAt):
			found = c
		}
	}
	return found
}

func (r *Runners) release(c *child) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c.users--
	c.usedAt = time.Now()
}

// start begins to keep a child of tenant running. r.mu must be held.
func (r *Runners) start(tenant string) *child {
	ctx, stop := context.WithCancel(r.life)
	c := &child{
		r: r, tenant: tenant, stop: stop, ended: make(chan struct{}), usedAt: time.Now(), trouble: make(chan struct{}),
		ref: schemas.RunnerRef{Tenant: tenant, Runner: schemas.ConsoleRunner}, log: r.c.Log.With("tenant", tenant),
	}
	r.children[tenant] = c
	r.running.Go(func() {
		c.keep(ctx)
		stop()
		r.mu.Lock()
		delete(r.children, tenant)
		r.mu.Unlock()
		close(c.ended)
	})
	return c
}

// Key is the public key (SubjectPublicKeyInfo) of the process that is the tenant's managed runner now.
func (r *Runners) Key(tenant string) (publicKey []byte, ok bool) {
	c := r.child(tenant)
	if c == nil {
		return nil, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.public, c.public != nil
}

// Leaf is when the link of a process with a key of this fingerprint ends at the latest; false when there is no such process now.
func (r *Runners) Leaf(tenant, fingerprint string) (notAfter time.Time, ok bool) {
	public, ok := r.Key(tenant)
	if !ok || fingerprintOf(public) != fingerprint {
		return time.Time{}, false
	}
	return time.Now().Add(linkLife), true
}

// Started reports whether the tenant has a process, or one is about to be started again.
func (r *Runners) Started(tenant string) bool { return r.child(tenant) != nil }

func (r *Runners) child(tenant string) *child {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.children[tenant]
}
