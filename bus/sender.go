package bus

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Sender is the result stream of one dispatch at the runner. It is safe for concurrent use; frames get their numbers in
// the order in which Send took them. Its memory may be another stream's afterwards (Spent): who might still have it then, which are
// the writer and who looks at all streams, reads what it is with the lock held, and knows by outbox.epoch whether it is another's.
type Sender struct {
	queued, lingers bool // guarded by all.mu: it is in all.ready, in all.lazy and not ready since

	mu  sync.Mutex
	out outbox
	stream
}

// stream is what a Sender begins with anew.
type stream struct {
	all               *Senders
	dispatch, session string
	replica           string
	bad               error // the ids don't make a subject

	bundles  bool                      // the replica reads RunnerWorkFrames
	together bool                      // …with frames of several dispatches
	whole    bool                      // …or of all of a dispatch in one
	accepter int64                     // pid of the acceptance in draft
	draft    *runbusv1.RunnerWorkWhole // what has been sent so far, while it may yet leave in one frame; in out.memory
	trace    Trace                     // on what is sent but plain chunks and progress
	err      error                     // why nothing can be sent any more
	working  bool                      // counted in all.working
	changed  chan struct{}             // closed at the next credit; nil when nobody waits for it
	ended    func(error)               // see Deliver
	silent   bool                      // the replica is
	onSilent func()                    // called then
	orphaned chan struct{}             // closed then; nil until somebody asks for it
	settled  bool                      // the replica has all, and ended was called with nil
}

// ctl and data are the subjects of the stream.
func (s *Sender) ctl() string  { return schemas.ResultCtlSubject(s.all.ref, s.replica, s.dispatch) }
func (s *Sender) data() string { return schemas.ResultDataSubject(s.all.ref, s.replica, s.dispatch) }

// Bundle lets small frames leave several to a message, within 4 ms. The replica must read RunnerWorkFrames
// (RunnerWorkAssignment.bundles).
func (s *Sender) Bundle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bundles = true
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
	if fieldOf(f) == wholeNumber {
		return schemas.Errorf(schemas.CodeInvalid, "dispatch %s is not sent in one frame: see Finish", s.dispatch)
	}
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
	final, bytes := s.out.final, 0
	if final { // else nobody asks, and who sends much while the link is slow would count it all for each frame
		bytes = s.out.waiting()
	}
	lazy := s.bundles && !final && s.out.held < bundleBytes
	s.mu.Unlock()
	switch {
	case lazy:
		s.all.linger(s)
	case final && n == 0:
		s.all.push(s, bytes)
	default:
		s.all.enqueue(s)
	}
	return nil
}

// Deliver is Send for the result, with Drain and Close after it, but it doesn't wait: ended is called, exactly once, with nil when
// the replica has acknowledged everything, with an error when it never will. The stream is closed then. ended must not block; it
// runs on whatever goroutine finds out, before Deliver returns if that is soon.
func (s *Sender) Deliver(result *runbusv1.RunnerWorkResult, ended func(error)) {
	s.Finish(nil, result, ended)
}

// Finish is Send for the last chunk, if there is one (nil: none), which does not wait for the window, and Deliver for the result. Both
// are the caller's again when it returns. Where Opening.Whole was said they leave in one frame with what was sent before, if nothing of that
// has left, and together they are small.
func (s *Sender) Finish(last *runbusv1.RunnerWorkChunk, result *runbusv1.RunnerWorkResult, ended func(error)) {
	err, bytes := s.bad, 0
	if err == nil {
		s.mu.Lock()
		if err = s.finish(last, result); err == nil {
			s.ended = ended
		}
		bytes = s.out.waiting()
		s.mu.Unlock()
	}
	if err != nil {
		s.Close()
		ended(err)
		return
	}
	s.all.push(s, bytes)
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
		if s.out.last > 0 || s.draft != nil {
			return schemas.Errorf(schemas.CodeInvalid, "dispatch %s is accepted by its first frame or not at all", s.dispatch)
		}
		if s.whole {
			s.begin(f)
			return nil
		}
	case *runbusv1.RunnerWorkProgress:
		f.DispatchId, f.Session, f.Seq = s.dispatch, s.session, 0
		if s.draft != nil && s.note(f) {
			return nil
		}
		s.settle()
		if !s.out.admit(f) {
			s.out.merged = proto.CloneOf(f)
			return nil
		}
		kept.progress = true
	default:
		s.settle()
	}
	if s.err != nil {
		return s.err
	}
	if err := stamp(f, s.dispatch, s.session, s.out.last+1); err != nil {
		return err
	}
	var err error
	if kept.encoded, err = s.out.encode(f); err != nil {
		return err
	}
	if kept.field == resultNum || kept.field == wholeNumber {
		s.out.final, s.out.merged = true, nil
		s.rest()
	}
	s.out.push(kept, s.all.now)
	return nil
}

// Held is how many bytes of chunks wait for their acknowledgement.
func (s *Sender) Held() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out.held
}

