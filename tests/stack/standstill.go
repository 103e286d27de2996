package stack

import (
	"fmt"
	"sync"
	"testing"
	"time"
)

const (
	stillTick = 100 * time.Millisecond
	// stillFrom is from how long on a gap between two ticks is a standstill, and not only a busy machine.
	stillFrom = 500 * time.Millisecond
	// mostStandstills is how many standstills of a run of tests may excuse something. A machine stands still now and then; what needs that
	// each time is broken.
	mostStandstills = 3
)

// stillness notes when this process stood still, by a goroutine that ticks. The processes under test are on the same machine: when it stands
// still, they do.
type stillness struct {
	mu    sync.Mutex
	last  time.Time // the tick before; zero while nobody ticks
	gaps  []standstill
	used  int // standstills that have excused something
	ended chan struct{}
	over  chan struct{}
}

type standstill struct {
	from, to time.Time
	used     bool
}

// still is that of this process, which ticks from its first Start to Remove.
var still stillness

// begin has it tick, if it does not yet.
func (s *stillness) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		return
	}
	s.last, s.ended, s.over = time.Now(), make(chan struct{}), make(chan struct{})
	go s.run(s.ended, s.over)
}

func (s *stillness) run(ended, over chan struct{}) {
	defer close(over)
	ticks := time.NewTicker(stillTick)
	defer ticks.Stop()
	for {
		select {
		case <-ticks.C:
			s.mu.Lock()
			s.look(time.Now())
			s.mu.Unlock()
		case <-ended:
			return
		}
	}
}

// end has it tick no more.
func (s *stillness) end() {
	s.mu.Lock()
	ended, over := s.ended, s.over
	s.last, s.ended = time.Time{}, nil
	s.mu.Unlock()
	if ended != nil {
		close(ended)
		<-over
	}
}

// look notes that it runs now. s.mu is held.
func (s *stillness) look(now time.Time) {
	if s.last.IsZero() {
		return
	}
	if now.Sub(s.last) >= stillFrom {
		s.gaps = append(s.gaps, standstill{from: s.last, to: now})
	}
	s.last = now
}

// between is how long it stood still between two moments, all in all. A standstill that has only just ended counts, whoever is awake first.
func (s *stillness) between(from, to time.Time) (d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.look(time.Now())
	return s.within(from, to, func(*standstill) {})
}

// within is between, which shows each of them. s.mu is held.
func (s *stillness) within(from, to time.Time, show func(*standstill)) (d time.Duration) {
	for i := range s.gaps {
		g := &s.gaps[i]
		begin, end := g.from, g.to
		if begin.Before(from) {
			begin = from
		}
		if end.After(to) {
			end = to
		}
		if end.After(begin) {
			d += end.Sub(begin)
			show(g)
		}
	}
	return d
}

// excuse returns nil when it stood still between two moments for as long as over, and for a while at all, and not too many standstills have
// excused something. One that excuses several things counts once.
func (s *stillness) excuse(from, to time.Time, over time.Duration) (stood time.Duration, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.look(time.Now())
	before := false
	stood = s.within(from, to, func(g *standstill) { before = before || g.used })
	switch {
	case stood == 0:
		return 0, fmt.Errorf("nothing stood still in the %s of it", to.Sub(from).Round(time.Millisecond))
	case stood < over:
		return 0, fmt.Errorf("it is %s too late, and the machine stood still for %s only", over.Round(time.Millisecond), stood.Round(time.Millisecond))
	case !before && s.used >= mostStandstills:
		return 0, fmt.Errorf("%d standstills have excused something before", s.used)
	case !before:
		s.used++
	}
	s.within(from, to, func(g *standstill) { g.used = true })
	return stood, nil
}

// StoodStill is how long everything stood still between two moments, as this process knows of itself: gaps of half a second and more.
func StoodStill(from, to time.Time) time.Duration { return still.between(from, to) }

// Excused reports whether what came between two moments, and was too late by over, is excused, and logs why: the machine stood still in that
// time, for over at least. Few standstills of a run of tests excuse anything. Safe for concurrent use.
func Excused(t testing.TB, what string, from, to time.Time, over time.Duration) bool {
	t.Helper()
	stood, err := still.excuse(from, to, over)
	if err != nil {
		t.Logf("no excuse, since %v: %s", err, what)
		return false
	}
	t.Logf("excused, since everything stood still for %s: %s", stood.Round(time.Millisecond), what)
	return true
}
