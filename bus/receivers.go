package bus

import (
	"cmp"
	"errors"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/schemas"
)

// DropReason is why a message of a runner was dropped.
type DropReason string

// The reasons (SPEC D5 and the stream's own).
const (
	DropUnknown   DropReason = "unknown"   // of a dispatch or order that nobody waits for
	DropLate      DropReason = "late"      // of a dispatch that was closed
	DropDuplicate DropReason = "duplicate" // a frame that is here already
	DropForeign   DropReason = "foreign"   // on the subject of a runner that does not have the dispatch
	DropSession   DropReason = "session"   // of another session than the dispatch's
	DropGap       DropReason = "gap"       // a frame before it is missing; it was asked for again
	DropOverrun   DropReason = "overrun"   // over the window by far, or after the result
	DropInvalid   DropReason = "invalid"   // not a frame
)

const (
	// connectionWindow bounds the windows of all streams of one Receivers together, in bytes: more under way to one
	// connection makes it a slow consumer.
	connectionWindow = 32 << 20
	// fullSlots is how many streams get MaxWindow.
	fullSlots = connectionWindow / MaxWindow
)

// Receivers is all result streams and control orders of one replica since its start. It is safe for concurrent use.
//
// Windows are shared out so that their sum stays within 32 MiB: 4 MiB for each of up to 8 open streams, half of it for
// each of up to 16, and so on. Over 64 streams each still gets one chunk at a time.
type Receivers struct {
	conn    *Conn
	replica string
	timing  timing
	bundled func(subject string, f proto.Message) // see OnBundled
	watches func() bool                           // see TellIf, as for
	watched func(subject string) bool             // …this
	lends   func(*nats.Msg) any                   // see LendBy
	results *nats.Subscription
	replies *nats.Subscription
	wake    chan struct{} // room for one: a credit is due
	lingers *time.Timer   // over: credits that may wait a little are due
	views   []view        // memory of the results' callback, as are
	groups  []group       // …these
	frames  []sizedFrame  // …and these
	subject string        // of the last result, likewise
	parsed  schemas.Subject
	began   time.Time
	assigner
	stop    chan struct{}
	stopped chan struct{}

	mu      sync.Mutex
	waits   atomic.Int32         // streams that are open; changed with mu held
	open    map[string]*Receiver // by dispatch
	ready   []*Receiver          // with a credit that is due
	stale   int                  // of them closed since
	buried  tombstones           // times since began
	about   time.Duration        // since began: not before now, and not after the next tick
	owed    []owedCredit         // acknowledgements of closed dispatches
	patient int                  // of them for runners that stand many
	memory  []byte               // for credits that go out together; belongs to the writer
	nowait  bool                 // what is ready or owed goes out now
	pending bool                 // lingers runs
	waiting map[string]*waiter   // by order id
	dropped map[DropReason]uint64
	slots   int // what the windows are shared out for; a power of two ≥ fullSlots
	closed  bool
}

type owedCredit struct {
	ref     schemas.RunnerRef
	credit  credit
	bundles bool // the runner reads RunnerWorkCredits
	patient bool // …and stands many results that are not acknowledged
	settled bool // it may ride on assignments
}

// NewReceivers draws a replica id and subscribes the results and replies that runners send to it.
func NewReceivers(c *Conn, options ...Option) (*Receivers, error) {
	r := &Receivers{
		conn: c, replica: schemas.NewID(), timing: newTiming(options),
		wake: make(chan struct{}, 1), stop: make(chan struct{}), stopped: make(chan struct{}),
		open: make(map[string]*Receiver), waiting: make(map[string]*waiter),
		dropped: make(map[DropReason]uint64), slots: fullSlots, lingers: time.NewTimer(time.Hour), began: time.Now(),
	}
	r.lingers.Stop()
	r.about = r.timing.tick()
	var err error
	if r.results, err = c.Subscribe(schemas.ResultsOf(r.replica), r.result); err != nil {
		return nil, err
	}
	if r.replies, err = c.Subscribe(schemas.RepliesOf(r.replica), r.reply); err != nil {
		return nil, errors.Join(err, unsubscribe(r.results))
	}
	go r.write()
	return r, nil
}

// OnBundled has f called for each frame, but chunks, that came on a data subject because it was bundled with chunks, with the ctl
// subject on which it would have come alone. f runs in the subscription's callback and must not block. To be set before the first
// Open.
func (r *Receivers) OnBundled(f func(subject string, m proto.Message)) { r.bundled = f }

