package bus

import (
	"strconv"
	"testing"
	"time"
)

// Closed dispatches are known for their time, the last half of the most in any case, and never more than the most.
func TestTombstonesAreBounded(t *testing.T) {
	var stones tombstones
	now := time.Unix(1000, 0)
	if _, ok := stones.get("d", now); ok {
		t.Fatal("it knows what was never closed")
	}
	for i := range 3 * mostTombstones {
		now = now.Add(time.Millisecond)
		stones.add(strconv.Itoa(i), tombstone{session: strconv.Itoa(i), at: now})
		if n := len(stones.young) + len(stones.old); n > mostTombstones {
			t.Fatalf("%d are known", n)
		}
		for _, back := range []int{0, 1, mostTombstones/2 - 1} {
			name := strconv.Itoa(i - back)
			if stone, ok := stones.get(name, now.Add(-time.Hour)); i >= back && (!ok || stone.session != name) {
				t.Fatalf("after %d the one %d before is not known", i, back)
			}
		}
	}
	last := strconv.Itoa(3*mostTombstones - 1)
	if _, ok := stones.get(last, now.Add(time.Millisecond)); ok {
		t.Fatal("one that is too old is known")
	}
	stones.add(last, tombstone{session: "again", at: now.Add(time.Second)})
	if stone, ok := stones.get(last, now.Add(time.Second)); !ok || stone.session != "again" {
		t.Fatalf("closed again: %v", stone)
	}
	stones.expire(now.Add(time.Second))
	if _, ok := stones.get(last, now.Add(time.Second)); !ok {
		t.Fatal("it was forgotten in its time")
	}
	stones.expire(now.Add(2 * time.Second))
	if n := len(stones.young) + len(stones.old); n != 0 {
		t.Fatalf("%d are kept after their time", n)
	}
}
