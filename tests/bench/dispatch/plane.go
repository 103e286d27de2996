package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/cp/ops"
	"github.com/org-runink/runbus/cp/registry"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	tenant   = "bench"
	runnerID = "edge"
	rawID    = "raw" // the runner whose permissions the raw control has
	kind     = "nothing"
)

// plane is a control plane of the real parts, without HTTP.
type plane struct {
	server     *embedded.Server
	caFile     string
	certFile   string
	keyFile    string
	auth       *auth.Auth
	registry   *registry.Registry
	dispatcher *dispatch.Dispatcher
	caller     auth.Principal
	token      string // of a service account
	store      *jetstream.Store
	grpc       *twin
	waiting    *nats.Conn // of the dispatcher: assignments and credits go out, results come in

	tasks   *errgroup.Group
	cancel  context.CancelFunc
	closers []func() // run backwards
}

// startPlane puts the parts together as cp.Start does.
func startPlane(ctx context.Context, dir string, log *slog.Logger) (_ *plane, err error) {
	p := &plane{}
	runCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p.cancel = cancel
	p.tasks, runCtx = errgroup.WithContext(runCtx)
	defer func() {
		if err != nil {
			err = errors.Join(err, p.stop())
		}
	}()
	keys, err := embedded.LoadKeys(filepath.Join(dir, "keys.json"))
	if err != nil {
		return nil, err
	}
	if p.certFile, p.keyFile, p.caFile, err = embedded.EnsureCertificate(filepath.Join(dir, "tls"), nil); err != nil {
		return nil, err
	}
	p.server, err = embedded.Start(embedded.Config{
		StoreDir: filepath.Join(dir, "store"), Listen: "127.0.0.1:0", CertFile: p.certFile, KeyFile: p.keyFile, Keys: keys, Log: log,
	})
	if err != nil {
		return nil, err
	}
	p.onClose(p.server.Shutdown)
	conns := make(map[embedded.User]*nats.Conn)
	for _, u := range embedded.Users() {
		if conns[u], err = p.server.Connect(u); err != nil {
			return nil, err
		}
	}
	p.waiting = conns[embedded.UserDispatch]
	sys, err := p.server.Connect(embedded.UserSys)
	if err != nil {
		return nil, err
	}
	store, err := jetstream.Open(ctx, conns[embedded.UserSec], jetstream.Options{Fresh: true, Log: log})
	if err != nil {
		return nil, err
	}
	p.store = store
	p.onClose(store.Close)
	if err := store.OpenMirrors(ctx, conns[embedded.UserMirror]); err != nil {
		return nil, err
	}
	events, err := audit.New(ctx, store, "bench", log)
	if err != nil {
		return nil, err
	}
	p.tasks.Go(func() error { return events.Run(runCtx) })
	if p.auth, err = auth.New(ctx, auth.Deps{Store: store, Audit: events, Log: log}); err != nil {
		return nil, err
	}
	p.onClose(p.auth.Close)
	runners, err := roster.New(ctx, roster.Deps{Store: store, Audit: events, Log: log})
	if err != nil {
		return nil, err
	}
	p.onClose(runners.Close)
	copies := ops.NewCopies(conns[embedded.UserMicro], log)
	p.onClose(copies.Close)
	copyForOps := func(subject string, m proto.Message) {
		if p.server.Watched(subject) {
			copies.Publish(subject, m)
		}
	}
	metrics := prometheus.NewRegistry()
	p.registry, err = registry.New(ctx, registry.Deps{
		Store: store, Serve: bus.NewConn(conns[embedded.UserServe]), Sys: conns[embedded.UserSys], Auth: p.auth, Roster: runners, Audit: events,
		Copies: copyForOps, Metrics: metrics, Log: log,
	})
	if err != nil {
		return nil, err
	}
	p.onClose(p.registry.Close)
	p.tasks.Go(func() error { return p.registry.Run(runCtx) })
	p.dispatcher, err = dispatch.New(dispatch.Deps{
		Bus: bus.NewConn(conns[embedded.UserDispatch]), Registry: p.registry, Audit: events, Copies: copyForOps,
		Watchers: p.server.Watchers, Watched: p.server.Watched, Metrics: metrics, Log: log,
	})
	if err != nil {
		return nil, err
	}
	p.onClose(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = p.dispatcher.Close(ctx)
	})
	if err := p.enrol(ctx); err != nil {
		return nil, err
	}
	opsPub, opsSub := embedded.OpsPermissions()
	sysPub, sysSub := embedded.OpsSysPermissions()
	ready := make(chan struct{})
	p.tasks.Go(func() error {
		return p.auth.ServeCallout(runCtx, auth.CalloutConfig{
			Conn: conns[embedded.UserAuth], Sys: sys, Jail: bus.NewConn(conns[embedded.UserJail]), Issuer: keys.Issuer(), XKey: keys.XKey(),
			OpsPublic: keys.OpsPublic(), OpsSysPublic: keys.OpsSysPublic(),
			Ops: auth.Subjects{Publish: opsPub, Subscribe: opsSub}, OpsSys: auth.Subjects{Publish: sysPub, Subscribe: sysSub},
			Bound: p.registry.Bound, Ready: func() { close(ready) },
		})
	})
	select {
	case <-ready:
	case <-runCtx.Done():
		return nil, p.tasks.Wait()
	}
	p.grpc, err = startTwin(p.certFile, p.keyFile)
	if err != nil {
		return nil, err
	}
	p.onClose(p.grpc.stop)
	return p, nil
}

