package bus

import (
	"errors"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// A stream whose assignment another goroutine is to write is not Written before it has, though it is closed: its memory, and that of the
// body, may not be another dispatch's until then. What went wrong with the write is told to the stream that it was of.
func TestAssignmentIsWrittenBeforeItsMemoryIsFree(t *testing.T) {
	all := &Receivers{conn: NewConn(nil), replica: schemas.NewID(), open: make(map[string]*Receiver), slots: fullSlots}
	all.writing = true // somebody is
	ref := schemas.RunnerRef{Tenant: "acme", Runner: "edge"}
	closed, open := all.Open(ref, "s", "d1", 0), all.Open(ref, "s", "d2", 0)
	for _, one := range []*Receiver{closed, open} {
		if !one.Written() {
			t.Error("a stream without an assignment waits for one")
		}
		if err := one.Assign(Trace{}, Abilities{Assignments: true}, []byte{1}); err != nil {
			t.Fatal(err)
		}
	}
	closed.Close()
	if closed.Written() || open.Written() {
		t.Error("nobody has written, and the memory is free")
	}
	if err := all.assign(nil, rounds); err != nil { // no link takes it
		t.Error(err)
	}
	if !closed.Written() || !open.Written() {
		t.Error("the write is over, and the memory is not free")
	}
	if _, err := closed.Try(); !errors.Is(err, ErrClosed) {
		t.Errorf("the closed stream says %v", err)
	}
	if _, err := open.Try(); !errors.Is(err, ErrNotSent) {
		t.Errorf("the open stream says %v", err)
	}
}