// Drain waits until the replica has acknowledged everything that was sent so far and since.
func (s *Sender) Drain(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.await(ctx, func() bool { return s.out.acked == s.out.last && s.out.merged == nil && s.draft == nil })
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
func (s *Sender) Orphaned() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.orphaned == nil {
		s.orphaned = make(chan struct{})
		if s.silent {
			close(s.orphaned)
		}
	}
	return s.orphaned
}

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

// Spent reports whether the stream is over, was one frame, and its memory may be another's (Senders.OpenIn). It is to be asked when ended,
// see Deliver, was called with nil and all other calls have returned.
func (s *Sender) Spent() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.settled && s.out.last == 1 && !s.silent && s.orphaned == nil
}

// fail ends the stream.
func (s *Sender) fail(err error) {
	s.mu.Lock()
	s.failLocked(err)
}

// failLocked is fail with the lock held, which it gives back.
func (s *Sender) failLocked(err error) {
	if s.err != nil {
		s.mu.Unlock()
		return
	}
	s.err = err
	s.rest()
	s.dropDraft()
	s.out.release()
	s.out.merged = nil
	s.out.cursor, s.out.acked = s.out.last+1, s.out.last
	s.notify()
	ended := s.ended
	s.ended = nil
	s.mu.Unlock()
	if ended != nil {
		s.all.forget(s)
		ended(err)
	}
}

// rest notes that there will be no more frames. The lock is held.
func (s *Sender) rest() {
	if s.working {
		s.working = false
		s.all.working.Add(-1)
	}
}

// notify wakes who waits in await. The lock is held.
func (s *Sender) notify() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// credit takes in what the replica says. It reports whether there is something to publish now, or, with what is to be called, that the
// stream is over and to be forgotten.
func (s *Sender) credit(c credit, now time.Time) (more bool, ended func(error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil || c.dispatch != s.dispatch || c.session != s.session || !s.out.credit(c, now) {
		s.all.ignored.Add(1)
		return false, nil
	}
	if p := s.out.merged; p != nil && s.out.progress < mostProgress {
		s.out.merged = nil
		if err := s.take(p, 0); err != nil { // it was a progress of this stream a moment ago
			s.err = err
		}
	}
	s.notify()
	if s.ended != nil && s.out.acked == s.out.last {
		ended, s.err, s.ended = s.ended, ErrClosed, nil
		s.settled = true
		return false, ended
	}
	return s.out.ready(), nil
}

// gather copies small frames into a batch: as many as the message has room for if the replica takes several at once, else one. Of a frame
// that goes out by itself, as it is too large, it returns a message; full says that the batch is to leave first: what a stream has in
// there comes before. The lock is held.
func (s *Sender) gather(b *batch, several bool) (large encoded, seq, epoch uint64, full bool) {
	for {
		switch n := s.out.peek(); {
		case n == 0:
			return encoded{}, 0, 0, false
		case len(b.body) > 0 && (n > bundleBytes || len(b.body)+n > max(b.most, bundleBytes)):
			return encoded{}, 0, 0, true
		case n > bundleBytes:
			large, seq, epoch, _ = s.out.take()
			s.out.publishing = seq
			return large, seq, epoch, false
		}
		f, seq, epoch, _ := s.out.take()
		b.add(s, f, seq, epoch)
		if !several {
			return encoded{}, 0, 0, true
		}
	}
}

// published says that the link has the frame that gather returned, and that nobody reads its memory any more.
func (s *Sender) published() {
	s.mu.Lock()
	s.out.publishing = 0
	s.mu.Unlock()
}

// unsent says that the link did not take the frames from seq on.
func (s *Sender) unsent(seq, epoch uint64, err error) {
	s.mu.Lock()
	s.out.publishing = 0
	if s.out.failed(seq, epoch) && !IsLinkError(err) {
		s.failLocked(err)
		return
	}
	s.mu.Unlock()
}

// look acts on what time brings: a resume that is due, a replica that is silent. It reports whether there is something to publish.
func (s *Sender) look(now time.Time, t timing) (more bool) {
	s.mu.Lock()
	if !s.silent && s.err == nil && now.Sub(s.out.heardAt) >= t.orphan {
		s.silent = true
		if s.orphaned != nil {
			close(s.orphaned)
		}
		s.tellSilent()
	}
	ask := s.err == nil && s.out.probe(now, t.resume, t.probe)
	more = s.out.ready()
	if !ask {
		s.mu.Unlock()
		return more
	}
	resume := &runbusv1.RunnerWorkResume{DispatchId: s.dispatch, Session: s.session, Sent: s.out.sent(), Acknowledged: s.out.acked}
	all, ctl, epoch := s.all, s.ctl(), s.out.epoch
	s.mu.Unlock()
	if err := all.conn.Publish(ctl, resume); err != nil && !IsLinkError(err) {
		s.mu.Lock()
		if s.out.epoch == epoch {
			s.failLocked(errors.Join(ErrClosed, err))
			return more
		}
		s.mu.Unlock()
	}
	return more
}
