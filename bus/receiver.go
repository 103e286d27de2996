package bus

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Receiver is the result stream of one dispatch at the replica that waits for it. One goroutine calls Next; Done and Close
// may be called from any.
type Receiver struct {
	all               *Receivers
	ref               schemas.RunnerRef
	session, dispatch string
	most              int64         // window asked for
	ready             chan struct{} // room for one: Next has something to look at

	queued bool // guarded by all.mu: it is in all.ready or all.lazy

	mu      sync.Mutex
	in      inbox
	bundles bool   // the runner sends bundles, so it reads RunnerWorkCredits
	batch   uint64 // number of the message in which the assignment left with others; 0 for alone
	nobody  bool   // the assignment reached nobody
	err     error
}

// ReplySubject is the reply subject of the dispatch's assignment. If nobody is subscribed to the assignment's subject, the
// server says so there, and Next returns ErrNoResponders.
func (r *Receiver) ReplySubject() string {
	return schemas.ResultCtlSubject(r.ref, r.all.replica, r.dispatch)
}

// Window is how many bytes of chunks the runner may have under way now: for RunnerWorkAssignment.window_bytes. It may be
// less than Open was asked for; credit tells the runner of changes.
func (r *Receiver) Window() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.in.window
}

// Next waits for the next frame: in the order of their numbers, each once. It returns ErrNoResponders when the assignment
// reached nobody, which is only said before the first frame; then it may be published again and Next be called again. After
// the result there are no more frames. After Close it returns ErrClosed.
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
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return nil, r.err
	}
	nobody := r.nobody
	r.nobody = false
	if f, ok := r.in.next(); ok {
		return f, nil
	}
	if nobody {
		return nil, fmt.Errorf("dispatch %s: %w", r.dispatch, ErrNoResponders)
	}
	return nil, nil
}

// Ready has something to receive when Try may have something new since it had nothing: for a select, in the one goroutine that
// calls Try until it has nothing.
func (r *Receiver) Ready() <-chan struct{} { return r.ready }

// Done says that f, and every frame before it, was consumed: its bytes are the runner's to send again. The credit for it goes
// out when half a window is free, at once for the result, and otherwise within 10 s.
func (r *Receiver) Done(f Frame) {
	r.mu.Lock()
	due, urgent := false, false
	if r.err == nil {
		r.in.done(f.GetSeq())
		due, urgent = r.in.due, !r.bundles || r.in.urgent()
	}
	r.mu.Unlock()
	if due {
		r.all.enqueue(r, urgent)
	}
}

// Close ends the stream. What came until then is acknowledged. What the runner sends afterwards is late: dropped and
// counted, but acknowledged when the runner resumes or sends its result, so that it can let go of it.
func (r *Receiver) Close() {
	last, owed := r.fail(ErrClosed)
	r.all.forget(r, last, owed)
}

// fail ends the stream. It returns the credit for what was received and not acknowledged yet, if there is something; its
// window is shut.
func (r *Receiver) fail(err error) (last credit, owed bool) {
	r.mu.Lock()
	if r.err == nil {
		r.err = err
		if r.in.last > r.in.acked {
			last, owed = credit{dispatch: r.dispatch, session: r.session, acknowledged: r.in.last}, true
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

// nobodyHeard notes that the assignment reached nobody, unless a frame shows that it did.
func (r *Receiver) nobodyHeard() {
	r.mu.Lock()
	r.nobody = r.in.last == 0
	r.mu.Unlock()
	r.nudge()
}

// receive takes one message of the dispatch in. It runs in the subscription's callback, so it publishes nothing.
func (r *Receiver) receive(msg *nats.Msg, subject schemas.Subject) (reason DropReason) {
	if subject.Ref != r.ref {
		return DropForeign
	}
	if subject.Kind == schemas.KindResultCtl && isNoResponders(msg) {
		r.nobodyHeard()
		return ""
	}
	if subject.Kind == schemas.KindResultCtl && TypeOf(msg) == "RunnerWorkResume" {
		return r.resume(msg)
	}
	var few [8]sizedFrame
	frames, err := decodeFrames(msg, subject.Kind, few[:0])
	if err != nil {
		return DropInvalid
	}
	bundled := TypeOf(msg) == framesName
	return r.take(frames, time.Now(), bundled, bundled && len(frames) > 1 && subject.Kind == schemas.KindResultData)
}

// tell gives what ops could not see of frames to it, if it watches.
func (r *Receiver) tell(frames []sizedFrame) {
	subject := ""
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
		r.all.bundled(subject, f.frame)
	}
}

// take takes frames in that came together on the subjects of the stream's runner. Those that ops could not see are told to it.
func (r *Receiver) take(frames []sizedFrame, now time.Time, bundled, hidden bool) (reason DropReason) {
	for _, f := range frames {
		if reason := r.belongs(f.frame.GetDispatchId(), f.frame.GetSession()); reason != "" {
			return reason
		}
	}
	if hidden && r.all.bundled != nil {
		r.tell(frames)
	}
	r.mu.Lock()
	if r.err != nil {
		r.mu.Unlock()
		return DropLate
	}
	r.bundles = r.bundles || bundled
	some := false
	for _, f := range frames {
		switch r.in.offerSized(f, now, r.all.timing) {
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
	due := r.in.due
	r.mu.Unlock()
	if due {
		r.all.enqueue(r, true)
	}
	if some {
		r.nudge()
	}
	return reason
}

func (r *Receiver) resume(msg *nats.Msg) DropReason {
	m := &runbusv1.RunnerWorkResume{}
	if err := Decode(msg, m); err != nil {
		return DropInvalid
	}
	if reason := r.belongs(m.GetDispatchId(), m.GetSession()); reason != "" {
		return reason
	}
	r.mu.Lock()
	if r.err != nil {
		r.mu.Unlock()
		return DropLate
	}
	r.in.resumed(m.GetSent())
	r.mu.Unlock()
	r.all.enqueue(r, true)
	return ""
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

// credit is the credit that is due now, false if none is.
func (r *Receiver) credit(now time.Time) (c credit, bundles, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return credit{}, false, false
	}
	c, ok = r.in.credit(now)
	c.dispatch, c.session = r.dispatch, r.session
	return c, r.bundles, ok
}

// look reports whether time has made a credit due.
func (r *Receiver) look(now time.Time) (due bool) {
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
	return r.in.due
}
