package registry

import (
	"fmt"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// A runner that floods is dropped by itself: others are served, and what waits is bounded in number and in bytes.
func TestFloodIsItsOwn(t *testing.T) {
	ref := func(i int) schemas.RunnerRef {
		return schemas.RunnerRef{Tenant: "acme", Runner: fmt.Sprintf("edge-%d", i)}
	}
	for name, c := range map[string]struct {
		size, of1 int // what is admitted of one runner's
		others    int // and of one message each of many others' then
		why       string
	}{
		"small": {size: 100, of1: waitRunner, others: waitLimit - waitRunner, why: "overload"},
		"large": {size: 1 << 20, of1: waitRunner, others: waitBytes>>20 - waitRunner, why: "overload"},
	} {
		t.Run(name, func(t *testing.T) {
			r := &Registry{waitOf: make(map[schemas.RunnerRef]int)}
			for range c.of1 {
				if why := r.admit(ref(0), c.size); why != "" {
					t.Fatalf("dropped: %s", why)
				}
			}
			if why := r.admit(ref(0), c.size); why != "flood" {
				t.Fatalf("one message more of the same runner: %q", why)
			}
			for i := range c.others {
				if why := r.admit(ref(i+1), c.size); why != "" {
					t.Fatalf("another runner's message %d is dropped: %s", i, why)
				}
			}
			if why := r.admit(ref(-1), c.size); why != c.why {
				t.Fatalf("over the whole bound: %q", why)
			}
			dismiss := func(ref schemas.RunnerRef) { r.dismiss(ref, c.size); r.serving.Done() }
			dismiss(ref(0))
			if why := r.admit(ref(0), c.size); why != "" {
				t.Fatalf("after one was served: %q", why)
			}
			for range c.of1 {
				dismiss(ref(0))
			}
			for i := range c.others {
				dismiss(ref(i + 1))
			}
			r.serving.Wait()
			if r.waiting != 0 || r.waitSize != 0 || len(r.waitOf) != 0 {
				t.Fatalf("all served, and %d messages, %d bytes, %d runners are counted", r.waiting, r.waitSize, len(r.waitOf))
			}
		})
	}
}

// TestFewRunnersKeepNobodyOut: new connections wait when many runners have something waiting, not when some send much.
func TestFewRunnersKeepNobodyOut(t *testing.T) {
	r := &Registry{waitOf: map[schemas.RunnerRef]int{}}
	ref := func(i int) schemas.RunnerRef {
		return schemas.RunnerRef{Tenant: "acme", Runner: fmt.Sprintf("edge-%d", i)}
	}
	for i := range busyRunners - 1 {
		for range waitRunner {
			if why := r.admit(ref(i), 1); why != "" {
				t.Fatalf("dropped: %s", why)
			}
		}
	}
	if r.Busy() {
		t.Errorf("%d runners with %d messages each", busyRunners-1, waitRunner)
	}
	if why := r.admit(ref(busyRunners), 1); why != "" || !r.Busy() {
		t.Errorf("not busy with %d runners", busyRunners)
	}
	for i := range busyRunners - 1 {
		for range waitRunner {
			r.dismiss(ref(i), 1)
		}
	}
	if r.Busy() {
		t.Error("busy with one runner")
	}
}
