package bus

import (
	"maps"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
)

// burst is how many frames of one stream go out before the next stream has its turn.
const burst = 4

// rounds is how often one who only came to send a result goes on as the writer for others.
const rounds = 4

// lingerFor is how long a small frame may wait for those after it. A fetch that takes less leaves in one message.
const lingerFor = 4 * time.Millisecond

// Senders is all result streams of one runner's connection. One goroutine at a time writes them all, so that frames of many
// streams leave in few, large writes: the one that has a result, if nobody is writing, else one of its own. It is safe for
// concurrent use.
type Senders struct {
	conn    *Conn
	ref     schemas.RunnerRef
	timing  timing
	now     func() time.Time
	credits *nats.Subscription
	ignored atomic.Uint64
	working atomic.Int32  // streams that are open and have no result yet
	wake    chan struct{} // room for one: there is something to publish
	resume  chan struct{} // room for one: deadlines are to be looked at now
	awake   chan struct{} // room for one: deadlines are to be looked at again from now on
	lingers *time.Timer   // over: the lazy ones are ready
	stop    chan struct{}
	stopped chan struct{}

	batches []batch // with nothing in them between drains; belong to who has the writer's part
	most    int     // bytes of a bundle with frames of several streams in this turn; as batches

	mu        sync.Mutex
	open      map[string]*Sender // by dispatch
	ready     []*Sender          // with something to publish, in turn
	gathered  int                // bytes that push has added to them
	gathering gathering
	lazy      []*Sender // with something that may wait a little, if they linger still
	spare     []*Sender // memory for ready
	waiting   bool      // lingers runs
	writing   bool      // somebody has the writer's part
	asleep    bool      // nobody looks at deadlines: no stream was open
	closed    bool
}

// NewSenders subscribes the credit of the runner's dispatches on c. The connection should have no reconnect buffer
// (nats.ReconnectBufSize(-1)): what is not acknowledged is kept here.
func NewSenders(c *Conn, ref schemas.RunnerRef, options ...Option) (*Senders, error) {
	if err := ref.Valid(); err != nil {
		return nil, err
	}
	s := &Senders{
		conn: c, ref: ref, timing: newTiming(options), now: time.Now, open: make(map[string]*Sender),
		wake: make(chan struct{}, 1), resume: make(chan struct{}, 1), awake: make(chan struct{}, 1), stop: make(chan struct{}), stopped: make(chan struct{}),
		lingers: time.NewTimer(time.Hour),
	}
	s.lingers.Stop()
	var err error
	if s.credits, err = c.Subscribe(schemas.CreditSubject(ref, "*"), s.credited); err != nil {
		return nil, err
	}
	go s.write()
	return s, nil
}

// Opening is how the stream of a dispatch begins: as its assignment says.
type Opening struct {
	Dispatch, Session, Replica string
	WindowBytes                int64 // 0 means 1 MiB, more than 4 MiB means 4 MiB

	Bundle     bool   // see Sender.Bundle
	Together   bool   // small frames may leave in one message with those of other dispatches: the replica reads that (RunnerWorkAssignment.together)
	Whole      bool   // it leaves as one RunnerWorkWhole if it is small, and over within 4 ms: the replica reads that (….whole), and RunnerWorkFrames
	Trace      Trace  // its answers carry it: messages with the acceptance or the result, but no plain chunk
	OnOrphaned func() // see Sender.OnOrphaned
}

// Open begins the stream of one dispatch to the replica that waits for it. dispatch, session, replica and windowBytes are
// those of the assignment; see Opening. A stream that is open for the dispatch is closed.
func (s *Senders) Open(dispatch, session, replica string, windowBytes int64) *Sender {
	one := &Sender{}
	s.OpenIn(one, Opening{Dispatch: dispatch, Session: session, Replica: replica, WindowBytes: windowBytes}, s.now())
	return one
}

// OpenIn is Open in memory of the caller's, a Sender that was never used, or is Spent, for who knows the time.
func (s *Senders) OpenIn(one *Sender, o Opening, now time.Time) {
	one.mu.Lock()
	one.out.init(o.WindowBytes, now)
	one.stream = stream{
		all: s, dispatch: o.Dispatch, session: o.Session, replica: o.Replica, bundles: o.Bundle, together: o.Together, whole: o.Whole,
		trace: o.Trace.clamped(), onSilent: o.OnOrphaned,
	}
	if !schemas.ValidToken(o.Replica) || !schemas.ValidToken(o.Dispatch) {
		one.bad = schemas.Errorf(schemas.CodeInvalid, "replica %q and dispatch %q don't make a subject", clip(o.Replica), clip(o.Dispatch))
	}
	s.mu.Lock() // within the stream's: nobody finds it before it is whole
	before := s.open[o.Dispatch]
	if s.closed {
		one.err = ErrClosed
	} else {
		s.open[o.Dispatch] = one
		one.working = true
		s.working.Add(1)
	}
	asleep := s.asleep
	s.asleep = false
	s.mu.Unlock()
	one.mu.Unlock()
	if asleep {
		poke(s.awake)
	}
	if before != nil {
		before.fail(ErrClosed)
	}
}

