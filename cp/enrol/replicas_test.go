package enrol

import (
	"fmt"
	"testing"
	"time"
)

// C11: one replica owns a runner, whoever is asked; when it is not heard any more its runners spread over the others, and no other
// runner moves.
func TestOneReplicaOwnsARunner(t *testing.T) {
	now := time.Now()
	clock := func() time.Time { return now }
	ids := []string{"a", "b", "c"}
	views := map[string]*replicas{}
	hear := func(except string) {
		for _, id := range ids {
			for _, other := range ids {
				if other != except && id != except {
					views[id].hear(other)
				}
			}
		}
	}
	for _, id := range ids {
		views[id] = newReplicas(nil, id, clock)
	}
	hear("")
	before, count := map[string]string{}, map[string]int{}
	for i := range 300 {
		runner := fmt.Sprint("r-", i)
		owner := views["a"].owner(runner)
		for _, id := range ids {
			if got := views[id].owner(runner); got != owner {
				t.Fatalf("%s says that %s owns %s, a says %s", id, got, runner, owner)
			}
		}
		before[runner] = owner
		count[owner]++
	}
	for _, id := range ids {
		if count[id] < 60 {
			t.Errorf("%s owns %d of 300", id, count[id])
		}
	}
	now = now.Add(heardWithin) // still heard
	if !views["a"].live("b") {
		t.Error("b counts as gone too early")
	}
	now = now.Add(time.Millisecond)
	hear("b")
	if views["a"].live("b") || !views["b"].live("b") {
		t.Error("b counts as there, or itself as gone")
	}
	moved := map[string]int{}
	for runner, owner := range before {
		got := views["a"].owner(runner)
		if owner != "b" && got != owner || got != views["c"].owner(runner) || got == "b" {
			t.Fatalf("%s moved from %s to %s", runner, owner, got)
		}
		if owner == "b" {
			moved[got]++
		}
	}
	if moved["a"] == 0 || moved["c"] == 0 {
		t.Errorf("b's runners went to %v", moved)
	}
}

// C7: 1–30 s with jitter.
func TestRetriesSlowDown(t *testing.T) {
	d := &Dialler{d: DiallerDeps{FirstRetry: time.Second, SlowestRetry: 30 * time.Second}}
	for failures, most := range map[int]time.Duration{1: time.Second, 2: 2 * time.Second, 5: 16 * time.Second, 6: 30 * time.Second, 1000: 30 * time.Second} {
		seen := map[time.Duration]bool{}
		for range 100 {
			got := d.retryDelay(failures)
			if got < most/2 || got > most {
				t.Fatalf("after %d failures: %s, want %s-%s", failures, got, most/2, most)
			}
			seen[got] = true
		}
		if len(seen) < 50 {
			t.Errorf("after %d failures there are only %d pauses", failures, len(seen))
		}
	}
}
