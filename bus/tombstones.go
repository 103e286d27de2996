package bus

import (
	"time"

	"github.com/org-runink/runbus/schemas"
)

// mostTombstones is how many closed dispatches a replica knows at most.
const mostTombstones = 4096

// owner is whose a dispatch was.
type owner struct {
	ref     schemas.RunnerRef
	session string
}

// tombstone is what is remembered of a closed dispatch.
type tombstone struct {
	dispatch string
	of       *owner
	at       time.Duration
}

// tombstones remembers the last closed dispatches, bounded in number and age. They stand in a row, since each dispatch makes one and hardly
// ever somebody looks for one: who does has an index made of those that are not in it yet. Times are counted from any one moment. Not
// safe for concurrent use; the zero value is empty.
type tombstones struct {
	row  []tombstone // that of number n, from 0 on, is at n % mostTombstones
	next int
	of   *owner // of the last one, and mostly of the next

	index   map[string]int // numbers by dispatch; those that are no more in row are no more true
	indexed int            // numbers below are in it
}

func (t *tombstones) add(dispatch string, of owner, at time.Duration) {
	if t.of == nil || *t.of != of {
		t.of = &owner{of.ref, of.session} // not &of, which would put each on the heap
	}
	stone := tombstone{dispatch, t.of, at}
	if len(t.row) < mostTombstones {
		t.row = append(t.row, stone)
	} else {
		t.row[t.next%mostTombstones] = stone
	}
	t.next++
}

// get is whose a dispatch was that was closed then or later.
func (t *tombstones) get(dispatch string, then time.Duration) (of owner, ok bool) {
	oldest := t.next - len(t.row)
	if t.index == nil || len(t.index) > 2*mostTombstones {
		t.index, t.indexed = make(map[string]int), 0
	}
	for t.indexed = max(t.indexed, oldest); t.indexed < t.next; t.indexed++ {
		t.index[t.row[t.indexed%mostTombstones].dispatch] = t.indexed
	}
	n, ok := t.index[dispatch]
	if !ok || n < oldest {
		return owner{}, false
	}
	stone := t.row[n%mostTombstones]
	return *stone.of, stone.at >= then
}

// expire makes room of all if they were closed before then.
func (t *tombstones) expire(then time.Duration) {
	if n := len(t.row); n > 0 && t.row[(t.next-1)%mostTombstones].at < then {
		*t = tombstones{}
	}
}
