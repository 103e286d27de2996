package bus

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// burst is how many frames of one stream go out before the next stream has its turn.
const burst = 4

// Senders is all result streams of one runner's connection. One goroutine writes them all, so that frames of many
// streams leave in few, large writes. It is safe for concurrent use.
type Senders struct {
	conn    *Conn
	ref     schemas.RunnerRef
	timing  timing
	now     func() time.Time
	credits *nats.Subscription
	ignored atomic.Uint64
	wake    chan struct{} // room for one: there is something to publish
	stop    chan struct{}
	stopped chan struct{}

	mu     sync.Mutex
	open   map[string]*Sender // by dispatch
	order  []*Sender          // a new slice at each change
	closed bool
}

// NewSenders subscribes the credit of the runner's dispatches on c. The connection should have no reconnect buffer
// (nats.ReconnectBufSize(-1)): what is not acknowledged is kept here.
func NewSenders(c *Conn, ref schemas.RunnerRef, options ...Option) (*Senders, error) {
	if err := ref.Valid(); err != nil {
		return nil, err
	}
	s := &Senders{
		conn: c, ref: ref, timing: newTiming(options), now: time.Now, open: make(map[string]*Sender),
		wake: make(chan struct{}, 1), stop: make(chan struct{}), stopped: make(chan struct{}),
	}
	var err error
	if s.credits, err = c.Subscribe(schemas.CreditSubject(ref, "*"), s.credit); err != nil {
		return nil, err
	}
	go s.write()
	return s, nil
}

// Open begins the stream of one dispatch to the replica that waits for it. dispatch, session, replica and windowBytes are
// those of the assignment; a window of 0 means 1 MiB, more than 4 MiB means 4 MiB. A stream that is open for the dispatch is closed.
func (s *Senders) Open(dispatch, session, replica string, windowBytes int64) *Sender {
	now := s.now()
	one := &Sender{
		all: s, dispatch: dispatch, session: session,
		ctl:      schemas.ResultCtlSubject(s.ref, replica, dispatch),
		data:     schemas.ResultDataSubject(s.ref, replica, dispatch),
		orphaned: make(chan struct{}), changed: make(chan struct{}),
		out: newOutbox(windowBytes, now),
	}
	if _, err := schemas.Parse(one.ctl); err != nil {
		one.bad = err
	}
	s.mu.Lock()
	before := s.open[dispatch]
	if s.closed {
		one.err = ErrClosed
	} else {
		s.open[dispatch] = one
		s.reorder()
	}
	s.mu.Unlock()
	if before != nil {
		before.fail(ErrClosed)
	}
	return one
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
	s.stir()
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
	order := s.order
	s.open, s.order = nil, nil
	s.mu.Unlock()
	for _, one := range order {
		one.fail(ErrClosed)
	}
	close(s.stop)
	<-s.stopped
	return unsubscribe(s.credits)
}

func (s *Senders) forget(one *Sender) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[one.dispatch] == one {
		delete(s.open, one.dispatch)
		s.reorder()
	}
}

// reorder makes the writer's list anew. The lock is held.
func (s *Senders) reorder() {
	order := make([]*Sender, 0, len(s.open))
	for _, one := range s.open {
		order = append(order, one)
	}
	s.order = order
}

func (s *Senders) streams() []*Sender {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.order
}

// stir wakes the writer.
func (s *Senders) stir() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// credit runs in the subscription's callback: it publishes nothing.
func (s *Senders) credit(msg *nats.Msg) {
	subject, err := schemas.Parse(msg.Subject)
	c := &runbusv1.RunnerWorkCredit{}
	if err != nil || Decode(msg, c) != nil {
		s.ignored.Add(1)
		return
	}
	s.mu.Lock()
	one := s.open[subject.Dispatch]
	s.mu.Unlock()
	if one == nil {
		s.ignored.Add(1)
		return
	}
	one.credit(c)
	s.stir()
}

// write is the one goroutine that publishes.
func (s *Senders) write() {
	defer close(s.stopped)
	tick := time.NewTicker(s.timing.tick())
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-s.wake:
			// One turn for those who are about to send: their frames go into the same write.
			runtime.Gosched()
		case <-tick.C:
		}
		for more := true; more; {
			more = false
			now := s.now()
			for _, one := range s.streams() {
				one.look(now, s.timing)
				more = one.publish(burst) || more
			}
		}
	}
}

// unsubscribe ends a subscription; that its connection was closed before is no error.
func unsubscribe(sub *nats.Subscription) error {
	if err := sub.Unsubscribe(); err != nil && sub.IsValid() {
		return err
	}
	return nil
}
