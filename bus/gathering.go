package bus

import (
	"runtime"
	"sync"
)

// mostYields is how often at most one who is about to write gives way.
const mostYields = 4

// gathering is the time in which one who is about to write gives way to others, so that what they have leaves in the same write. The one
// who adds what makes it enough takes the writer's part over and writes at once: whoever waits for it begins, while the others of those
// that came together have their turn here. As long as all of them were waited for, the control plane and a runner took turns, each idle
// while the other worked (measured, 16 in flight: 45,700 dispatches/s and 38 us of processor time each, so 81,300 and 22 us).
//
// The queue's lock guards it, and is held when a method is called.
type gathering struct {
	on   bool
	turn uint64 // counts them: who gives way knows his own
}

// giveWay lets others run who are ready to, as long as that makes the queue longer. The lock is not held meanwhile. It returns false if
// the writer's part is another's now.
func (g *gathering) giveWay(mu *sync.Mutex, length func() int) (mine bool) {
	g.turn++
	turn, before := g.turn, 0
	g.on = true
	for range mostYields {
		mu.Unlock()
		runtime.Gosched()
		mu.Lock()
		if !g.on || g.turn != turn {
			return false
		}
		n := length()
		if n <= before {
			break
		}
		before = n
	}
	g.on = false
	return true
}

// takeOver gives the caller the writer's part of one who gives way. It returns false if nobody does.
func (g *gathering) takeOver() (mine bool) {
	mine = g.on
	g.on = false
	return mine
}
