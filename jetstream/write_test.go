package jetstream

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/bustest"
)

// Whoever appends again what he may have appended before, and can't see at once that it stands, is not told that another one was first.
func TestAnAppendThatIsNotReadIsNotLost(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, nil)
	if _, err := s.AppendAudit(ctx, []byte("one"), "", 0); err != nil {
		t.Fatal(err)
	}
	asked := 0
	seq, err := s.commit(ctx, write{
		subject: auditSubject, body: []byte("one"), guard: natsjs.ExpectedLastSeqHeader, appends: true,
		standing: func(ctx context.Context) (*natsjs.RawStreamMsg, error) {
			if asked++; asked < 3 {
				return nil, ErrUnavailable
			}
			return s.stream(auditStream).GetMsg(ctx, 1)
		},
	})
	if err != nil || seq != 1 || asked < 3 {
		t.Errorf("the same append again: %d, %v, after %d reads", seq, err, asked)
	}
}

// A caller that goes away in the middle of a write hears what became of it, and never that a write that stands was lost.
func TestWriteWithNoTime(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, nil)
	table := TableOf[value](s, Known)
	for i := range 50 {
		key := fmt.Sprintf("k%d", i)
		short, cancel := context.WithTimeout(ctx, time.Duration(i)*20*time.Microsecond)
		_, err := table.Create(short, key, value{key, i})
		cancel()
		row, readErr := table.Get(ctx, key)
		switch {
		case err == nil && readErr != nil:
			t.Fatalf("granted and not there: %v", readErr)
		case errors.Is(err, ErrLost):
			t.Fatalf("lost to nobody: %v", err)
		case err != nil && !errors.Is(err, ErrUnknown) && !errors.Is(err, ErrUnavailable):
			t.Fatalf("create with no time: %v", err)
		case readErr == nil && row.Value.N != i:
			t.Fatalf("another's value: %+v", row)
		}
	}
}
