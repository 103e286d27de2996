package bus

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Receiver is the result stream of one dispatch at the replica that waits for it. One goroutine at a time calls Next, Try, Done and Return;
// Close may be called from any. The zero value is ready for Receivers.OpenAt.
type Receiver struct {
	all   *Receivers
	ready chan struct{} // room for one: Next has something to look at
	news  atomic.Bool   // there may be something that Try has not seen

	// What Try has taken out, so that what came together takes the lock once. It belongs to who calls Try.
	got  []Frame
	at   int // got up to here was given out
	few  [5]Frame
	done uint64 // number up to which is consumed

	ends      bool          // all up to the result is in got, of a runner that reads RunnerWorkCredits; belongs to who calls Try
	window    atomic.Int64  // as in has it
	batch     atomic.Uint64 // number of the message in which the assignment left with others; 0 for alone
	unwritten atomic.Int64  // assignments of it that wait for their turn, or are being written

	queued bool // guarded by all.mu: it is in all.ready

	mu sync.Mutex
	// These stay as they are while the stream is open.
	ref               schemas.RunnerRef
	session, dispatch string
	most              int64 // window asked for

	in      inbox
	parts   parts
	bundles bool // the runner sends bundles, so it reads RunnerWorkCredits
	patient bool // it stands many results that are not acknowledged
	settles bool // it reads RunnerWorkAssignments.settled
	nobody  bool // the assignment reached nobody
	err     error
}

// begin makes r the stream of a dispatch. Somebody who found it when it was another's may still look at it, hence the lock.
func (r *Receiver) begin(all *Receivers, ref schemas.RunnerRef, session, dispatch string, most, window int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ready == nil {
		r.all, r.ready = all, make(chan struct{}, 1)
	}
	select {
	case <-r.ready:
	default:
	}
	r.ref, r.session, r.dispatch, r.most = ref, session, dispatch, most
	r.in = inbox{}
	r.in.init(min(most, window), most)
	r.window.Store(r.in.window)
	r.batch.Store(0)
	r.bundles, r.nobody, r.err = false, false, nil
	r.got, r.at, r.done, r.ends, r.patient, r.settles = r.few[:0], 0, 0, false, false, false
	r.parts.acceptedUsed, r.parts.chunkUsed, r.parts.resultUsed, r.parts.wholeUsed = false, false, false, false
	r.news.Store(false)
}

// ReplySubject is the reply subject of the dispatch's assignment. If nobody is subscribed to the assignment's subject, the
// server says so there, and Next returns ErrNoResponders.
func (r *Receiver) ReplySubject() string {
	return schemas.ResultCtlSubject(r.ref, r.all.replica, r.dispatch)
}

// Window is how many bytes of chunks the runner may have under way now: for RunnerWorkAssignment.window_bytes. It may be
// less than Open was asked for; credit tells the runner of changes.
func (r *Receiver) Window() int64 { return r.window.Load() }

