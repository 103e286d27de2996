// Package registry knows all runners of a tenant: it serves their hello, heartbeat and goodbye, decides by compare-and-set which
// process holds a runner's id, and keeps a live view of the fleet from the buckets, from the server's link events, and from the
// roster of dialled runners. The managed runner, `console`, is stored nowhere: it is made up on every read (SPEC R2).
package registry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	// HeartbeatInterval is told to every runner (SPEC E6).
	HeartbeatInterval = 15 * time.Second
	// lateAfter is the age at which a heartbeat is late: two were missed, and the third is due.
	lateAfter = 3 * HeartbeatInterval

	// The view counts as confirmed as long as the leader answered a read within leaderSilence and each followed bucket was
	// compared with it within viewAge. An election takes 4-8 s and is no reason to refuse work.
	leaderSilence = 15 * time.Second
	viewAge       = 90 * time.Second

	probeEvery = 5 * time.Second
	scanEvery  = 30 * time.Second
	flushEvery = 5 * time.Second

	// queueGroup has all replicas: each message of a runner is served by one of them.
	queueGroup = "registry"
	// serveLimit is how many messages of runners are served at once, waitLimit how many may wait; more are dropped and
	// counted, and come again by themselves.
	serveLimit = 64
	waitLimit  = 20_000
	// waitRunner is how many of them may be one runner's, waitBytes how large they may be together: a runner that floods must
	// neither keep others' heartbeats out nor fill the memory.
	waitRunner = 8
	waitBytes  = 64 << 20
	// busyRunners is how many runners may have something waiting until new connections had better wait too: how much it is of each does
	// not count, so that few can't keep others out. helloPatience is how long a hello waits at most: its
	// runner gives up after 5 s, and what is done for it then keeps others out.
	busyRunners   = 256
	helloPatience = 4 * time.Second
	// startTimeout bounds New.
	startTimeout = time.Minute
	// serveTimeout bounds the serving of one message.
	serveTimeout = 10 * time.Second
)

// Deps are the parts that a Registry stands on. Store, Serve, Sys, Auth, Roster and Audit are required.
type Deps struct {
	Store  *jetstream.Store
	Serve  *bus.Conn  // connection in account RUN that serves runners' messages
	Sys    *nats.Conn // connection in account SYS, for link events
	Auth   *auth.Auth
	Roster *roster.Roster // the dialled runners; to be closed after the Registry
	Audit  *audit.Log
	// Grace is how long running works outlive a lost link (SPEC D13, RUNNER_GRACE). Zero means 15s.
	Grace time.Duration
	// Replica names this replica in records. Empty: random.
	Replica string
	// Managed is the public key (SubjectPublicKeyInfo) of the process that may say hello as `console` of a tenant now, if there is one.
	// It answers from memory. Nil: none may.
	Managed func(tenant string) (publicKey []byte, ok bool)
	// ManagedWaits reports whether the managed runner of a tenant has no process because a fetch starts it. It answers from memory, and
	// does not call the Registry. Nil: none does.
	ManagedWaits func(tenant string) bool
	// Copies, if set, is given every message published on a control subject, for the view of ops. It must not block.
	Copies  func(subject string, m proto.Message)
	Metrics prometheus.Registerer // nil: none
	Log     *slog.Logger          // nil: slog.Default()
	Now     func() time.Time      // nil: time.Now
}

// Registry is the live view of the fleet. Safe for concurrent use.
type Registry struct {
	d          Deps
	heartbeats *jetstream.Table[Record]
	known      *jetstream.Table[Known]
	sealing    *jetstream.Table[sealingKey]
	liveView   *jetstream.Tail[Record]
	knownView  *jetstream.Tail[Known]
	metrics    *metrics
	subs       []*nats.Subscription

	life    context.Context //nolint:containedctx // the life of what is being served, which outlives New; ends with Close
	end     context.CancelFunc
	serving sync.WaitGroup
	slots   chan struct{} // serveLimit
	rescan  chan struct{} // asks Run for a link scan
	notes   notes         // of known runners, not written yet

	handovers handovers
	answers   answers
	began     time.Time // of clock
	realTime  bool      // no clock of a test: Deps.Now, and that of auth

	mu       sync.Mutex // never held while calling out
	closed   bool
	waiting  int // messages being served or waiting to be
	waitSize int // their bytes
	waitOf   map[schemas.RunnerRef]int
	fleet    map[string]map[string]*runner
	named    map[nameKey]map[*runner]struct{}
	lists    map[string][]string // of capabilities, as runners share them
	changed  chan struct{}
	probedAt time.Time             // when the leader was asked that answered last
	ended    map[linkKey]time.Time // links that ended within endedFor, or since the last scan, and when that was heard of
	revoked  map[string]time.Time  // public keys that were revoked within revokedFor, or were the last, and when that was heard of
	refused  map[string]time.Time  // refusals of hello that were audited lately
}

