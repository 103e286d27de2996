// Package cp is the control plane: it constructs the parts below it, runs them, and stops them in order. It never runs a
// fetch itself (SPEC D1, D10).
package cp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/api"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/cp/enrol"
	"github.com/org-runink/runbus/cp/managed"
	"github.com/org-runink/runbus/cp/ops"
	"github.com/org-runink/runbus/cp/registry"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/cp/trace"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
)

// ControlPlane is one running replica. Start makes it; Wait and Stop end it.
type ControlPlane struct {
	cfg     Config
	data    *dataDir
	keys    *embedded.Keys
	server  *embedded.Server
	replica string
	caFile  string

	store    *jetstream.Store
	audit    *audit.Log
	auth     *auth.Auth
	runnerCA *enrol.CA
	roster   *roster.Roster
	registry *registry.Registry
	recorder *trace.Recorder
	dispatch *dispatch.Dispatcher
	tokens   *enrol.LinkTokens
	dialler  *enrol.Dialler
	renewer  *enrol.Renewer
	copies   *ops.Copies
	managed  *managed.Runners // nil unless it is local
	service  *ops.Service
	http     *http.Server
	listener net.Listener

	mu      sync.Mutex
	conns   []*nats.Conn // guarded by mu: /readyz asks while the start goes on
	closers []func()     // in the order of construction; run backwards
	cancel  context.CancelFunc
	tasks   *errgroup.Group
	ready   chan struct{} // the callout answers: runners get in
}

// Endpoints is where a control plane can be reached and where its credentials are.
type Endpoints struct {
	HTTP       string `json:"http"`                // URL of the API
	NATS       string `json:"nats"`                // URL for runners and the nats CLI
	WebSocket  string `json:"webSocket,omitempty"` // URL for runners behind a firewall
	CA         string `json:"ca,omitempty"`        // PEM file; empty when the certificate is the operator's own
	AdminToken string `json:"adminTokenFile"`      // token of the local tenant's admin
	OpsSeed    string `json:"opsSeedFile"`
	OpsSysSeed string `json:"opsSysSeedFile"`
	DataDir    string `json:"dataDir"`
	PID        int    `json:"pid"`
}

// Start brings a control plane up: when it returns, runners can enrol and fetches can be made. An error leaves nothing running.
// ctx bounds the start only.
func Start(ctx context.Context, cfg Config) (_ *ControlPlane, err error) {
	if err := cfg.prepare(); err != nil {
		return nil, err
	}
	c := &ControlPlane{cfg: cfg, replica: schemas.NewID(), ready: make(chan struct{})}
	runCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c.cancel = cancel
	c.tasks, runCtx = errgroup.WithContext(runCtx)
	defer func() {
		if err != nil {
			c.tearDown()
		}
	}()
	cfg.Log.Info(schemas.RoleControlPlaneText(cfg.ManagedEndpoint))
	for _, step := range []struct {
		name string
		run  func(ctx, runCtx context.Context) error
	}{
		{"data folder", c.openData},
		{"runner CA", c.openCA}, // before anything listens
		{"managed runner", c.openManaged},
		{"HTTP listener", c.listen},
		{"bus", c.startBus},
		{"state", c.openState},
		{"identities", c.openIdentities},
		{"dialled runners", c.openRunners},
		{"dispatch", c.openDispatch},
		{"API", c.serveAPI},
		{"callout", c.serveCallout}, // last: from here on runners get in (DESIGN, "Auth callout")
		{"links", c.dialRunners},
		{"managed runner", c.startManaged},
	} {
		if err := step.run(ctx, runCtx); err != nil {
			var known *schemas.Error
			if errors.As(err, &known) {
				return nil, err
			}
			return nil, fmt.Errorf("start %s: %w", step.name, err)
		}
	}
	e := c.Endpoints()
	cfg.Log.Info("control plane is ready", "http", e.HTTP, "nats", e.NATS, "webSocket", e.WebSocket, "replica", c.replica)
	return c, nil
}

func (c *ControlPlane) openData(context.Context, context.Context) (err error) {
	if c.data, err = openDataDir(c.cfg.DataDir); err != nil {
		return err
	}
	c.onClose(c.data.close)
	return nil
}

