package jetstream

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// View is a live local copy of a table: a scan of the leader, then a watch, whose keys are compared with the leader's every
// 30 s, and then a scan again after each reconnect. It is safe for concurrent use; it may lag behind the leader by the time of a delivery, and by how much at
// most, Confirmed tells. While the bucket can't be read the view keeps what it knew.
type View[T any] struct {
	stop context.CancelFunc
	done chan struct{}

	onChange func(Row[T])
	follower *follower
	without  bool // the values are not kept

	mu        sync.RWMutex
	rows      map[string]viewed[T] // deleted ones too, so that an older message can't bring them back
	confirmed time.Time
}

// viewed is what a view keeps of a row.
type viewed[T any] struct {
	revision uint64
	deleted  bool
	value    *T // nil if deleted, or not kept
}

// Tail is a View that keeps no values, for who keeps what onChange is given. It is safe for concurrent use.
type Tail[T any] struct{ view *View[T] }

// Tail starts a Tail, as Follow does a View.
func (t *Table[T]) Tail(ctx context.Context, onChange func(Row[T])) (*Tail[T], error) {
	v, err := t.follow(ctx, onChange, true)
	if err != nil {
		return nil, err
	}
	return &Tail[T]{v}, nil
}

// Confirmed is View.Confirmed, of what onChange was given.
func (t *Tail[T]) Confirmed() time.Time { return t.view.Confirmed() }

// Close is View.Close.
func (t *Tail[T]) Close() { t.view.Close() }

// Follow starts a View. It returns when the bucket has been read from its leader, or with why it could not be; ctx bounds
// that only, the view lives until Close of it or of the store. onChange, which may be nil, is called for each row of the
// initial state before Follow returns, then for each change, deletes and expiries too, in the order of revisions of a key
// and never concurrently. It must not call Close and should not block: the view stands still meanwhile.
//
// A value that is no T is logged and left out; if it replaces one that was, that one is reported as deleted.
func (t *Table[T]) Follow(ctx context.Context, onChange func(Row[T])) (*View[T], error) {
	if onChange == nil {
		onChange = func(Row[T]) {}
	}
	return t.follow(ctx, onChange, false)
}

func (t *Table[T]) follow(ctx context.Context, onChange func(Row[T]), without bool) (*View[T], error) {
	v := &View[T]{done: make(chan struct{}), onChange: onChange, without: without, rows: map[string]viewed[T]{}}
	v.follower = &follower{
		s: t.s, bucket: t.bucket, log: t.s.o.Log.With("bucket", string(t.bucket)),
		load: v.load, apply: func(e entry) { v.apply(e, false) }, knows: v.knows, confirm: v.confirm,
	}
	live, stop := context.WithCancel(t.s.ctx)
	v.stop = stop
	loaded := make(chan error, 1)
	if !t.s.task(func(context.Context) {
		defer close(v.done)
		v.follower.run(live, func(err error) { loaded <- err })
	}) {
		stop()
		return nil, fmt.Errorf("follow %s: the store is closed: %w", t.bucket, ErrUnavailable)
	}
	select {
	case err := <-loaded:
		if err != nil {
			v.Close()
			return nil, fmt.Errorf("follow %s: %w", t.bucket, err)
		}
		return v, nil
	case <-ctx.Done():
		v.Close()
		return nil, fmt.Errorf("follow %s: %w", t.bucket, context.Cause(ctx))
	}
}

// Get is the row of key as the view knows it.
func (v *View[T]) Get(key string) (Row[T], bool) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	row, ok := v.rows[key]
	if !ok || row.deleted {
		return Row[T]{}, false
	}
	return Row[T]{Key: key, Value: *row.value, Revision: row.revision}, true
}

// Rows are all rows, sorted by key.
func (v *View[T]) Rows() []Row[T] {
	v.mu.RLock()
	rows := make([]Row[T], 0, len(v.rows))
	for key, row := range v.rows {
		if !row.deleted {
			rows = append(rows, Row[T]{Key: key, Value: *row.value, Revision: row.revision})
		}
	}
	v.mu.RUnlock()
	slices.SortFunc(rows, func(a, b Row[T]) int { return cmp.Compare(a.Key, b.Key) })
	return rows
}

// Confirmed is the last moment at which the view is known to have held everything that the leader held. Only an answer of
// the leader moves it.
func (v *View[T]) Confirmed() time.Time {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.confirmed
}

// Close stops the view and waits for a running onChange. It may be called more than once.
func (v *View[T]) Close() {
	v.stop()
	<-v.done
}

func (v *View[T]) confirm(at time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if at.After(v.confirmed) {
		v.confirmed = at
	}
}

// knows reports whether key has a row, a deleted one too.
func (v *View[T]) knows(key string) bool {
	v.mu.RLock()
	defer v.mu.RUnlock()
	_, known := v.rows[key]
	return known
}

// load takes a whole bucket, or what was read of it and all its keys. What it doesn't hold any more is gone, unless it is newer than the scan. Revisions of another
// stream than before tell nothing, so then the scan alone counts.
func (v *View[T]) load(found scanned, anew bool) {
	for _, e := range found.entries {
		v.apply(e, anew)
	}
	v.mu.Lock()
	var gone []Row[T]
	for key, row := range v.rows {
		if found.keys[key] || !anew && row.revision > found.last {
			continue
		}
		delete(v.rows, key)
		if !row.deleted {
			gone = append(gone, Row[T]{Key: key, Revision: row.revision, Deleted: true})
		}
	}
	v.mu.Unlock()
	for _, row := range gone {
		v.onChange(row)
	}
}

// apply takes one message. One that isn't newer than what is known changes nothing, unless the stream is another one.
func (v *View[T]) apply(e entry, anew bool) {
	row := Row[T]{Key: e.key, Revision: e.seq, Deleted: true}
	if !e.deleted {
		decoded, err := decodeRow[T](e)
		if err != nil {
			v.follower.log.Error("a row is left out", "error", err)
		} else {
			row = decoded
		}
	}
	v.mu.Lock()
	was, known := v.rows[e.key]
	if known && !anew && e.seq <= was.revision {
		v.mu.Unlock()
		return
	}
	now := viewed[T]{revision: row.Revision, deleted: row.Deleted}
	if !v.without && !row.Deleted {
		value := row.Value
		now.value = &value
	}
	v.rows[e.key] = now
	v.mu.Unlock()
	if row.Deleted && (!known || was.deleted) {
		return // nobody was told of it
	}
	v.onChange(row)
}
