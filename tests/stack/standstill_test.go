package stack

import (
	"testing"
	"time"
)

// stands has nothing stand still, for the time of a test that starts no process, but what stand says.
func stands(t *testing.T) {
	t.Helper()
	still.end()
	still.mu.Lock()
	gaps, used := still.gaps, still.used
	still.gaps, still.used = nil, 0
	still.mu.Unlock()
	t.Cleanup(func() {
		still.mu.Lock()
		still.gaps, still.used = gaps, used
		still.mu.Unlock()
	})
}

// stand has everything have stood still for a while, from some time before now on.
func stand(from, long time.Duration) {
	still.mu.Lock()
	defer still.mu.Unlock()
	begin := time.Now().Add(from)
	still.gaps = append(still.gaps, standstill{from: begin, to: begin.Add(long)})
}

// A standstill is known when it has ended, before the next tick, and by that as well.
func TestAStandstillIsMeasured(t *testing.T) {
	var s stillness
	s.begin()
	t.Cleanup(s.end)
	const long = time.Minute
	back := func() (began time.Time) { // as if the tick before had been so long ago
		s.mu.Lock()
		defer s.mu.Unlock()
		s.last = time.Now().Add(-long)
		return s.last
	}
	began := back()
	if d := s.between(began.Add(-time.Hour), time.Now()); d < long {
		t.Errorf("it stood still for %s, not %s", d, long)
	}
	if d := s.between(began.Add(long/2), began.Add(long)); d != long/2 {
		t.Errorf("in the second half it stood still for %s", d)
	}
	if d := s.between(began.Add(-time.Hour), began); d != 0 {
		t.Errorf("before it, it stood still for %s", d)
	}
	began = back()
	for give := time.Now().Add(Patience); ; <-time.After(10 * time.Millisecond) {
		s.mu.Lock()
		ticked := s.last.After(began)
		s.mu.Unlock()
		if ticked {
			break
		}
		if time.Now().After(give) {
			t.Fatal("it does not tick")
		}
	}
	if d := s.between(began.Add(-time.Hour), time.Now()); d < long {
		t.Errorf("by its tick it stood still for %s, not %s", d, long)
	}
	s.end()
	s.end()
	if d := s.between(time.Now(), time.Now().Add(time.Hour)); d != 0 {
		t.Errorf("it stands still for %s when nobody looks", d)
	}
	s.begin() // once more
}

// Only a standstill within the time excuses, of as long as it was too late, and few of them.
func TestExcusedByAStandstill(t *testing.T) {
	var s stillness
	at := time.Now().Add(-time.Hour)
	for i := range mostStandstills + 1 {
		begin := at.Add(time.Duration(i) * time.Minute)
		s.gaps = append(s.gaps, standstill{from: begin, to: begin.Add(2 * time.Second)})
	}
	if _, err := s.excuse(at.Add(3*time.Second), at.Add(time.Minute), 0); err == nil {
		t.Error("it is excused, while nothing stood still")
	}
	if _, err := s.excuse(at, at.Add(time.Minute), 3*time.Second); err == nil {
		t.Error("two seconds excuse three")
	}
	if d, err := s.excuse(at.Add(time.Second), at.Add(time.Minute), time.Second); d != time.Second || err != nil {
		t.Errorf("excused by %s, %v", d, err)
	}
	for i := range mostStandstills + 1 {
		for range 3 { // what one excuses counts once
			_, err := s.excuse(at.Add(time.Duration(i)*time.Minute), at.Add(time.Duration(i+1)*time.Minute), time.Second)
			if few := i < mostStandstills; few != (err == nil) {
				t.Errorf("standstill %d: %v", i+1, err)
			}
		}
	}
	if d, err := s.excuse(at, at.Add(time.Hour), 2*mostStandstills*time.Second); d != 2*(mostStandstills+1)*time.Second || err != nil {
		t.Errorf("all of them: %s, %v", d, err)
	}
}
