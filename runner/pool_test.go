package runner

import (
	"sync"
	"testing"
)

// Works that wait for each other all get to run, whatever order they came in; and every one is run once.
func TestPoolHoldsUpNobody(t *testing.T) {
	const n = 100
	waiting := make(chan struct{})
	var here, ran sync.WaitGroup
	here.Add(n)
	ran.Add(2 * n)
	var mu sync.Mutex
	runs := make(map[*work]int)
	p := &pool{}
	p.do = func(w *work, m *workspace) {
		if m == nil {
			t.Error("a work without memory")
		}
		mu.Lock()
		runs[w]++
		mu.Unlock()
		if w.deadline > 0 { // one of those that wait
			here.Done()
			<-waiting
		}
		ran.Done()
	}
	for range n {
		p.run(&work{facts: facts{deadline: 1}})
		p.run(&work{})
	}
	here.Wait()
	close(waiting)
	ran.Wait()
	p.close()
	p.wait()
	for w, times := range runs {
		if times != 1 {
			t.Errorf("%v ran %d times", w, times)
		}
	}
}
