// Package dispatch runs fetches on runners: it selects the runner, hands it the work at most once, and relays the result to
// the caller. fetch.go is the main job from top to bottom.
package dispatch

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	oteltrace "go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/registry"
	"github.com/org-runink/runbus/cp/trace"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Deps are the parts that a Dispatcher stands on. Bus, Registry and Audit are required.
type Deps struct {
	Bus      *bus.Conn // connection in account RUN that waits for results
	Registry *registry.Registry
	Audit    *audit.Log
	// Timeout is the default and the ceiling of a fetch's time (SPEC D4, DISPATCH_TIMEOUT). Zero means 10m.
	Timeout time.Duration
	// AcceptWithin is how long a runner has to accept an assignment. Zero means 2s.
	AcceptWithin time.Duration
	// CredentialsWithin bounds what goes before the credentials of a work that was accepted, their record and the look for the runner's key.
	// Zero means 4s: the runner's slot waits 5 s for them.
	CredentialsWithin time.Duration
	// ConfirmWithin is how long a runner has to confirm that it stopped a work. Zero means 5s.
	ConfirmWithin time.Duration
	// Managed makes sure that the tenant's managed runner is up, before a fetch on it is sent there, and keeps it up until release is
	// called. Its error is the reason of ErrManagedUnreachable (SPEC D11). Nil: it is somebody else's to keep it up.
	Managed func(ctx context.Context, tenant string) (release func(), err error)
	// Isolation is REQUIRE_RUNNER_ISOLATION (SPEC D10). It changes a text; a fetch never runs in the control plane anyway.
	Isolation bool
	// Copies, if set, is given every message published on a work or control subject, for the view of ops, and every frame but chunks
	// that came bundled with chunks; sealed credentials are left out of the copy. It must not block.
	Copies func(subject string, m proto.Message)
	// Watchers reports whether Copies may want something. Nil: it may.
	Watchers func() bool
	// Watched reports whether Copies wants what is published on a subject. Nil: it does.
	Watched func(subject string) bool
	// Recorder, if set, keeps the timeline of each dispatch (SPEC D17). It never holds one up.
	Recorder *trace.Recorder
	// Tracing makes the spans; nil: none are made, and the trace context of the caller goes on to the runner as it came.
	Tracing oteltrace.TracerProvider
	Metrics prometheus.Registerer // nil: none
	Log     *slog.Logger          // nil: slog.Default()
	Now     func() time.Time      // nil: time.Now
}

// Dispatcher runs fetches. Safe for concurrent use.
type Dispatcher struct {
	d         Deps
	receivers *bus.Receivers
	metrics   *metrics
	tracer    oteltrace.Tracer
	here      string    // this replica, in timelines
	began     time.Time // of clock
	ownClock  bool      // Deps.Now was given
	ticks     atomic.Int64
	coarse    atomic.Int64  // clock at the last look, or when there was something to look at again
	stood     atomic.Int64  // sum of the gaps of late and more between two looks
	busy      chan struct{} // room for one: mind has something to do
	closing   chan struct{} // closed to end mind
	minded    chan struct{} // closed when mind has ended
	spare     int64         // mostSpared, but in tests
	memory    sync.Pool     // of runs that have ended
	hasty     atomic.Bool   // the audit is about to take no more

	mu      sync.Mutex
	closed  bool
	minding bool // mind looks at what runs
	running runs
	idle    chan struct{} // closed when closed and nothing runs
}

// New makes a Dispatcher that waits for results on d.Bus.
func New(d Deps) (*Dispatcher, error) {
	if d.Bus == nil || d.Registry == nil || d.Audit == nil {
		return nil, errors.New("dispatch: Bus, Registry and Audit are required")
	}
	d.Timeout = cmp.Or(d.Timeout, 10*time.Minute)
	d.AcceptWithin = cmp.Or(d.AcceptWithin, 2*time.Second)
	d.CredentialsWithin = cmp.Or(d.CredentialsWithin, 4*time.Second)
	d.ConfirmWithin = cmp.Or(d.ConfirmWithin, 5*time.Second)
	d.Log = cmp.Or(d.Log, slog.Default())
	ownClock := d.Now != nil
	if !ownClock {
		d.Now = time.Now
	}
	var tracing oteltrace.TracerProvider = noop.NewTracerProvider()
	if _, none := d.Tracing.(noop.TracerProvider); none {
		d.Tracing = nil
	}
	if d.Tracing != nil {
		tracing = d.Tracing
	}
	receivers, err := bus.NewReceivers(d.Bus)
	if err != nil {
		return nil, err
	}
	if d.Copies != nil {
		receivers.OnBundled(d.Copies) // ops can't subscribe data
		receivers.TellIf(d.Watchers, d.Watched)
	}
	x := &Dispatcher{
		d: d, tracer: tracing.Tracer(tracerName), receivers: receivers, here: "replica:" + receivers.Replica(), began: time.Now(), ownClock: ownClock,
		busy: make(chan struct{}, 1), closing: make(chan struct{}), minded: make(chan struct{}),
		idle: make(chan struct{}), spare: int64(mostSpared),
	}
	x.memory.New = newMemory
	x.ticks.Store(1)
	if x.metrics, err = newMetrics(d.Metrics, receivers, x.InFlight); err != nil {
		return nil, errors.Join(err, receivers.Close())
	}
	go x.mind()
	d.Audit.AtClose(x.tellStarts)
	return x, nil
}

