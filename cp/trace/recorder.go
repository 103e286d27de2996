package trace

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/org-runink/runbus/jetstream"
)

const (
	// flushEvery is the shortest time between two writes. A write that takes long is followed by a pause of flushPause times
	// as long, so that the disk, of which the audit needs a part, is never busy with timelines alone.
	flushEvery = 250 * time.Millisecond
	flushPause = 4
	// flushWait bounds the last write, after Run was told to end.
	flushWait = 3 * time.Second

	// A dispatch that has run for longAfter is written before its end, and again when a step is added and every refreshEvery.
	// One that was not refreshed for goneAfter has lost its replica.
	longAfter    = time.Second
	refreshEvery = 10 * time.Second
	goneAfter    = 3 * refreshEvery

	// maxPending is how many ended timelines may wait to be written; more are dropped and counted.
	maxPending = 16384
	// maxBatch is the most bytes of timelines in one message.
	maxBatch = 384 << 10
	// maxText bounds the error's text in a timeline.
	maxText = 1 << 10
)

// Deps are the parts that a Recorder stands on. Store and Replica are required.
type Deps struct {
	Store *jetstream.Store
	// Replica names this boot, as it stands in the subjects of the stream.
	Replica string
	// Longest is the longest time that a dispatch may take: a timeline is looked for so far behind its begin. Zero means 10m.
	Longest time.Duration
	Metrics prometheus.Registerer // nil: none
	Log     *slog.Logger          // nil: slog.Default()
	Now     func() time.Time      // nil: time.Now
}

// Recorder keeps the timelines of this replica until they are written, and reads those of all. It is safe for concurrent use.
// Nothing is written before Run runs.
type Recorder struct {
	d       Deps
	wake    chan struct{}
	metrics metrics
	flushIn time.Duration // flushWait

	mu      sync.Mutex
	live    map[string]*Live // running, or ended and not stored yet; by dispatch
	ended   []*Live          // to be written
	shown   map[string]bool  // tenants whose last message of running dispatches was not empty
	closed  bool
	failing bool // the last write failed
}

// Live is one dispatch of this replica. A nil Live takes every call and does nothing, as that of a Dispatcher without Recorder.
type Live struct {
	r      *Recorder
	id     string
	tenant string
	began  time.Time

	followed atomic.Bool // changed may be set

	mu       sync.Mutex
	snapshot func() Timeline // nil once it ended
	final    *Timeline
	steps    int           // at the last write
	written  time.Time     // of the last write; zero before the first
	changed  chan struct{} // nil unless somebody waits
}

// New makes a Recorder.
func New(d Deps) (*Recorder, error) {
	if d.Store == nil || d.Replica == "" {
		return nil, errors.New("trace: Store and Replica are required")
	}
	d.Longest = cmp.Or(d.Longest, 10*time.Minute)
	d.Log = cmp.Or(d.Log, slog.Default())
	if d.Now == nil {
		d.Now = time.Now
	}
	r := &Recorder{d: d, wake: make(chan struct{}, 1), live: make(map[string]*Live), shown: make(map[string]bool), flushIn: flushWait}
	var err error
	r.metrics, err = newMetrics(d.Metrics)
	return r, err
}

// Begin records a dispatch that runs here. snapshot gives its timeline; it is called from any goroutine, and what it gives after End is
// not looked at. A nil Recorder returns a nil Live, as does a dispatch of no tenant, or of an id that runs already.
func (r *Recorder) Begin(tenant, id string, began time.Time, snapshot func() Timeline) *Live {
	if r == nil || tenant == "" {
		return nil
	}
	l := &Live{r: r, id: id, tenant: tenant, began: began, snapshot: snapshot}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.live[id] != nil {
		return nil
	}
	r.live[id] = l
	return l
}

// Changed tells those who follow the dispatch that there is something new.
func (l *Live) Changed() {
	if l == nil || !l.followed.Load() {
		return // nobody follows it, as mostly
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.followed.Store(false)
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}

// End records how the dispatch ended. It never waits.
func (l *Live) End(t Timeline) {
	if l == nil {
		return
	}
	t.Message, t.Hint = clip(t.Message), clip(t.Hint)
	if t.Stopped != nil {
		hop := *t.Stopped
		hop.Why = clip(hop.Why)
		t.Stopped = &hop
	}
	l.mu.Lock()
	l.final, l.snapshot = &t, nil // what the snapshot holds on to may hold secrets
	l.mu.Unlock()
	l.Changed()
	r := l.r
	r.mu.Lock()
	full := r.closed || len(r.ended) >= maxPending
	if full {
		r.forget(l)
	} else {
		r.ended = append(r.ended, l)
	}
	r.mu.Unlock()
	if full {
		r.metrics.lost.WithLabelValues("full").Inc()
		return
	}
	r.stir()
}

// forget takes a dispatch out, unless another of the same id stands there; r.mu is held.
func (r *Recorder) forget(l *Live) {
	if r.live[l.id] == l {
		delete(r.live, l.id)
	}
}

// Snapshot is the dispatch as it stands, and a channel that is closed at the next change.
func (l *Live) Snapshot() (Timeline, <-chan struct{}) {
	l.mu.Lock()
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	l.followed.Store(true) // before it is looked at
	changed, final, snapshot := l.changed, l.final, l.snapshot
	l.mu.Unlock()
	if final != nil {
		return *final, changed
	}
	t := snapshot() // it takes a lock of its own
	if final := l.ended(); final != nil {
		return *final, changed // what was told may be of another dispatch
	}
	t.State = StateRunning
	return t, changed
}

func (l *Live) ended() *Timeline {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.final
}

// due reports whether a long dispatch has to be written, and notes that it is; steps are those it has now.
func (l *Live) due(steps int, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.written.IsZero() || steps != l.steps || now.Sub(l.written) >= refreshEvery {
		l.steps, l.written = steps, now
		return true
	}
	return false
}

func (r *Recorder) stir() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Run writes what is recorded until ctx ends, and then what is left.
func (r *Recorder) Run(ctx context.Context) error {
	tick := time.NewTicker(longAfter)
	defer tick.Stop()
	for {
		select {
		case <-r.wake:
		case <-tick.C:
		case <-ctx.Done():
			r.mu.Lock()
			r.closed = true
			r.mu.Unlock()
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.flushIn)
			defer cancel()
			r.flush(last)
			return nil
		}
		began := time.Now()
		r.flush(ctx)
		pause := time.NewTimer(max(flushEvery, flushPause*time.Since(began)))
		select {
		case <-pause.C:
		case <-ctx.Done():
		}
		pause.Stop()
	}
}

