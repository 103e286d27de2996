package bus

import (
	"time"

	"github.com/org-runink/runbus/schemas"
)

// mostTombstones is about how many closed dispatches a replica knows at most, and half of it at least if there were so many.
const mostTombstones = 4096

// tombstone is what is remembered of a closed dispatch.
type tombstone struct {
	ref     schemas.RunnerRef
	session string
	at      time.Time
}

// tombstones remembers closed dispatches, bounded in number and age: young ones, and old ones that go all at once when the young
// are half of the most. Not safe for concurrent use; the zero value is empty.
type tombstones struct {
	young, old             map[string]tombstone
	newestYoung, newestOld time.Time
}

func (t *tombstones) add(dispatch string, stone tombstone) {
	if t.young == nil {
		t.young, t.old = make(map[string]tombstone), make(map[string]tombstone)
	}
	t.young[dispatch], t.newestYoung = stone, stone.at
	if len(t.young) >= mostTombstones/2 {
		t.young, t.old = t.old, t.young
		clear(t.young)
		t.newestOld = t.newestYoung
	}
}

// get is what is remembered of a dispatch that was closed then or later.
func (t *tombstones) get(dispatch string, then time.Time) (tombstone, bool) {
	stone, ok := t.young[dispatch]
	if !ok {
		stone, ok = t.old[dispatch]
	}
	return stone, ok && !stone.at.Before(then)
}

// expire makes room of what was closed before then.
func (t *tombstones) expire(then time.Time) {
	if t.newestYoung.Before(then) {
		clear(t.young)
	}
	if t.newestOld.Before(then) {
		clear(t.old)
	}
}
