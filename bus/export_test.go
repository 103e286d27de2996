package bus

import (
	"math"
	"runtime"
	"sync"
)

// Busy keeps the writer's part, so that what many send at once waits together, until free writes it all.
func (s *Senders) Busy() (free func()) {
	occupy(&s.mu, &s.writing)
	return func() { s.drain(math.MaxInt) }
}

// GiveWay has the writer's part, and gives way with it until somebody takes it over.
func (s *Senders) GiveWay() {
	occupy(&s.mu, &s.writing)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gathering.on = true
}

// StillGivesWay reports whether nobody has taken it over yet.
func (s *Senders) StillGivesWay() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gathering.on
}

// Busy is Senders.Busy for assignments.
func (r *Receivers) Busy() (free func()) {
	occupy(&r.assigning, &r.writing)
	return func() { _ = r.assign(nil, math.MaxInt) }
}

// Linger has credits that may wait do so for ever.
func (r *Receivers) Linger() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pending = true
}

// Together is Opening.Together, for a stream that nothing was sent on.
func (s *Sender) Together() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.together = true
}

// Whole is Opening.Whole, likewise.
func (s *Sender) Whole() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.whole = true
}

// occupy takes a part that nobody has.
func occupy(mu *sync.Mutex, taken *bool) {
	for {
		mu.Lock()
		free := !*taken
		*taken = true
		mu.Unlock()
		if free {
			return
		}
		runtime.Gosched()
	}
}
