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

	mu     sync.Mutex
	in     *inbox
	nobody bool // the assignment reached nobody
	err    error
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
		r.mu.Lock()
		if r.err != nil {
			err := r.err
			r.mu.Unlock()
			return nil, err
		}
		f, ok := r.in.next()
		nobody := r.nobody
		r.nobody = false
		r.mu.Unlock()
		switch {
		case ok:
			return f, nil
		case nobody:
			return nil, fmt.Errorf("dispatch %s: %w", r.dispatch, ErrNoResponders)
		}
		select {
		case <-r.ready:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Done says that f, and every frame before it, was consumed: its bytes are the runner's to send again. The credit for it goes
// out when half a window is free, at once for the result, and otherwise within 10 s.
func (r *Receiver) Done(f Frame) {
	r.mu.Lock()
	due := false
	if r.err == nil {
		r.in.done(f.GetSeq())
		due = r.in.due
	}
	r.mu.Unlock()
	if due {
		r.all.stir()
	}
}

// Close ends the stream. What came until then is acknowledged. What the runner sends afterwards is late: dropped and
// counted, but acknowledged when the runner resumes or sends its result, so that it can let go of it.
func (r *Receiver) Close() {
	last := r.fail(ErrClosed)
	r.all.forget(r, last)
}

// fail ends the stream. It returns the credit for what was received and not acknowledged yet, nil if there is nothing; its
// window is shut.
func (r *Receiver) fail(err error) (last *runbusv1.RunnerWorkCredit) {
	r.mu.Lock()
	if r.err == nil {
		r.err = err
		if r.in.last > r.in.acked {
			last = &runbusv1.RunnerWorkCredit{DispatchId: r.dispatch, Session: r.session, Acknowledged: r.in.last}
		}
		r.in.queue = nil
	}
	r.mu.Unlock()
	r.nudge()
	return last
}

func (r *Receiver) nudge() {
	select {
	case r.ready <- struct{}{}:
	default:
	}
}

// receive takes one message of the dispatch in. It runs in the subscription's callback, so it publishes nothing.
func (r *Receiver) receive(msg *nats.Msg, subject schemas.Subject) (reason DropReason) {
	if subject.Ref != r.ref {
		return DropForeign
	}
	if subject.Kind == schemas.KindResultCtl && isNoResponders(msg) {
		r.mu.Lock()
		r.nobody = r.in.last == 0
		r.mu.Unlock()
		r.nudge()
		return ""
	}
	if subject.Kind == schemas.KindResultCtl && TypeOf(msg) == "RunnerWorkResume" {
		return r.resume(msg)
	}
	f, err := decodeFrame(msg, subject.Kind)
	if err != nil {
		return DropInvalid
	}
	if reason := r.belongs(f.GetDispatchId(), f.GetSession()); reason != "" {
		return reason
	}
	r.mu.Lock()
	if r.err != nil {
		r.mu.Unlock()
		return DropLate
	}
	v := r.in.offer(f, time.Now(), r.all.timing)
	due := r.in.due
	if v == taken {
		r.nobody = false
	}
	r.mu.Unlock()
	if due {
		r.all.stir()
	}
	switch v {
	case duplicate:
		return DropDuplicate
	case gap:
		return DropGap
	case overrun:
		return DropOverrun
	}
	r.nudge()
	return ""
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
	r.all.stir()
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

// credit is the credit that is due now, nil if none is.
func (r *Receiver) credit(now time.Time) *runbusv1.RunnerWorkCredit {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return nil
	}
	r.in.look(now, r.all.timing)
	c := r.in.credit(now)
	if c != nil {
		c.DispatchId, c.Session = r.dispatch, r.session
	}
	return c
}

func (r *Receiver) resize(window int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return
	}
	r.in.resize(min(r.most, window))
}