// listen takes the API's port before anything is started, so that a taken one costs nothing.
func (c *ControlPlane) listen(ctx context.Context, _ context.Context) (err error) {
	if c.listener, err = new(net.ListenConfig).Listen(ctx, "tcp", c.cfg.HTTP); err != nil {
		return schemas.Errorf(schemas.CodeConflict, "the HTTP address %s can't be used: %w", c.cfg.HTTP, listenReason(err)).
			WithHint("choose another one with RUNBUS_HTTP (`runink up`: --http), or stop what listens there")
	}
	c.onClose(func() { _ = c.listener.Close() })
	return nil
}

func listenReason(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Err
	}
	return err
}

func (c *ControlPlane) startBus(context.Context, context.Context) (err error) {
	if c.keys, err = embedded.LoadKeys(c.data.file(fileKeys)); err != nil {
		return err
	}
	for file, seed := range map[string][]byte{fileOpsSeed: c.keys.OpsSeed(), fileOpsSysSeed: c.keys.OpsSysSeed()} {
		if err := writeFile(c.data.file(file), append(seed, '\n')); err != nil {
			return err
		}
	}
	if c.cfg.CertFile == "" {
		c.cfg.CertFile, c.cfg.KeyFile, c.caFile, err = embedded.EnsureCertificate(c.data.file(dirTLS), c.cfg.Hosts)
		if err != nil {
			return fmt.Errorf("certificate: %w", err)
		}
	}
	c.server, err = embedded.Start(embedded.Config{
		Name: "runbus-" + c.replica[:8], StoreDir: c.data.file(dirStore), Listen: c.cfg.NATS, WebSocket: c.cfg.WebSocket,
		CertFile: c.cfg.CertFile, KeyFile: c.cfg.KeyFile, Plaintext: c.cfg.PlaintextNATS, Keys: c.keys, Log: c.cfg.Log,
	})
	if err != nil {
		return err
	}
	c.server.HoldWhile(func() bool { // runners that would be refused until the callout answers
		select {
		case <-c.ready:
			return c.auth.CalloutBusy() || c.registry.Busy()
		default:
			return true
		}
	})
	c.onClose(c.server.Shutdown)
	c.onClose(func() {
		for _, nc := range c.connections() {
			nc.Close()
		}
	})
	return nil
}

func (c *ControlPlane) openState(ctx, runCtx context.Context) error {
	format, fresh, err := c.data.format()
	if err != nil {
		return err
	}
	sec, err := c.conn(ctx, embedded.UserSec)
	if err != nil {
		return err
	}
	if c.store, err = jetstream.Open(ctx, sec, jetstream.Options{Fresh: fresh, Format: format, Log: c.cfg.Log.With("part", "jetstream")}); err != nil {
		return err
	}
	c.onClose(c.store.Close)
	mirror, err := c.conn(ctx, embedded.UserMirror)
	if err != nil {
		return err
	}
	if err := patiently(ctx, c.cfg.Log, "mirrors", func() error { return c.store.OpenMirrors(ctx, mirror) }); err != nil {
		return err
	}
	if fresh || format < jetstream.Format {
		if err := c.data.initialised(); err != nil {
			return err
		}
	}
	if err := patiently(ctx, c.cfg.Log, "audit", func() (err error) {
		c.audit, err = audit.New(ctx, c.store, c.replica, c.cfg.Log.With("part", "audit"))
		return err
	}); err != nil {
		return err
	}
	c.task("audit", func() error { return c.audit.Run(runCtx) })
	c.task("memory", func() error { return keepMemory(runCtx) })
	return nil
}

func (c *ControlPlane) openIdentities(ctx, _ context.Context) error {
	if err := patiently(ctx, c.cfg.Log, "identities", func() (err error) {
		c.auth, err = auth.New(ctx, auth.Deps{Store: c.store, Audit: c.audit, Log: c.cfg.Log.With("part", "auth")})
		return err
	}); err != nil {
		return err
	}
	c.onClose(c.auth.Close)
	return patiently(ctx, c.cfg.Log, "first identities", func() error { // what is there already is left as it is
		if err := c.auth.EnsureOperator(ctx, c.data.file(fileOperator)); err != nil {
			return err
		}
		return c.auth.EnsureTenantAdmin(ctx, LocalTenant, LocalAdmin, c.data.file(fileLocalAdmin))
	})
}