// TellIf has OnBundled's function called only while somebody watches, and for subjects for which watched is true; nil: always, for all.
// Whether somebody watches at all is asked for each message, so it should cost little. To be set before the first Open.
func (r *Receivers) TellIf(somebody func() bool, watched func(subject string) bool) {
	r.watches, r.watched = somebody, watched
}

// tells reports whether somebody may have to be told of what comes, or leaves, unseen.
func (r *Receivers) tells() bool { return r.bundled != nil && (r.watches == nil || r.watches()) }

// Replica is the random id of this replica's boot, `<c>` in the subjects.
func (r *Receivers) Replica() string { return r.replica }

// Open begins to wait for the result of one dispatch: before its assignment is published. windowBytes is asked for, from 512
// KiB to 4 MiB (0 means 1 MiB, others are moved into the range); Receiver.Window is what the assignment should say. A stream
// that is open for the dispatch is closed.
func (r *Receivers) Open(ref schemas.RunnerRef, session, dispatch string, windowBytes int64) *Receiver {
	one := &Receiver{}
	r.OpenAt(one, ref, session, dispatch, windowBytes)
	return one
}

// OpenAt is Open in memory of the caller: a zero Receiver, or one of r's that was closed and is Written.
func (r *Receivers) OpenAt(one *Receiver, ref schemas.RunnerRef, session, dispatch string, windowBytes int64) {
	most := max(clampWindow(windowBytes), MinWindow)
	r.mu.Lock()
	closed, before := r.closed, r.open[dispatch]
	if !closed {
		if before == nil {
			r.waits.Add(1)
		}
		r.open[dispatch] = one
	}
	window, resized := r.share()
	one.begin(r, ref, session, dispatch, most, window)
	r.mu.Unlock()
	if closed {
		one.fail(ErrClosed)
	}
	if before != nil {
		before.fail(ErrClosed)
	}
	if resized {
		r.resize(window)
	}
}

// resize gives all streams another window.
func (r *Receivers) resize(window int64) {
	for _, one := range r.streams() {
		if one.resize(window) {
			r.enqueue(one, true)
		}
	}
}

func (r *Receivers) streams() []*Receiver {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.open))
}

// Dropped counts the messages that were dropped since the start, by reason.
func (r *Receivers) Dropped() map[DropReason]uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.dropped)
}

// Close ends all streams (ErrClosed) and waits for the writer.
func (r *Receivers) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	open := r.open
	r.open = nil
	r.mu.Unlock()
	for _, one := range open {
		one.fail(ErrClosed)
	}
	close(r.stop)
	<-r.stopped
	return errors.Join(unsubscribe(r.results), unsubscribe(r.replies))
}

// share fits the windows to the number of open streams: it returns the window of one and whether it has changed. Growing
// waits until a quarter is used, so that a number around a boundary does not flap. The lock is held.
func (r *Receivers) share() (window int64, changed bool) {
	before := r.slots
	for len(r.open) > r.slots {
		r.slots *= 2
	}
	for r.slots > fullSlots && len(r.open) <= r.slots/4 {
		r.slots /= 2
	}
	return connectionWindow / int64(r.slots), r.slots != before
}

// forget takes a stream out, remembers its dispatch, and sends its last credit, if any.
func (r *Receivers) forget(one *Receiver, last owedCredit, owed bool) {
	r.mu.Lock()
	if r.open[one.dispatch] != one {
		r.mu.Unlock()
		return
	}
	if one.queued {
		r.stale++
	}
	if owed {
		if last.patient {
			r.patient++
		}
		r.owed = append(r.owed, last)
		r.schedule(!one.bundles)
	}
	delete(r.open, one.dispatch)
	r.waits.Add(-1)
	r.buried.add(one.dispatch, owner{one.ref, one.session}, r.about)
	window, resized := r.share()
	r.mu.Unlock()
	if resized {
		r.resize(window)
	}
}

func (r *Receivers) drop(reason DropReason) {
	r.mu.Lock()
	r.dropped[reason]++
	r.mu.Unlock()
}

