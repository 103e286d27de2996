package bus

import (
	"errors"
	"maps"
	"runtime"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
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
	results *nats.Subscription
	replies *nats.Subscription
	wake    chan struct{} // room for one: a credit may be due
	stop    chan struct{}
	stopped chan struct{}

	mu      sync.Mutex
	open    map[string]*Receiver // by dispatch
	order   []*Receiver          // a new slice at each change
	buried  tombstones
	owed    map[string]owedCredit // by dispatch: acknowledgements of closed dispatches
	waiting map[string]*waiter    // by order id
	dropped map[DropReason]uint64
	slots   int // what the windows are shared out for; a power of two ≥ fullSlots
	closed  bool
}

type owedCredit struct {
	subject string
	credit  *runbusv1.RunnerWorkCredit
}

// NewReceivers draws a replica id and subscribes the results and replies that runners send to it.
func NewReceivers(c *Conn, options ...Option) (*Receivers, error) {
	r := &Receivers{
		conn: c, replica: schemas.NewID(), timing: newTiming(options),
		wake: make(chan struct{}, 1), stop: make(chan struct{}), stopped: make(chan struct{}),
		open: make(map[string]*Receiver), owed: make(map[string]owedCredit), waiting: make(map[string]*waiter),
		dropped: make(map[DropReason]uint64), slots: fullSlots,
	}
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

// Replica is the random id of this replica's boot, `<c>` in the subjects.
func (r *Receivers) Replica() string { return r.replica }

// Open begins to wait for the result of one dispatch: before its assignment is published. windowBytes is asked for, from 512
// KiB to 4 MiB (0 means 1 MiB, others are moved into the range); Receiver.Window is what the assignment should say. A stream
// that is open for the dispatch is closed.
func (r *Receivers) Open(ref schemas.RunnerRef, session, dispatch string, windowBytes int64) *Receiver {
	most := max(clampWindow(windowBytes), MinWindow)
	one := &Receiver{all: r, ref: ref, session: session, dispatch: dispatch, most: most, ready: make(chan struct{}, 1)}
	r.mu.Lock()
	before := r.open[dispatch]
	if r.closed {
		one.err = ErrClosed
	} else {
		r.open[dispatch] = one
		r.buried.remove(dispatch)
		delete(r.owed, dispatch)
		r.reorder()
	}
	window, resized := r.share()
	one.in = newInbox(min(most, window), most)
	others := r.order
	r.mu.Unlock()
	if before != nil {
		before.fail(ErrClosed)
	}
	if resized {
		for _, other := range others {
			other.resize(window)
		}
		r.stir()
	}
	return one
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
	order := r.order
	r.open, r.order = nil, nil
	r.mu.Unlock()
	for _, one := range order {
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
func (r *Receivers) forget(one *Receiver, last *runbusv1.RunnerWorkCredit) {
	r.mu.Lock()
	if r.open[one.dispatch] != one {
		r.mu.Unlock()
		return
	}
	if last != nil {
		r.owed[one.dispatch] = owedCredit{schemas.CreditSubject(one.ref, one.dispatch), last}
	}
	delete(r.open, one.dispatch)
	r.reorder()
	r.buried.add(one.dispatch, tombstone{ref: one.ref, session: one.session, at: time.Now()})
	window, resized := r.share()
	others := r.order
	r.mu.Unlock()
	if resized {
		for _, other := range others {
			other.resize(window)
		}
	}
	r.stir()
}

// reorder makes the writer's list anew. The lock is held.
func (r *Receivers) reorder() {
	order := make([]*Receiver, 0, len(r.open))
	for _, one := range r.open {
		order = append(order, one)
	}
	r.order = order
}

func (r *Receivers) drop(reason DropReason) {
	r.mu.Lock()
	r.dropped[reason]++
	r.mu.Unlock()
}

func (r *Receivers) stir() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// result runs in the subscription's callback: it publishes nothing.
func (r *Receivers) result(msg *nats.Msg) {
	subject, err := schemas.Parse(msg.Subject)
	if err != nil {
		r.drop(DropInvalid)
		return
	}
	r.mu.Lock()
	one := r.open[subject.Dispatch]
	r.mu.Unlock()
	reason := DropLate
	if one != nil {
		reason = one.receive(msg, subject)
	}
	late := reason == DropLate
	if late {
		reason = r.late(msg, subject)
	}
	if reason != "" {
		r.drop(reason)
	}
	if late {
		r.stir() // it may owe an acknowledgement now
	}
}

// late looks at a message of a dispatch that is not open. What its runner keeps until it is acknowledged is acknowledged: the
// result, and whatever a resume speaks of. The window stays shut, so that a work that still runs ends as orphaned.
func (r *Receivers) late(msg *nats.Msg, subject schemas.Subject) DropReason {
	if isNoResponders(msg) {
		return ""
	}
	r.mu.Lock()
	stone, known := r.buried.get(subject.Dispatch)
	r.mu.Unlock()
	switch {
	case !known:
		return DropUnknown
	case stone.ref != subject.Ref:
		return DropForeign
	}
	var acknowledged uint64
	var session string
	reason := DropLate
	switch TypeOf(msg) {
	case "RunnerWorkResume":
		m := &runbusv1.RunnerWorkResume{}
		if Decode(msg, m) != nil {
			return DropInvalid
		}
		acknowledged, session, reason = m.GetSent(), m.GetSession(), ""
	case "RunnerWorkResult":
		m := &runbusv1.RunnerWorkResult{}
		if Decode(msg, m) != nil {
			return DropInvalid
		}
		acknowledged, session = m.GetSeq(), m.GetSession()
	default:
		return DropLate
	}
	if session != stone.session {
		return DropSession
	}
	credit := &runbusv1.RunnerWorkCredit{DispatchId: subject.Dispatch, Session: session, Acknowledged: acknowledged}
	r.mu.Lock()
	r.owed[subject.Dispatch] = owedCredit{schemas.CreditSubject(subject.Ref, subject.Dispatch), credit}
	r.mu.Unlock()
	return reason
}

// write is the one goroutine that publishes credit. A credit that the link does not take is not kept: the runner asks
// (resume) or the next keepalive says the same.
func (r *Receivers) write() {
	defer close(r.stopped)
	tick := time.NewTicker(r.timing.tick())
	defer tick.Stop()
	for stop := false; !stop; {
		select {
		case <-r.stop:
			stop = true // after what is owed
		case <-r.wake:
			runtime.Gosched() // one turn for others who are about to consume: one write for all
		case <-tick.C:
		}
		now := time.Now()
		r.mu.Lock()
		order, owed := r.order, r.owed
		r.owed = make(map[string]owedCredit)
		r.buried.expire(now.Add(-r.timing.tombstone))
		r.mu.Unlock()
		for _, one := range order {
			if c := one.credit(now); c != nil {
				_ = r.conn.Publish(schemas.CreditSubject(one.ref, one.dispatch), c)
			}
		}
		for _, o := range owed {
			_ = r.conn.Publish(o.subject, o.credit)
		}
	}
}