// New follows the buckets and the link events, and serves hello, heartbeat and goodbye from when it returns. Run must run
// beside it: without it the view stops being confirmed. ctx bounds the start only.
func New(ctx context.Context, d Deps) (*Registry, error) {
	if d.Store == nil || d.Serve == nil || d.Sys == nil || d.Auth == nil || d.Roster == nil || d.Audit == nil {
		return nil, errors.New("registry: Store, Serve, Sys, Auth, Roster and Audit are required")
	}
	d.Grace = cmp.Or(d.Grace, 15*time.Second)
	d.Replica = cmp.Or(d.Replica, schemas.NewID())
	d.Log = cmp.Or(d.Log, slog.Default())
	realTime := d.Now == nil && d.Auth.RealTime()
	if d.Now == nil {
		d.Now = time.Now
	}
	r := &Registry{
		d:          d,
		began:      time.Now(),
		realTime:   realTime,
		heartbeats: jetstream.TableOf[Record](d.Store, jetstream.Heartbeats),
		known:      jetstream.TableOf[Known](d.Store, jetstream.Known),
		sealing:    jetstream.TableOf[sealingKey](d.Store, jetstream.SealingKeys),
		slots:      make(chan struct{}, serveLimit),
		rescan:     make(chan struct{}, 1),
		fleet:      make(map[string]map[string]*runner),
		named:      make(map[nameKey]map[*runner]struct{}),
		lists:      make(map[string][]string),
		changed:    make(chan struct{}),
		ended:      make(map[linkKey]time.Time),
		revoked:    make(map[string]time.Time),
		refused:    make(map[string]time.Time),
		waitOf:     make(map[schemas.RunnerRef]int),
	}
	r.life, r.end = context.WithCancel(context.Background())
	if err := r.start(ctx); err != nil {
		r.Close()
		return nil, fmt.Errorf("registry: %w", err)
	}
	return r, nil
}

// start goes from the outside in: links, then buckets, then what runners say.
func (r *Registry) start(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if r.metrics, err = newMetrics(r); err != nil {
		return err
	}
	if err := r.followLinks(); err != nil {
		return err
	}
	if err := r.firstScan(ctx); err != nil {
		return err
	}
	if err := r.probe(ctx); err != nil {
		return err
	}
	if r.knownView, err = r.known.Tail(ctx, r.knownChanged); err != nil {
		return err
	}
	if r.liveView, err = r.heartbeats.Tail(ctx, r.recordChanged); err != nil {
		return err
	}
	r.d.Auth.OnKeyRevoked(r.keyRevoked)
	r.d.Roster.OnChange(r.rosterChanged)
	for subject, serve := range map[string]func(context.Context, *nats.Msg, schemas.RunnerRef){
		schemas.AllHellos:     r.serveHello,
		schemas.AllHeartbeats: r.serveHeartbeat,
		schemas.AllGoodbyes:   r.serveGoodbye,
	} {
		sub, err := r.d.Serve.QueueSubscribe(subject, queueGroup, func(msg *nats.Msg) { r.serve(msg, serve) })
		if err != nil {
			return err
		}
		r.subs = append(r.subs, sub)
	}
	return r.d.Serve.NATS().FlushWithContext(ctx)
}

// Run keeps the view fresh until ctx ends: scans of the links, the probe of the leader, the batched writes of known runners.
// It returns nil then; the registry goes on serving, ever staler, until Close.
func (r *Registry) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return r.scanTask(ctx) })
	group.Go(func() error {
		return every(ctx, probeEvery, func() {
			if err := r.probe(ctx); err != nil && ctx.Err() == nil {
				r.d.Log.Warn("the registry's leader does not answer", "error", err)
			}
		})
	})
	group.Go(func() error {
		return every(ctx, flushEvery, func() { r.flushKnown(ctx) })
	})
	return group.Wait()
}

// every calls do at once and then each interval, until ctx ends.
func every(ctx context.Context, interval time.Duration, do func()) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		do()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// Close stops serving and following, and writes what is known and not written yet. A message being served is given up: its
// runner is told to try again.
func (r *Registry) Close() {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return
	}
	r.closed = true
	r.mu.Unlock()
	for _, sub := range r.subs {
		if err := sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
			r.d.Log.Warn("unsubscribe", "subject", sub.Subject, "error", err)
		}
	}
	r.end()
	r.serving.Wait()
	if r.liveView != nil {
		r.liveView.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		r.flushKnown(ctx)
		cancel()
	}
	if r.knownView != nil {
		r.knownView.Close()
	}
	r.stopWatches()
	r.metrics.close()
}