// settled takes out of what is owed which dispatches of a session are settled, and appends it to body as a RunnerWorkAssignments says it.
// While ops watches something it takes none: that may be the credit of one dispatch, and ops sees no assignments but copies.
func (r *Receivers) settled(ref schemas.RunnerRef, session string, body []byte) []byte {
	if r.tells() {
		return body
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	kept := r.owed[:0]
	n := 0
	for _, o := range r.owed {
		if !o.settled || o.credit.session != session || o.ref != ref || n == creditsBundled {
			kept = append(kept, o)
			continue
		}
		n++
		if o.patient {
			r.patient--
		}
		body = appendString(body, settledNumber, o.credit.dispatch)
	}
	clear(r.owed[len(kept):])
	r.owed = kept
	return body
}

// enqueue has the writer send the credit of one. One that is not urgent may wait a little for others.
func (r *Receivers) enqueue(one *Receiver, urgent bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !one.queued {
		one.queued = true
		r.ready = append(r.ready, one)
	}
	r.schedule(urgent)
}

// Credits that no runner waits for go out together: when there are some, and else within restFor. A runner takes no more work when
// many of its results are not acknowledged: 16 for one that doesn't know chunks_tell, 256 for others, which are older and newer.
const (
	some    = 4
	many    = 32
	restFor = 8 * time.Millisecond
)

// schedule wakes the writer, now or soon. The lock is held.
func (r *Receivers) schedule(urgent bool) {
	switch {
	case r.nowait:
	case urgent || (len(r.ready)-r.stale+len(r.owed)-r.patient)*(many/some)+r.patient >= many:
		r.nowait = true
		poke(r.wake)
	case !r.pending:
		r.pending = true
		r.lingers.Reset(restFor)
	}
}

// write is the one goroutine that publishes credit. A credit that the link does not take is not kept: the runner asks
// (resume) or the next keepalive says the same.
func (r *Receivers) write() {
	defer close(r.stopped)
	defer r.lingers.Stop()
	tick := time.NewTicker(r.timing.tick())
	defer tick.Stop()
	var due []*Receiver
	var batch []owedCredit
	for stop := false; !stop; {
		select {
		case <-r.stop:
			stop = true // after what is owed
		case <-r.wake:
			runtime.Gosched() // one turn for others who are about to consume: one write for all
			r.assignLeft()
		case <-r.lingers.C:
		case now := <-tick.C:
			for _, one := range r.streams() {
				if one.age(now) {
					r.enqueue(one, true)
				}
			}
		}
		now := time.Now()
		r.mu.Lock()
		due, r.ready, r.stale = r.ready, due[:0], 0
		for _, one := range due {
			one.queued = false
		}
		batch = append(batch, r.owed...)
		clear(r.owed)
		r.owed, r.patient = r.owed[:0], 0
		r.nowait, r.pending = false, false
		r.lingers.Stop()
		r.about = now.Sub(r.began) + r.timing.tick()
		r.buried.expire(now.Sub(r.began) - r.timing.tombstone)
		r.mu.Unlock()
		for _, one := range due {
			if c, ok := one.credit(now); ok {
				batch = append(batch, c)
			}
		}
		clear(due)
		r.send(batch)
		clear(batch)
		batch = batch[:0]
	}
}

// creditsBundled is the most credits in one message, in whatever form.
const creditsBundled = 256

// send publishes credits: those for runners that read RunnerWorkCredits together, the others one by one.
func (r *Receivers) send(batch []owedCredit) {
	slices.SortStableFunc(batch, func(a, b owedCredit) int {
		if a.bundles != b.bundles {
			if a.bundles {
				return -1
			}
			return 1
		}
		return cmp.Or(strings.Compare(a.ref.Tenant, b.ref.Tenant), strings.Compare(a.ref.Runner, b.ref.Runner))
	})
	for len(batch) > 0 {
		n := 1
		for batch[0].bundles && n < min(len(batch), creditsBundled) && batch[n].bundles && batch[n].ref == batch[0].ref {
			n++
		}
		if n == 1 {
			_ = r.conn.Publish(schemas.CreditSubject(batch[0].ref, batch[0].credit.dispatch), batch[0].credit.message())
		} else {
			r.memory = r.memory[:0]
			for _, o := range batch[:n] {
				r.memory = appendCredit(r.memory, o.credit)
			}
			_ = r.conn.publish(&nats.Msg{
				Subject: schemas.CreditSubject(batch[0].ref, together), Header: frameHeaders["RunnerWorkCredits"], Data: r.memory,
			})
		}
		batch = batch[n:]
	}
}