// Close takes the recorder's metrics out. It comes after Run.
func (r *Recorder) Close() { r.metrics.close() }

// batch is what a message of the stream holds.
type batch struct {
	Replica   string     `json:"replica"`
	Timelines []Timeline `json:"timelines"`
}

// flush writes the ended dispatches, then those that run long: a dispatch is never missing in between.
func (r *Recorder) flush(ctx context.Context) {
	r.mu.Lock()
	ended := r.ended
	r.ended = nil
	r.mu.Unlock()
	byTenant := make(map[string][]*Live)
	for _, l := range ended {
		byTenant[l.tenant] = append(byTenant[l.tenant], l)
	}
	var left []*Live
	for tenant, list := range byTenant {
		left = append(left, r.writeEnded(ctx, tenant, list)...)
	}
	r.writeRunning(ctx)
	if len(left) == 0 {
		return
	}
	r.mu.Lock()
	r.ended = append(left, r.ended...)
	for len(r.ended) > maxPending {
		r.forget(r.ended[0])
		r.ended = r.ended[1:]
		r.metrics.lost.WithLabelValues("full").Inc()
	}
	r.mu.Unlock()
}

// writeEnded stores the timelines of one tenant and returns those that were not.
func (r *Recorder) writeEnded(ctx context.Context, tenant string, list []*Live) (left []*Live) {
	for len(list) > 0 {
		body, n := encode(r.d.Replica, list)
		if n == 0 {
			return list
		}
		if err := r.store(ctx, tenant, jetstream.TraceEnded, body); err != nil {
			return list
		}
		r.metrics.written.Add(float64(n))
		r.mu.Lock()
		for _, l := range list[:n] {
			r.forget(l)
		}
		r.mu.Unlock()
		list = list[n:]
	}
	return nil
}

// writeRunning stores, for each tenant with something new, its dispatches that have run for long.
func (r *Recorder) writeRunning(ctx context.Context) {
	now := r.d.Now()
	r.mu.Lock()
	long := make(map[string][]*Live)
	for _, l := range r.live {
		if now.Sub(l.began) >= longAfter && l.ended() == nil {
			long[l.tenant] = append(long[l.tenant], l)
		}
	}
	gone := make([]string, 0, len(r.shown))
	for tenant := range r.shown {
		if long[tenant] == nil {
			gone = append(gone, tenant)
		}
	}
	r.mu.Unlock()
	for tenant, list := range long {
		due, size := false, 0
		b := batch{Replica: r.d.Replica}
		for _, l := range list {
			t, _ := l.Snapshot()
			if t.State != StateRunning {
				continue // its end is written next
			}
			due = l.due(len(t.Phases), now) || due
			if size += 512 + 128*len(t.Phases); size < maxBatch {
				b.Timelines = append(b.Timelines, t)
			}
		}
		if due {
			r.storeRunning(ctx, tenant, b)
		}
	}
	for _, tenant := range gone {
		r.storeRunning(ctx, tenant, batch{Replica: r.d.Replica, Timelines: []Timeline{}})
	}
}

func (r *Recorder) storeRunning(ctx context.Context, tenant string, b batch) {
	body, err := json.Marshal(b)
	if err == nil {
		err = r.store(ctx, tenant, jetstream.TraceRunning, body)
	}
	if err != nil {
		return // the next refresh says the same
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(b.Timelines) > 0 {
		r.shown[tenant] = true
	} else {
		delete(r.shown, tenant)
	}
}

// store appends one message, and logs the first failure of a row.
func (r *Recorder) store(ctx context.Context, tenant string, kind jetstream.TraceKind, body []byte) error {
	err := r.d.Store.AppendTrace(ctx, tenant, kind, r.d.Replica, body)
	r.mu.Lock()
	first := err != nil && !r.failing
	r.failing = err != nil
	r.mu.Unlock()
	if err != nil {
		r.metrics.failed.Inc()
	}
	if first && ctx.Err() == nil {
		r.d.Log.Warn("timelines of dispatches are not stored", "error", err)
	}
	return err
}
