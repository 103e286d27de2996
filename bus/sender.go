package bus

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Sender is the result stream of one dispatch at the runner. It is safe for concurrent use; frames get their numbers in
// the order in which Send took them.
type Sender struct {
	all               *Senders
	dispatch, session string
	ctl, data         string // subjects
	bad               error  // the ids don't make a subject
	orphaned          chan struct{}

	queued, lingers bool // guarded by all.mu: it is in all.ready, in all.lazy

	mu       sync.Mutex
	out      *outbox
	bundles  bool          // the replica reads RunnerWorkFrames
	trace    Trace         // on what is sent but plain chunks and progress
	err      error         // why nothing can be sent any more
	changed  chan struct{} // closed at the next credit; nil when nobody waits for it
	silent   bool          // orphaned is closed
	onSilent func()        // called then
}

// Bundle lets small frames leave several to a message, within a millisecond. The replica must read RunnerWorkFrames
// (RunnerWorkAssignment.bundles).
func (s *Sender) Bundle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bundles = true
}

// Trace has the answers of the dispatch carry a trace context: messages with the acceptance or the result, but no plain chunk.
func (s *Sender) Trace(t Trace) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trace = t.clamped()
}

// Send takes f over: it gives it dispatch, session and the next number, and keeps its encoded form until the replica has
// acknowledged it. f and its bytes are the caller's again when Send returns. Chunks go to the data subject and wait while the
// window is full, until ctx ends; everything else goes to the ctl subject and never waits. Nil means kept, not delivered: a link
// that is down is no error, Senders.Resume sends again. Progress that would pile up (more than four unacknowledged, and not
// the first of its phase) is merged: only the newest is sent, when there is room, and has number 0 until then.
//
// A chunk over ChunkBytes, a second accepted and anything after the result are errors of CodeInvalid; after Close it is ErrClosed.
func (s *Sender) Send(ctx context.Context, f Frame) error {
	if s.bad != nil {
		return s.bad
	}
	n := chunkBytes(f)
	if n > ChunkBytes {
		return schemas.Errorf(schemas.CodeInvalid, "a chunk has %d bytes, over %d", n, ChunkBytes)
	}
	s.mu.Lock()
	if _, ok := f.(*runbusv1.RunnerWorkChunk); ok {
		if err := s.await(ctx, func() bool { return s.out.room(n) || s.out.final }); err != nil {
			s.mu.Unlock()
			return err
		}
	}
	if err := s.take(f, n); err != nil {
		s.mu.Unlock()
		return err
	}
	final := s.out.final
	lazy := s.bundles && !final && s.out.held < bundleBytes
	s.mu.Unlock()
	switch {
	case lazy:
		s.all.linger(s)
	case final && n == 0:
		s.all.push(s)
	default:
		s.all.enqueue(s)
	}
	return nil
}

// take numbers and keeps one frame. The lock is held.
func (s *Sender) take(f Frame, n int64) error {
	if s.err != nil {
		return s.err
	}
	if s.out.final {
		return schemas.Errorf(schemas.CodeInvalid, "a frame after the result of dispatch %s", s.dispatch)
	}
	kept := outFrame{bytes: n}
	switch f := f.(type) {
	case *runbusv1.RunnerWorkAccepted:
		if s.out.last > 0 {
			return schemas.Errorf(schemas.CodeInvalid, "dispatch %s is accepted by its first frame or not at all", s.dispatch)
		}
	case *runbusv1.RunnerWorkProgress:
		f.DispatchId, f.Session, f.Seq = s.dispatch, s.session, 0
		if !s.out.admit(f) {
			s.out.merged = proto.CloneOf(f)
			return nil
		}
		kept.progress = true
	}
	if err := stamp(f, s.dispatch, s.session, s.out.last+1); err != nil {
		return err
	}
	subject := s.ctl
	if frameKind(f) == schemas.KindResultData {
		subject = s.data
	}
	msg, err := newFrame(subject, f)
	if err != nil {
		return err
	}
	kept.msg = msg
	if _, ok := f.(*runbusv1.RunnerWorkResult); ok {
		s.out.final, s.out.merged = true, nil
	}
	s.out.push(kept, s.all.now())
	return nil
}

// Drain waits until the replica has acknowledged everything that was sent so far and since.
func (s *Sender) Drain(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.await(ctx, func() bool { return s.out.acked == s.out.last && s.out.merged == nil })
}