// Resume is to be called after each reconnect, when the runner's session stands again. For every stream with frames that
// are not acknowledged it sends RunnerWorkResume, again every second until credit comes, and then those frames again.
func (s *Senders) Resume() {
	now := s.now()
	for _, one := range s.streams() {
		one.mu.Lock()
		one.out.resume(now)
		one.mu.Unlock()
	}
	poke(s.resume)
}

// Ignored counts credits that were dropped: of no open stream, of another session, for frames never sent.
func (s *Senders) Ignored() uint64 { return s.ignored.Load() }

// Close ends all streams (ErrClosed) and waits for the writer. What is not acknowledged is dropped: Drain first.
func (s *Senders) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	open := s.open
	s.open = nil
	s.mu.Unlock()
	for _, one := range open {
		one.fail(ErrClosed)
	}
	close(s.stop)
	<-s.stopped
	return unsubscribe(s.credits)
}

func (s *Senders) forget(one *Sender) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop(one)
}

func (s *Senders) streams() []*Sender {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.open))
}

// poke sends to a channel that has room for one, unless it is full.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// add makes a stream ready. The lock is held.
func (s *Senders) add(one *Sender) {
	one.lingers = false
	if !one.queued {
		one.queued = true
		s.ready = append(s.ready, one)
	}
}

// enqueue has a stream published by the writer.
func (s *Senders) enqueue(one *Sender) {
	s.mu.Lock()
	s.add(one)
	writing := s.writing
	s.mu.Unlock()
	if !writing {
		poke(s.wake)
	}
}

// push has a stream published now, by whoever writes already or by the caller. It has so many bytes more: those who came together are not
// waited for when as many again would be more than a bundle takes. The one that is too much would leave alone behind it, as two in five
// messages did while a bundle had to be full first (measured: at 64 in flight a tenth of the processor time, at 256 2 %).
func (s *Senders) push(one *Sender, bytes int) {
	s.mu.Lock()
	s.add(one)
	s.gathered += bytes
	full := s.gathered+bytes > s.bound()
	if s.writing && (!full || !s.gathering.takeOver()) {
		s.mu.Unlock()
		return
	}
	s.writing = true
	if !full && s.working.Load() > 0 && !s.gathering.giveWay(&s.mu, func() int { return len(s.ready) }) {
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	s.drain(rounds)
}

// bound is the most that a bundle with frames of several streams has now. The lock is held.
func (s *Senders) bound() int {
	if len(s.open) > manyStreams {
		return manyBytes
	}
	return bundleBytes
}

// linger has a stream published soon, unless it is earlier for another reason.
func (s *Senders) linger(one *Sender) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if one.queued || one.lingers {
		return
	}
	one.lingers = true
	s.lazy = append(s.lazy, one)
	if !s.waiting {
		s.waiting = true
		s.lingers.Reset(lingerFor)
	}
}

// drain publishes what is ready, burst by burst, as often as most; then the writer goes on. The caller has the writer's part and
// gives it back.
func (s *Senders) drain(most int) {
	for range most {
		s.mu.Lock()
		turn := s.ready
		s.ready, s.spare, s.gathered = s.spare[:0], nil, 0
		s.most = s.bound()
		if len(turn) == 0 {
			s.writing, s.spare = false, turn
			s.mu.Unlock()
			return
		}
		for _, one := range turn {
			one.queued = false
		}
		s.mu.Unlock()
		for i, one := range turn {
			if s.publish(one, burst) {
				s.mu.Lock()
				s.add(one)
				s.mu.Unlock()
			}
			turn[i] = nil
		}
		s.flushAll()
		s.mu.Lock()
		s.spare = turn[:0]
		s.mu.Unlock()
	}
	s.mu.Lock()
	s.writing = false
	more := len(s.ready) > 0
	s.mu.Unlock()
	if more {
		poke(s.wake)
	}
}

// write is the goroutine that publishes what nobody else does, and looks at deadlines.
func (s *Senders) write() {
	defer close(s.stopped)
	defer s.lingers.Stop()
	tick := time.NewTicker(s.timing.tick())
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-s.wake:
			runtime.Gosched() // to those who are about to send
		case <-s.lingers.C:
			s.mu.Lock()
			s.waiting = false
			for _, one := range s.lazy {
				if one.lingers {
					s.add(one)
				}
			}
			clear(s.lazy)
			s.lazy = s.lazy[:0]
			s.mu.Unlock()
		case <-tick.C:
			if s.look(); s.rests() {
				tick.Stop()
			}
		case <-s.awake:
			tick.Reset(s.timing.tick())
		case <-s.resume:
			s.look()
		}
		s.mu.Lock()
		free := !s.writing
		s.writing = true
		s.mu.Unlock()
		if free {
			s.drain(math.MaxInt)
		}
	}
}

// look acts on what time brings, in every stream.
func (s *Senders) look() {
	now := s.now()
	for _, one := range s.streams() {
		if one.look(now, s.timing) {
			s.mu.Lock()
			s.add(one)
			s.mu.Unlock()
		}
	}
}

// rests reports whether no stream is open: then there are no deadlines to look at, until Open says so.
func (s *Senders) rests() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asleep = len(s.open) == 0
	return s.asleep
}

// unsubscribe ends a subscription; that its connection was closed before is no error.
func unsubscribe(sub *nats.Subscription) error {
	if err := sub.Unsubscribe(); err != nil && sub.IsValid() {
		return err
	}
	return nil
}