// Replica is the random id of this boot, as it stands in result subjects and timelines.
func (d *Dispatcher) Replica() string { return d.receivers.Replica() }

// InFlight is how many dispatches run on this replica now.
func (d *Dispatcher) InFlight() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.running.count
}

// Cancel tells a running dispatch of by's tenant to stop and returns at once; how it ends is in its Outcome. by must be
// WRITER or better. CodeNotFound when no such dispatch of the tenant runs here.
func (d *Dispatcher) Cancel(by auth.Principal, dispatchID string) error {
	if !mayFetch(by) {
		return errMayNotFetch("cancel a fetch")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.running.find(dispatchID)
	if r == nil || r.caller.Tenant != by.Tenant {
		return schemas.Errorf(schemas.CodeNotFound, "no such fetch is running").WithHint("it may have ended already")
	}
	d.d.Audit.Note(&runbusv1.AuditEvent{
		Tenant: by.Tenant, Actor: by.Actor(), Action: "dispatch.cancel", Subject: r.subject, Outcome: "ok",
	})
	r.cancel()
	return nil
}

// Running lists the dispatches of tenant that run on this replica, oldest first.
func (d *Dispatcher) Running(tenant string) []Running {
	d.mu.Lock()
	var list []Running
	for r := range d.running.all {
		if r.caller.Tenant == tenant {
			list = append(list, r.snapshot())
		}
	}
	d.mu.Unlock()
	slices.SortFunc(list, func(a, b Running) int {
		return cmp.Or(a.StartedAt.Compare(b.StartedAt), strings.Compare(a.DispatchID, b.DispatchID))
	})
	return list
}

// Close takes no new dispatch and waits for the running ones. When ctx ends it cancels them, each at its runner, waits until
// they have ended, and returns the error of ctx.
func (d *Dispatcher) Close(ctx context.Context) error {
	d.mu.Lock()
	again := d.closed
	d.closed = true
	if !again && d.running.count == 0 {
		close(d.idle)
	}
	d.mu.Unlock()
	var err error
	select {
	case <-d.idle:
	case <-ctx.Done():
		err = ctx.Err()
		d.mu.Lock()
		for r := range d.running.all {
			r.cancel()
		}
		d.mu.Unlock()
		<-d.idle
	}
	if again {
		return err
	}
	close(d.closing)
	<-d.minded
	d.metrics.close()
	return errors.Join(err, d.receivers.Close())
}

// enter adds a run to the running ones. given tells that its id was not drawn here.
func (d *Dispatcher) enter(r *run, given bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return schemas.Errorf(schemas.CodeUnavailable, "this replica of the control plane is stopping").WithHint("try again")
	}
	if given && d.running.find(r.id) != nil {
		return schemas.Errorf(schemas.CodeConflict, "the dispatch %s runs already", r.id)
	}
	d.running.add(r)
	if !d.minding {
		d.minding = true
		d.coarse.Store(d.clock())
		select {
		case d.busy <- struct{}{}:
		default:
		}
	}
	return nil
}

// leave takes a run out.
func (d *Dispatcher) leave(r *run) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running.remove(r)
	if d.closed && d.running.count == 0 {
		close(d.idle)
	}
	if r.completed {
		d.recycle(r)
	}
}

// watched reports whether ops would get a copy of what is published on subject.
func (d *Dispatcher) watched(subject string) bool {
	return d.d.Copies != nil && (d.d.Watched == nil || d.d.Watched(subject))
}

// copyForOps gives ops a copy of m, if they watch. It holds nothing that is sealed.
func (d *Dispatcher) copyForOps(subject string, m proto.Message) {
	if d.watched(subject) {
		d.d.Copies(subject, m)
	}
}