func (c *ControlPlane) openDispatch(ctx, runCtx context.Context) error {
	metrics := newMetrics(c.cfg.Version)
	serve, err := c.conn(ctx, embedded.UserServe)
	if err != nil {
		return err
	}
	sys, err := c.conn(ctx, embedded.UserSys)
	if err != nil {
		return err
	}
	results, err := c.conn(ctx, embedded.UserDispatch)
	if err != nil {
		return err
	}
	micro, err := c.conn(ctx, embedded.UserMicro)
	if err != nil {
		return err
	}
	c.copies = ops.NewCopies(micro, c.cfg.Log.With("part", "ops"))
	c.onClose(c.copies.Close)
	watchParts(metrics, c.audit, c.copies)
	err = patiently(ctx, c.cfg.Log, "registry", func() (err error) {
		c.registry, err = registry.New(ctx, registry.Deps{
			Store: c.store, Serve: bus.NewConn(serve), Sys: sys, Auth: c.auth, Roster: c.roster, Audit: c.audit, Grace: c.cfg.Grace, Replica: c.replica,
			Managed: c.managedKey, ManagedWaits: c.managedWaits,
			Copies: c.copyForOps, Metrics: metrics, Log: c.cfg.Log.With("part", "registry"),
		})
		return err
	})
	if err != nil {
		return err
	}
	c.onClose(c.registry.Close)
	c.task("registry", func() error { return c.registry.Run(runCtx) })
	c.recorder, err = trace.New(trace.Deps{
		Store: c.store, Replica: c.replica, Longest: c.cfg.DispatchTimeout, Metrics: metrics, Log: c.cfg.Log.With("part", "trace"),
	})
	if err != nil {
		return err
	}
	c.onClose(c.recorder.Close)
	c.task("trace", func() error { return c.recorder.Run(runCtx) })
	c.dispatch, err = dispatch.New(dispatch.Deps{
		Bus: bus.NewConn(results), Registry: c.registry, Audit: c.audit, Timeout: c.cfg.DispatchTimeout, Isolation: c.cfg.Isolation,
		Recorder: c.recorder, Tracing: c.cfg.Tracing, Managed: c.useManaged(),
		Copies: c.copyForOps, Watchers: c.server.Watchers, Watched: c.server.Watched, Metrics: metrics,
		Log: c.cfg.Log.With("part", "dispatch"),
	})
	if err != nil {
		return err
	}
	c.onClose(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = c.dispatch.Close(ctx) // Stop has waited already
	})
	if err := c.openLinks(ctx); err != nil {
		return err
	}
	c.service, err = ops.Serve(ops.ServiceConfig{
		Conn: micro, Replica: c.replica, Version: c.cfg.Version,
		RunnersConnected: c.registry.Connected, DispatchesRunning: c.dispatch.InFlight, Log: c.cfg.Log.With("part", "ops"),
	})
	if err != nil {
		return err
	}
	c.onClose(func() { _ = c.service.Stop() })
	c.http = api.ServerOf(api.New(api.Deps{
		Auth: c.auth, Registry: c.registry, Roster: c.roster, Runners: c.dialling(), Dispatch: c.dispatch, Audit: c.audit, Recorder: c.recorder, Tracing: c.cfg.Tracing, Metrics: metrics, Checks: c.checks(), Alive: c.storageAlive,
		Version: c.cfg.Version, Log: c.cfg.Log.With("part", "api"),
	}), c.cfg.Log)
	return nil
}

// copyForOps repeats a work or control message in account OPS if somebody there watches: to copy one costs as much as to send it.
func (c *ControlPlane) copyForOps(subject string, m proto.Message) {
	if c.server.Watched(subject) {
		c.copies.Publish(subject, m)
	}
}

// checks are the conditions of /readyz.
func (c *ControlPlane) checks() []api.Check {
	return []api.Check{
		{Name: "bus", Ask: func() error {
			for _, nc := range c.connections() {
				if !nc.IsConnected() {
					return schemas.Errorf(schemas.CodeUnavailable, "a connection to the bus is down")
				}
			}
			return nil
		}},
		{Name: "registry", Ask: c.registry.Readable},
		{Name: "audit", Ask: c.auditWritable},
		{Name: "identities", Ask: func() error {
			if !c.auth.Fresh() {
				return schemas.Errorf(schemas.CodeUnavailable, "the view of the identities is not confirmed: no new runner is let in")
			}
			return nil
		}},
		{Name: "callout", Ask: func() error {
			select {
			case <-c.ready:
				return nil
			default:
				return schemas.Errorf(schemas.CodeUnavailable, "runners are not let in yet")
			}
		}},
	}
}

