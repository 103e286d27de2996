package runner

import (
	"runtime"
	"testing"
	"time"
)

// A process gets all processors at once when one is not enough, and gives them back when it has needed little for long.
func TestProcessorsFollowTheLoad(t *testing.T) {
	var l load
	now, used := time.Duration(0), time.Duration(0)
	large := false
	look := func(percent int) bool {
		now += fitEvery
		used += fitEvery * time.Duration(percent) / 100
		return l.look(now, used, large)
	}
	for range 10 * calmLooks {
		if look(60) || l.wide {
			t.Fatal("wide for what one processor has room for")
		}
	}
	for _, percent := range []int{90, 50, 100} {
		for range busyLooks - 1 {
			if look(percent) {
				t.Fatalf("wide after too short a time at %d %%", percent)
			}
		}
	}
	if !look(90) || !l.wide {
		t.Fatal("one processor, which is not enough")
	}
	for _, percent := range []int{200, 70, 80, 30} {
		for range calmLooks - 1 {
			if look(percent) {
				t.Fatalf("narrow after too short a time at %d %%", percent)
			}
		}
	}
	if !look(30) || l.wide {
		t.Fatal("wide though little was used for long")
	}
	large = true
	if !look(1) || !l.wide {
		t.Fatal("one processor for a large result")
	}
	for range 2 * calmLooks {
		if look(1) {
			t.Fatal("narrow while a large result is sent")
		}
	}
}

// The processors are those of the process again after close, and a work that comes wakes whoever looks.
func TestProcessorsAreGivenBack(t *testing.T) {
	t.Setenv("GOMAXPROCS", "")
	before := runtime.GOMAXPROCS(4)
	defer runtime.GOMAXPROCS(before)
	asked := make(chan struct{}, 1)
	p := fitProcessors(func() bool {
		signal(asked)
		return false
	})
	if n := runtime.GOMAXPROCS(0); n != 1 {
		t.Errorf("%d processors at the beginning", n)
	}
	if !p.narrow() {
		t.Error("not narrow at the beginning")
	}
	used := p.used()
	if p.polls(time.Hour); p.used() >= used {
		t.Error("time to poll counts as used")
	}
	for range 2 { // it looks again after it had stopped
		p.begin()
		receive(t, asked, "look")
		for p.watching.Load() {
			runtime.Gosched()
		}
		drain(asked)
	}
	p.close()
	if n := runtime.GOMAXPROCS(0); n == 1 && runtime.NumCPU() > 1 {
		t.Error("one processor after the end")
	}
	if p.narrow() {
		t.Error("narrow after the end")
	}
	t.Setenv("GOMAXPROCS", "3")
	if fitProcessors(nil) != nil {
		t.Error("GOMAXPROCS was set by somebody, and is changed")
	}
	var none *processors
	none.begin()
	none.close()
	if none.narrow() {
		t.Error("narrow without a decision")
	}
}

func drain(c <-chan struct{}) {
	for {
		select {
		case <-c:
		default:
			return
		}
	}
}
