package bus

import (
	"sync"
	"testing"
)

// Who gives way goes on doing so while that makes the queue longer, but not for ever, and keeps the writer's part if nobody takes it.
func TestGatheringGivesWay(t *testing.T) {
	for name, o := range map[string]struct {
		lengths []int // after each turn of the others; the last one stays
		asked   int
	}{
		"nobody comes":  {[]int{1}, 2},
		"two come":      {[]int{2, 3}, 3},
		"always others": {[]int{1, 2, 3, 4, 5, 6, 7}, mostYields},
	} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			var g gathering
			asked := 0
			length := func() int {
				n := o.lengths[min(asked, len(o.lengths)-1)]
				asked++
				return n
			}
			mu.Lock()
			defer mu.Unlock()
			if !g.giveWay(&mu, length) {
				t.Error("the writer's part was lost")
			}
			if asked != o.asked {
				t.Errorf("gave way %d times, not %d", asked, o.asked)
			}
			if g.takeOver() {
				t.Error("it was taken from one who gives way no more")
			}
		})
	}
}

// The writer's part belongs to one: to who took it over, or to who gave way, also if another gives way meanwhile.
func TestGatheringIsTakenOverOnce(t *testing.T) {
	var mu sync.Mutex
	var g gathering
	taken, calls := 0, 0
	mu.Lock()
	defer mu.Unlock()
	mine := g.giveWay(&mu, func() int {
		calls++
		for range 2 {
			if g.takeOver() {
				taken++
			}
		}
		if !g.giveWay(&mu, func() int { return 1 }) {
			t.Error("who took the part over and gave way himself has lost it")
		}
		return calls
	})
	if mine || taken != 1 {
		t.Errorf("taken over %d times; the first one has it still: %t", taken, mine)
	}
}
