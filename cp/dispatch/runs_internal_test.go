package dispatch

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/org-runink/runbus/schemas"
)

// A table holds what a map would.
func TestRuns(t *testing.T) {
	ids := []string{"", "short"}
	for range 40 {
		id := schemas.NewULID(time.Now())
		ids = append(ids, id, id[:18]+ids[len(ids)-1][max(len(ids[len(ids)-1])-8, 0):]) // two of them in one chain
	}
	rapid.Check(t, func(t *rapid.T) {
		var table runs
		want := make(map[string]*run)
		for range rapid.IntRange(0, 200).Draw(t, "steps") {
			id := rapid.SampledFrom(ids).Draw(t, "id")
			if r := want[id]; r != nil {
				table.remove(r)
				delete(want, id)
			} else {
				r := &run{}
				r.id = id
				table.add(r)
				want[id] = r
			}
			if table.find(id) != want[id] || table.count != len(want) {
				t.Fatalf("of %q the table has %v of %d, not %v of %d", id, table.find(id), table.count, want[id], len(want))
			}
		}
		seen := 0
		for r := range table.all {
			if seen++; want[r.id] != r {
				t.Errorf("the table has a run %q", r.id)
			}
		}
		if seen != len(want) {
			t.Errorf("the table has %d runs, not %d", seen, len(want))
		}
	})
}
