package jetstream

import (
	"context"
	"errors"
	"time"
)

// Table is one bucket with values of type T, stored as JSON. It is safe for concurrent use.
type Table[T any] struct{ s *Store }

// TableOf is the table of one bucket.
func TableOf[T any](s *Store, b Bucket) *Table[T] { return &Table[T]{s: s} }

// Row is one key with its value.
type Row[T any] struct {
	Key      string
	Value    T      // zero if Deleted
	Revision uint64 // what Update and Delete take
	Deleted  bool   // deleted or expired; only in changes
}

// Get reads one key from the leader; ErrNotFound if it is not there, deleted or expired.
func (t *Table[T]) Get(ctx context.Context, key string) (Row[T], error) {
	return Row[T]{}, errors.ErrUnsupported
}

// Create writes a key that is not there, or was deleted or expired, and returns its revision; ErrLost if it is there.
func (t *Table[T]) Create(ctx context.Context, key string, v T) (uint64, error) {
	return 0, errors.ErrUnsupported
}

// Update writes a key that is at revision rev and returns its new revision; ErrLost if it is not at rev.
func (t *Table[T]) Update(ctx context.Context, key string, v T, rev uint64) (uint64, error) {
	return 0, errors.ErrUnsupported
}

// Delete deletes a key that is at revision rev; ErrLost if it is not at rev.
func (t *Table[T]) Delete(ctx context.Context, key string, rev uint64) error {
	return errors.ErrUnsupported
}

// List reads all keys from the leader.
func (t *Table[T]) List(ctx context.Context) ([]Row[T], error) { return nil, errors.ErrUnsupported }

// Follow starts a View. onChange, which may be nil, is called for each row of the initial state before Follow returns, then
// for each change, deletes and expiries too, never concurrently.
func (t *Table[T]) Follow(ctx context.Context, onChange func(Row[T])) (*View[T], error) {
	return nil, errors.ErrUnsupported
}

// View is a live local copy of a table.
type View[T any] struct{}

// Get is the row of key as the view knows it.
func (v *View[T]) Get(key string) (Row[T], bool) { return Row[T]{}, false }

// Rows are all rows, sorted by key.
func (v *View[T]) Rows() []Row[T] { return nil }

// Confirmed is when the view was last known to hold what the leader holds.
func (v *View[T]) Confirmed() time.Time { return time.Time{} }

// Close stops the view and waits for a running onChange: don't call it from there.
func (v *View[T]) Close() {}
