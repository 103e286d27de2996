package bus

import (
	"runtime"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// A runner without work looks at no deadlines, and at those of the next work all the same.
func TestDeadlinesAreLookedAtAfterARest(t *testing.T) {
	ref := schemas.RunnerRef{Tenant: "acme", Runner: "edge"}
	s := &Senders{
		ref: ref, timing: newTiming([]Option{OrphanAfter(20 * time.Millisecond)}), now: time.Now, open: make(map[string]*Sender),
		wake: make(chan struct{}, 1), resume: make(chan struct{}, 1), awake: make(chan struct{}, 1),
		stop: make(chan struct{}), stopped: make(chan struct{}), lingers: time.NewTimer(time.Hour),
	}
	go s.write()
	defer func() { close(s.stop); <-s.stopped }()
	rests := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.asleep
	}
	for range 3 {
		for !rests() {
			runtime.Gosched()
		}
		one := s.Open("d", "s", "c", 0)
		select {
		case <-one.Orphaned(): // nobody waits for it
		case <-time.After(time.Minute):
			t.Fatal("the deadline of a stream after a rest was not looked at")
		}
		s.forget(one)
	}
}
