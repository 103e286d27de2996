package bus

import (
	"time"

	"github.com/org-runink/runbus/schemas"
)

// mostTombstones is how many closed dispatches a replica knows at most; the oldest go first.
const mostTombstones = 4096

// tombstone is what is remembered of a closed dispatch.
type tombstone struct {
	ref     schemas.RunnerRef
	session string
	at      time.Time
}

// tombstones remembers closed dispatches, bounded in number and age. Not safe for concurrent use; the zero value is empty.
type tombstones struct {
	known map[string]tombstone
	queue []buried // oldest first; an entry whose time is not the known one's is void
}

type buried struct {
	dispatch string
	at       time.Time
}

func (t *tombstones) add(dispatch string, stone tombstone) {
	if t.known == nil {
		t.known = make(map[string]tombstone)
	}
	t.known[dispatch] = stone
	t.queue = append(t.queue, buried{dispatch, stone.at})
	for len(t.queue) > mostTombstones {
		t.pop()
	}
}

func (t *tombstones) get(dispatch string) (tombstone, bool) {
	stone, ok := t.known[dispatch]
	return stone, ok
}

func (t *tombstones) remove(dispatch string) { delete(t.known, dispatch) }

// expire forgets what was closed before then.
func (t *tombstones) expire(then time.Time) {
	for len(t.queue) > 0 && t.queue[0].at.Before(then) {
		t.pop()
	}
}

func (t *tombstones) pop() {
	first := t.queue[0]
	t.queue[0] = buried{}
	t.queue = t.queue[1:]
	if stone, ok := t.known[first.dispatch]; ok && stone.at.Equal(first.at) {
		delete(t.known, first.dispatch)
	}
}
