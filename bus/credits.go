package bus

import (
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Settled takes in which dispatches a message on the work subject of a session says are settled (RunnerWorkAssignments): the replica has
// their results, and all before those. It is to be called before the assignments there are begun. It publishes nothing.
func (s *Senders) Settled(msg *nats.Msg) {
	turn, _ := creditTurns.Get().(*creditTurn)
	defer creditTurns.Put(turn)
	session := msg.Subject[strings.LastIndexByte(msg.Subject, '.')+1:]
	s.mu.Lock()
	readSettled(msg, func(dispatch []byte) {
		c := credit{session: session, settled: true}
		one := s.open[string(dispatch)]
		if one != nil {
			c.dispatch = one.dispatch
		}
		turn.given = append(turn.given, given{one, c})
	})
	s.mu.Unlock()
	if len(turn.given) > 0 {
		s.take(turn, s.now())
	}
}

// creditTurns are what messages take turns with.
var creditTurns = sync.Pool{New: func() any { return new(creditTurn) }}

// creditTurn is memory for the credits of one message, which are looked up, and forgotten, under one lock.
type creditTurn struct {
	given []given
	over  []*Sender     // of which everything is acknowledged
	ended []func(error) // of those: to be called with nil
}

// given is a credit and the stream it is for, nil for none.
type given struct {
	to     *Sender
	credit credit
}

// credited takes in what replicas say. It runs in the subscription's callback: it publishes nothing.
func (s *Senders) credited(msg *nats.Msg) {
	turn, _ := creditTurns.Get().(*creditTurn)
	defer creditTurns.Put(turn)
	if TypeOf(msg) == "RunnerWorkCredits" {
		s.mu.Lock()
		err := readCredits(msg, func(dispatch []byte, c credit) {
			one := s.open[string(dispatch)]
			if one != nil {
				c.dispatch = one.dispatch
			}
			turn.given = append(turn.given, given{one, c})
		})
		s.mu.Unlock()
		if err != nil {
			s.ignored.Add(1)
		}
	} else {
		subject, err := schemas.Parse(msg.Subject)
		m := &runbusv1.RunnerWorkCredit{}
		if err != nil || Decode(msg, m) != nil {
			s.ignored.Add(1)
			return
		}
		s.mu.Lock()
		turn.given = append(turn.given, given{s.open[subject.Dispatch], creditOf(m)})
		s.mu.Unlock()
	}
	s.take(turn, s.now())
}

// take gives credits to their streams.
func (s *Senders) take(turn *creditTurn, now time.Time) {
	for _, g := range turn.given {
		if g.to == nil {
			s.ignored.Add(1)
			continue
		}
		more, ended := g.to.credit(g.credit, now)
		switch {
		case ended != nil:
			turn.over, turn.ended = append(turn.over, g.to), append(turn.ended, ended)
		case more:
			s.enqueue(g.to)
		}
	}
	s.mu.Lock()
	for _, one := range turn.over {
		s.drop(one)
	}
	s.mu.Unlock()
	for _, ended := range turn.ended {
		ended(nil)
	}
	clear(turn.given)
	clear(turn.over)
	clear(turn.ended)
	turn.given, turn.over, turn.ended = turn.given[:0], turn.over[:0], turn.ended[:0]
}

// drop takes a stream out. The lock is held.
func (s *Senders) drop(one *Sender) {
	if s.open[one.dispatch] == one {
		delete(s.open, one.dispatch)
	}
}
