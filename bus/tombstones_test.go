package bus

import (
	"strconv"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// Closed dispatches are known for their time, the last ones in any case, and never more than the most.
func TestTombstonesAreBounded(t *testing.T) {
	for name, every := range map[string]int{"asked each time": 1, "asked seldom": 1500, "asked hardly ever": 5 * mostTombstones / 2} {
		t.Run(name, func(t *testing.T) {
			var stones tombstones
			now := time.Hour
			if _, ok := stones.get("d", 0); ok {
				t.Fatal("it knows what was never closed")
			}
			of := func(i int) owner {
				return owner{schemas.RunnerRef{Tenant: "acme", Runner: "edge"}, strconv.Itoa(i / 3)} // mostly the one before
			}
			for i := range 3 * mostTombstones {
				now += time.Millisecond
				stones.add(strconv.Itoa(i), of(i), now)
				if i%every != 0 {
					continue
				}
				for _, back := range []int{0, 1, mostTombstones - 1} {
					if got, ok := stones.get(strconv.Itoa(i-back), now-time.Hour); i >= back && (!ok || got != of(i-back)) {
						t.Fatalf("after %d the one %d before is known as %v, %t", i, back, got, ok)
					}
				}
				if _, ok := stones.get(strconv.Itoa(i-mostTombstones), 0); ok || len(stones.row) > mostTombstones || len(stones.index) > 3*mostTombstones {
					t.Fatalf("after %d the one %d before is known: %t; %d in the row, %d in the index", i, mostTombstones, ok, len(stones.row), len(stones.index))
				}
			}
			last := strconv.Itoa(3*mostTombstones - 1)
			if _, ok := stones.get(last, now+1); ok {
				t.Fatal("one that is too old is known")
			}
			again := owner{session: "again"}
			stones.add(last, again, now+time.Second)
			if got, ok := stones.get(last, now+time.Second); !ok || got != again {
				t.Fatalf("closed again: %v", got)
			}
			stones.expire(now + time.Second)
			if _, ok := stones.get(last, now+time.Second); !ok {
				t.Fatal("it was forgotten in its time")
			}
			stones.expire(now + 2*time.Second)
			if len(stones.row) > 0 || stones.index != nil {
				t.Fatalf("%d are kept after their time", len(stones.row))
			}
			stones.expire(now + 3*time.Second)
			stones.add(last, again, now+3*time.Second)
			if got, ok := stones.get(last, now); !ok || got != again {
				t.Fatalf("closed after that: %v", got)
			}
		})
	}
}