// serve hands a message of a runner to its own goroutine: a subscription's callback never blocks.
func (r *Registry) serve(msg *nats.Msg, do func(context.Context, *nats.Msg, schemas.RunnerRef)) {
	subject, err := schemas.Parse(msg.Subject)
	if err != nil {
		r.metrics.dropped.WithLabelValues("subject").Inc()
		return
	}
	if reason := r.admit(subject.Ref, len(msg.Data)); reason != "" {
		r.metrics.dropped.WithLabelValues(reason).Inc()
		return
	}
	came := time.Now()
	go func() {
		defer r.serving.Done()
		r.slots <- struct{}{}
		if subject.Kind == schemas.KindHello && time.Since(came) > helloPatience {
			r.metrics.dropped.WithLabelValues("late").Inc()
		} else {
			ctx, cancel := context.WithTimeout(r.life, serveTimeout)
			do(ctx, msg, subject.Ref)
			cancel()
		}
		<-r.slots
		r.dismiss(subject.Ref, len(msg.Data))
	}()
}

// Busy reports whether messages of so many runners wait that new runners had better wait before they connect. It answers at once.
func (r *Registry) Busy() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.waitOf) >= busyRunners
}

// admit counts a message of size bytes in, or returns why it is dropped.
func (r *Registry) admit(ref schemas.RunnerRef, size int) (dropped string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed, r.waiting >= waitLimit, r.waitSize+size > waitBytes:
		return "overload"
	case r.waitOf[ref] >= waitRunner:
		return "flood"
	}
	r.waiting++
	r.waitSize += size
	r.waitOf[ref]++
	r.serving.Add(1)
	return ""
}

// dismiss counts it out.
func (r *Registry) dismiss(ref schemas.RunnerRef, size int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiting--
	r.waitSize -= size
	if r.waitOf[ref]--; r.waitOf[ref] == 0 {
		delete(r.waitOf, ref)
	}
}

// order publishes an order that wants no answer on the control subject of one session.
func (r *Registry) order(ref schemas.RunnerRef, session string, order *runbusv1.RunnerControl) {
	order.Id = schemas.NewID()
	subject := schemas.ControlSubject(ref, session)
	if err := r.d.Serve.Publish(subject, order); err != nil {
		r.d.Log.Warn("order not sent", "runner", ref.Runner, "tenant", ref.Tenant, "error", err)
		return
	}
	if r.d.Copies != nil {
		r.d.Copies(subject, order)
	}
}

// validSession reports whether s may stand in a subject.
func validSession(ref schemas.RunnerRef, s string) bool {
	_, err := schemas.Parse(schemas.ControlSubject(ref, s))
	return err == nil
}

// probe asks the leader of the heartbeats bucket for a key that nobody writes: any answer of its proves that it can be read.
func (r *Registry) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeEvery-time.Second)
	defer cancel()
	now := r.d.Now() // an answer may lie here for a while before it is read
	if _, err := r.heartbeats.Get(ctx, "probe"); err != nil && !errors.Is(err, jetstream.ErrNotFound) {
		return fmt.Errorf("read the registry: %w", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	back := now.Sub(r.probedAt) > leaderSilence
	r.probedAt = now
	if back {
		r.signal()
	}
	return nil
}

// Readable returns nil while the views, the roster's too, are confirmed against the leader, else ErrRegistryUnavailable.
func (r *Registry) Readable() error {
	if err := r.d.Roster.Readable(); err != nil {
		return err
	}
	now := r.d.Now()
	r.mu.Lock()
	silent := now.Sub(r.probedAt)
	r.mu.Unlock()
	if silent > leaderSilence {
		return schemas.ErrRegistryUnavailable(fmt.Errorf("the leader has not answered for %s", silent.Round(time.Second)))
	}
	if err := confirmed(jetstream.Heartbeats, now.Sub(r.liveView.Confirmed())); err != nil {
		return err
	}
	return confirmed(jetstream.Known, now.Sub(r.knownView.Confirmed()))
}

// confirmed returns nil if the view of a bucket was compared with the leader lately enough.
func confirmed(name jetstream.Bucket, age time.Duration) error {
	if age > viewAge {
		return schemas.ErrRegistryUnavailable(fmt.Errorf("the view of %s was not confirmed for %s", name, age.Round(time.Second)))
	}
	return nil
}