func (c *ControlPlane) serveAPI(_, runCtx context.Context) error {
	l := c.listener
	if c.cfg.HTTPTLS {
		cert, err := tls.LoadX509KeyPair(c.cfg.CertFile, c.cfg.KeyFile)
		if err != nil {
			return schemas.Errorf(schemas.CodeInvalid, "the certificate can't be used: %w", err)
		}
		c.http.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}}
		l = tls.NewListener(l, c.http.TLSConfig)
	}
	c.task("HTTP", func() error {
		// Serve ends with the listener, not with a context: the failure of another part must end it too.
		defer context.AfterFunc(runCtx, func() { _ = c.http.Close() })()
		if err := c.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	c.onClose(func() { _ = c.http.Close() })
	return nil
}

func (c *ControlPlane) serveCallout(ctx, runCtx context.Context) error {
	conn, err := c.conn(ctx, embedded.UserAuth)
	if err != nil {
		return err
	}
	sys, err := c.conn(ctx, embedded.UserSys)
	if err != nil {
		return err
	}
	jail, err := c.conn(ctx, embedded.UserJail)
	if err != nil {
		return err
	}
	opsPub, opsSub := embedded.OpsPermissions()
	sysPub, sysSub := embedded.OpsSysPermissions()
	c.task("callout", func() error {
		return c.auth.ServeCallout(runCtx, auth.CalloutConfig{
			Conn: conn, Sys: sys, Jail: bus.NewConn(jail), Issuer: c.keys.Issuer(), XKey: c.keys.XKey(),
			OpsPublic: c.keys.OpsPublic(), OpsSysPublic: c.keys.OpsSysPublic(),
			Ops: auth.Subjects{Publish: opsPub, Subscribe: opsSub}, OpsSys: auth.Subjects{Publish: sysPub, Subscribe: sysSub},
			Bound: c.registry.Bound, Link: c.linkConfig(), Ready: func() { close(c.ready) },
		})
	})
	select {
	case <-c.ready:
		return nil
	case <-runCtx.Done(): // a task has failed
		return c.tasks.Wait()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Endpoints tells where this control plane is.
func (c *ControlPlane) Endpoints() Endpoints {
	e := Endpoints{
		HTTP: c.cfg.scheme() + "://" + c.listener.Addr().String(), NATS: c.cfg.busURL(c.server.Addr()), CA: c.caFile,
		AdminToken: c.data.file(fileLocalAdmin), OpsSeed: c.data.file(fileOpsSeed), OpsSysSeed: c.data.file(fileOpsSysSeed),
		DataDir: c.data.path, PID: os.Getpid(),
	}
	if ws := c.server.WebSocketAddr(); ws != "" {
		scheme := "wss"
		if c.cfg.PlaintextNATS {
			scheme = "ws"
		}
		e.WebSocket = scheme + "://" + ws
	}
	return e
}

// Wait blocks until a part fails (its error) or Stop was called (nil).
func (c *ControlPlane) Wait() error {
	err := c.tasks.Wait()
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// Stop ends the control plane in order: no new dispatch, running ones may end within Config.StopGrace, then the parts. It
// returns when nothing runs any more.
func (c *ControlPlane) Stop() {
	ctx, cancel := context.WithTimeout(context.Background(), c.cfg.StopGrace)
	defer cancel()
	c.cfg.Log.Info("control plane stops", "runningFetches", c.dispatch.InFlight(), "grace", c.cfg.StopGrace)
	if err := c.dispatch.Close(ctx); err != nil {
		c.cfg.Log.Warn("fetches were cut off", "error", err)
	}
	if err := c.http.Shutdown(ctx); err != nil {
		c.cfg.Log.Warn("HTTP connections were cut off", "error", err)
	}
	c.tearDown()
	c.cfg.Log.Info("control plane has stopped")
}

func (c *ControlPlane) onClose(f func()) { c.closers = append(c.closers, f) }

// tearDown ends the tasks, then closes backwards what was opened.
func (c *ControlPlane) tearDown() {
	c.cancel()
	_ = c.tasks.Wait()
	for i := len(c.closers) - 1; i >= 0; i-- {
		c.closers[i]()
	}
	c.closers = nil
}

// task runs a blocking part; the first that fails ends all. A panic is an error with its stack.
func (c *ControlPlane) task(name string, run func() error) {
	c.tasks.Go(func() (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("%s: panic: %v\n%s", name, p, debug.Stack())
			}
		}()
		if err := run(); err != nil && !errors.Is(err, context.Canceled) {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
}