// enrol makes the tenant, its admin and the key of its runners.
func (p *plane) enrol(ctx context.Context) error {
	token, err := p.auth.CreateTenant(ctx, auth.Principal{Name: "operator", Role: auth.RoleOperator}, tenant)
	if err != nil {
		return err
	}
	if p.caller, err = p.auth.Authenticate(token); err != nil {
		return err
	}
	_, p.token, err = p.auth.MintKey(ctx, p.caller, "runners")
	return err
}

func (p *plane) onClose(f func()) { p.closers = append(p.closers, f) }

func (p *plane) stop() error {
	p.cancel()
	err := p.tasks.Wait()
	for i := len(p.closers) - 1; i >= 0; i-- {
		p.closers[i]()
	}
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// await waits until id would be given work.
func (p *plane) await(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		changed := p.registry.Changed()
		list, err := p.registry.Snapshot(tenant)
		if err != nil {
			return err
		}
		for _, c := range list {
			if c.Ref.Runner == id && c.Offline == "" {
				return nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("the runner %s did not enrol: %w", id, ctx.Err())
		}
	}
}

// sink is the caller: it takes the bytes and counts them.
type sink struct {
	bytes  int
	chunks int
}

func (s *sink) Accepted(dispatch.Accepted) error        { return nil }
func (s *sink) Progress(*runbusv1.RunFetchUpdate) error { return nil }
func (s *sink) Chunk(b []byte) error                    { s.bytes += len(b); s.chunks++; return nil }
func (s *sink) Abandon()                                {}

func (p *plane) request(to string) dispatch.Request {
	return dispatch.Request{Caller: p.caller, Runner: to, Fetch: &runbusv1.RunFetchRequest{Source: &runbusv1.Source{Kind: kind}}}
}

// fetch is the product's path.
func (p *plane) fetch(to string) path {
	return func(ctx context.Context) error {
		var s sink
		o := p.dispatcher.Fetch(ctx, p.request(to), "", &s)
		if o.Code != dispatch.OutcomeCompleted {
			return fmt.Errorf("%s: %w", o.Code, o.Err)
		}
		if s.bytes < 1024 {
			return fmt.Errorf("a result of %d bytes", s.bytes)
		}
		return nil
	}
}

// sizes are the payloads of one dispatch, in bytes.
type sizes struct{ assignment, result int }

func (p *plane) sizes(ctx context.Context) (sizes, error) {
	var s sink
	o := p.dispatcher.Fetch(ctx, p.request(runnerID), "", &s)
	if o.Code != dispatch.OutcomeCompleted {
		return sizes{}, fmt.Errorf("the first fetch: %s: %w", o.Code, o.Err)
	}
	return sizes{proto.Size(assignment()), s.bytes}, nil
}

// assignment is one as the dispatcher makes it, for the controls.
func assignment() *runbusv1.RunnerWorkAssignment {
	now := time.Now()
	return &runbusv1.RunnerWorkAssignment{
		DispatchId: schemas.NewID()[:26], Session: schemas.NewID(), Replica: schemas.NewID(),
		Request: &runbusv1.RunFetchRequest{
			Source: &runbusv1.Source{Kind: kind}, MaxRows: dispatch.MaxRows, MaxBytes: dispatch.MaxBytes,
		},
		AcceptBy: timestamppb.New(now.Add(2 * time.Second)), Deadline: timestamppb.New(now.Add(time.Minute)), WindowBytes: bus.MaxWindow,
	}
}