// await waits for a condition over the outbox. The lock is held, but not while waiting.
func (s *Sender) await(ctx context.Context, done func() bool) error {
	for {
		if s.err != nil {
			return s.err
		}
		if done() {
			return nil
		}
		if s.changed == nil {
			s.changed = make(chan struct{})
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
			s.mu.Lock()
		case <-ctx.Done():
			s.mu.Lock()
			return ctx.Err()
		}
	}
}

// Orphaned is closed when the replica has been silent for 30 s: nobody waits for this result any more, as far as one can
// tell from here. The stream goes on working if credit comes all the same.
func (s *Sender) Orphaned() <-chan struct{} { return s.orphaned }

// OnOrphaned calls f, instead of what was given before, in a goroutine of its own when Orphaned is closed, or at once if it is; nil
// ends that. A call may be under way when OnOrphaned or Close returns.
func (s *Sender) OnOrphaned(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onSilent = f
	s.tellSilent()
}

// tellSilent calls onSilent, once, if the replica is silent. The lock is held.
func (s *Sender) tellSilent() {
	if s.silent && s.onSilent != nil && s.err == nil {
		go s.onSilent()
		s.onSilent = nil
	}
}

// Close drops the stream with all that was not acknowledged. Send and Drain return ErrClosed then.
func (s *Sender) Close() {
	s.all.forget(s)
	s.fail(ErrClosed)
}

// fail ends the stream.
func (s *Sender) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
		s.out.frames, s.out.merged = nil, nil
		s.out.cursor, s.out.acked = s.out.last+1, s.out.last
		s.notify()
	}
}

// notify wakes who waits in await. The lock is held.
func (s *Sender) notify() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// credit takes in what the replica says. It reports whether there is something to publish now.
func (s *Sender) credit(c *runbusv1.RunnerWorkCredit) (more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil || c.GetDispatchId() != s.dispatch || c.GetSession() != s.session || !s.out.credit(c, s.all.now()) {
		s.all.ignored.Add(1)
		return false
	}
	if p := s.out.merged; p != nil && s.out.progress < mostProgress {
		s.out.merged = nil
		if err := s.take(p, 0); err != nil { // it was a progress of this stream a moment ago
			s.err = err
		}
	}
	s.notify()
	return s.out.ready()
}

// publish sends up to most messages. It reports whether there is more. Only who has the writer's part calls it.
func (s *Sender) publish(most int) (more bool) {
	for range most {
		var few [8]*nats.Msg
		s.mu.Lock()
		frames, seq, epoch := s.next(few[:0])
		trace := s.trace
		s.mu.Unlock()
		if len(frames) == 0 {
			return false
		}
		msg := frames[0]
		if len(frames) > 1 {
			msg = bundle(s.ctl, s.data, frames, s.all.memory)
			s.all.memory = msg.Data // publish copies it
		}
		if err := s.all.conn.publish(trace.onAnswer(msg)); err != nil {
			s.mu.Lock()
			s.out.failed(seq, epoch)
			s.mu.Unlock()
			if !IsLinkError(err) {
				s.fail(err)
			}
			return false
		}
	}
	return true
}

// next takes the frames of the next message: one, or several small ones. The lock is held.
func (s *Sender) next(frames []*nats.Msg) (_ []*nats.Msg, seq, epoch uint64) {
	msg, seq, epoch := s.out.take()
	if msg == nil {
		return nil, 0, 0
	}
	frames = append(frames, msg)
	for size := len(msg.Data); s.bundles; {
		if size += s.out.peek(); size > bundleBytes {
			break
		}
		msg, _, _ := s.out.take()
		if msg == nil {
			break
		}
		frames = append(frames, msg)
	}
	return frames, seq, epoch
}

// look acts on what time brings: a resume that is due, a replica that is silent. It reports whether there is something to publish.
func (s *Sender) look(now time.Time, t timing) (more bool) {
	s.mu.Lock()
	if !s.silent && s.err == nil && now.Sub(s.out.heardAt) >= t.orphan {
		s.silent = true
		close(s.orphaned)
		s.tellSilent()
	}
	ask := s.err == nil && s.out.probe(now, t.resume, t.probe)
	sent, acknowledged := s.out.sent(), s.out.acked
	more = s.out.ready()
	s.mu.Unlock()
	if !ask {
		return more
	}
	resume := &runbusv1.RunnerWorkResume{DispatchId: s.dispatch, Session: s.session, Sent: sent, Acknowledged: acknowledged}
	if err := s.all.conn.Publish(s.ctl, resume); err != nil && !IsLinkError(err) {
		s.fail(errors.Join(ErrClosed, err))
	}
	return more
}