// Next waits for the next frame: in the order of their numbers, each once. It returns ErrNoResponders when the assignment
// reached nobody, which is only said before the first frame; then it may be published again and Next be called again. After
// the result there are no more frames. After Close it returns ErrClosed. A frame is the Receiver's: it may not be used after OpenAt
// of the same; what is in it, but the frame itself and after Return the bytes of its chunk, may.
func (r *Receiver) Next(ctx context.Context) (Frame, error) {
	for {
		if f, err := r.Try(); f != nil || err != nil {
			return f, err
		}
		select {
		case <-r.ready:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Try is Next without waiting: no frame and no error when there is nothing yet.
func (r *Receiver) Try() (Frame, error) {
	if r.at == len(r.got) {
		if !r.news.Load() {
			return nil, nil
		}
		if err := r.look(); err != nil {
			return nil, err
		}
		if len(r.got) == 0 {
			return nil, nil
		}
	}
	f := r.got[r.at]
	r.got[r.at] = nil
	r.at++
	return f, nil
}

// look takes out what has come, as much as there is memory for.
func (r *Receiver) look() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.got, r.at = r.few[:0], 0
	if r.err != nil {
		return r.err
	}
	nobody := r.nobody
	r.nobody = false
	r.news.Store(false)
	for len(r.got) < cap(r.got) {
		var ok bool
		if r.got, ok = r.in.next(r.got); !ok {
			break
		}
	}
	r.news.Store(r.in.handed < r.in.last)
	r.ends = r.bundles && r.in.final != 0 && r.in.handed == r.in.final
	if nobody && len(r.got) == 0 {
		return fmt.Errorf("dispatch %s: %w", r.dispatch, ErrNoResponders)
	}
	return nil
}

// Ready has something to receive when Try may have something new since it had nothing: for a select, in the one goroutine that
// calls Try until it has nothing.
func (r *Receiver) Ready() <-chan struct{} { return r.ready }

// Done says that f, and every frame before it, was consumed: the runner may send as many bytes again. Those of f stay what they are for who
// still reads them; see Return. The credit for it goes out when half a window is free, for the result with Close or within a second, and
// otherwise within 10 s.
func (r *Receiver) Done(f Frame) {
	r.done = max(r.done, f.GetSeq())
	if r.at < len(r.got) && chunkBytes(f) < shareWithin {
		return // what Try has taken out together is consumed together, unless it is large
	}
	if r.ends && r.at == len(r.got) {
		return // Close is near and owes the credit, or the next tick finds it due
	}
	r.mu.Lock()
	due, urgent := false, false
	if r.err == nil {
		r.in.done(r.done)
		due, urgent = r.in.due, !r.bundles || r.in.urgent()
	}
	r.mu.Unlock()
	if due {
		r.all.enqueue(r, urgent)
	}
}

// Written reports whether each assignment that Assign took has been written, or has failed: until then what writes them looks at r and at
// the bodies, also after Close, and whatever a runner has sent, which may have guessed the dispatch. It may be called from any goroutine.
func (r *Receiver) Written() bool { return r.unwritten.Load() == 0 }

// Close ends the stream. What came until then is acknowledged. What the runner sends afterwards is late: dropped and
// counted, but acknowledged when the runner resumes or sends its result, so that it can let go of it.
func (r *Receiver) Close() {
	last, owed := r.fail(ErrClosed)
	r.all.forget(r, last, owed)
}

// fail ends the stream. It returns the credit for what was received and not acknowledged yet, if there is something; its
// window is shut.
func (r *Receiver) fail(err error) (last owedCredit, owed bool) {
	r.mu.Lock()
	r.news.Store(true)
	if r.err == nil {
		r.err = err
		if r.in.last > r.in.acked {
			last.ref, last.bundles, last.patient, last.settled = r.ref, r.bundles, r.patient, r.settles && r.in.last == r.in.final
			last.credit, owed = credit{dispatch: r.dispatch, session: r.session, acknowledged: r.in.last}, true
		}
		clear(r.in.queue)
		r.in.queue = nil
	}
	r.mu.Unlock()
	r.nudge()
	return last, owed
}

// Nudge makes Ready have something, for one who waits there for something of its own too.
func (r *Receiver) Nudge() { r.nudge() }

func (r *Receiver) nudge() {
	select {
	case r.ready <- struct{}{}:
	default:
	}
}

// nobodyHeard notes that the assignment reached nobody, unless a frame shows that it did. It returns false if r is not that meant, which
// is asked with the lock held.
func (r *Receiver) nobodyHeard(meant func() bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !meant() {
		return false
	}
	r.nobody = r.in.last == 0
	r.news.Store(true)
	r.nudge()
	return true
}

// receive takes one message of the dispatch in. It runs in the subscription's callback, so it publishes nothing.
func (r *Receiver) receive(msg *nats.Msg, subject schemas.Subject) (reason DropReason) {
	if subject.Kind == schemas.KindResultCtl && isNoResponders(msg) {
		if r.nobodyHeard(func() bool { return r.ref == subject.Ref && r.dispatch == subject.Dispatch }) {
			return ""
		}
		return DropForeign
	}
	if subject.Kind == schemas.KindResultCtl && TypeOf(msg) == "RunnerWorkResume" {
		return r.resume(msg, subject.Ref)
	}
	views, err := viewFrames(msg, subject.Kind, r.all.views[:0])
	if err != nil {
		return DropInvalid
	}
	r.all.views = views
	return r.take(views, arrival{
		ref: subject.Ref, dispatch: subject.Dispatch, bytes: len(msg.Data), at: time.Now(),
		bundled: TypeOf(msg) == framesName || len(views) > 0 && views[0].field == wholeNumber, hidden: subject.Kind == schemas.KindResultData && r.all.tells(),
		lent: lentBy(r.all.lender(msg), views),
	})
}

// arrival is what is known of frames that came together.
type arrival struct {
	ref      schemas.RunnerRef // on whose subjects
	dispatch string            // by which the stream was found
	bytes    int               // of the message
	at       time.Time
	bundled  bool // several could have come, so the runner reads RunnerWorkCredits
	hidden   bool // ops could not see them, and may watch
	lent     lender
}

// tell gives what ops could not see of frames to it, if it watches. The lock is held.
func (r *Receiver) tell(frames []sizedFrame) {
	subject := ""
	var few [8]Frame
	told := few[:0]
	for _, f := range frames {
		if frameKind(f.frame) == schemas.KindResultData {
			continue
		}
		if subject == "" {
			subject = r.ReplySubject()
			if watched := r.all.watched; watched != nil && !watched(subject) {
				return
			}
		}
		if f.whole != nil {
			told = f.whole.appendTo(told)
		}
		told = append(told, f.frame)
	}
	for _, f := range told {
		if frameKind(f) != schemas.KindResultData {
			r.all.bundled(subject, f)
		}
	}
}

// take takes frames in that came together. Those that ops could not see are told to it.
func (r *Receiver) take(views []view, a arrival) DropReason {
	r.mu.Lock()
	some, reason := r.offer(views, a)
	due := r.in.due && r.err == nil
	r.mu.Unlock()
	if due {
		r.all.enqueue(r, true)
	}
	if some {
		r.nudge()
	}
	return reason
}

// offer decodes frames and puts those into the queue that come next; some tells that there are such. The lock is held.
func (r *Receiver) offer(views []view, a arrival) (some bool, reason DropReason) {
	switch {
	case r.dispatch != a.dispatch: // closed, and another's since it was found
		return false, DropLate
	case r.ref != a.ref:
		return false, DropForeign
	}
	known := names{dispatch: r.dispatch, session: r.session}
	frames := r.all.frames[:0]
	for i := range views {
		if reason := r.belongs(string(views[i].dispatch), string(views[i].session)); reason != "" {
			return false, reason
		}
		// A piece of Arrow keeps all of a small message, so only those do that are among the first to be taken.
		f, err := views[i].decode(&known, &r.parts, a.bytes, len(r.in.queue)+len(frames) < len(r.in.few))
		if err != nil {
			return false, DropInvalid
		}
		f.lent = a.lent
		frames = append(frames, f)
	}
	defer clear(frames)
	r.all.frames = frames
	if a.hidden {
		r.tell(frames)
	}
	if r.err != nil {
		return false, DropLate
	}
	r.bundles = r.bundles || a.bundled
	for _, f := range frames {
		switch r.in.offerSized(f, a.at, r.all.timing) {
		case taken:
			r.nobody, some = false, true
		case duplicate:
			reason = DropDuplicate
		case gap:
			reason = DropGap
		case overrun:
			reason = DropOverrun
		}
	}
	if some {
		r.news.Store(true)
	}
	return some, reason
}

func (r *Receiver) resume(msg *nats.Msg, ref schemas.RunnerRef) DropReason {
	m := &runbusv1.RunnerWorkResume{}
	if err := Decode(msg, m); err != nil {
		return DropInvalid
	}
	r.mu.Lock()
	reason := r.belongs(m.GetDispatchId(), m.GetSession())
	switch {
	case r.ref != ref:
		reason = DropForeign
	case reason == "" && r.err != nil:
		reason = DropLate
	case reason == "":
		r.in.resumed(m.GetSent())
	}
	all := r.all
	r.mu.Unlock()
	if reason == "" {
		all.enqueue(r, true)
	}
	return reason
}

// belongs compares what a frame says of itself with the dispatch.
func (r *Receiver) belongs(dispatch, session string) DropReason {
	switch {
	case dispatch != r.dispatch:
		return DropInvalid
	case session != r.session:
		return DropSession
	}
	return ""
}

// credit is the credit that is due now, and for whom; false if none is.
func (r *Receiver) credit(now time.Time) (c owedCredit, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return owedCredit{}, false
	}
	c.ref, c.bundles = r.ref, r.bundles
	c.credit, ok = r.in.credit(now)
	c.credit.dispatch, c.credit.session = r.dispatch, r.session
	return c, ok
}

// age reports whether time has made a credit due.
func (r *Receiver) age(now time.Time) (due bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return false
	}
	r.in.look(now, r.all.timing)
	return r.in.due
}

// resize changes the window. It reports whether a credit is due.
func (r *Receiver) resize(window int64) (due bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return false
	}
	r.in.resize(min(r.most, window))
	r.window.Store(r.in.window)
	return r.in.due
}
