package audit

import (
	"bytes"
	"log/slog"
	"strconv"
	"strings"
	"testing"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
)

// A list reads what it needs: of packed batches the last ones have all that is asked for, and nothing of the others is kept.
func TestListReadsWhatItNeeds(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := openStore(t, b, b.Conn(t, embedded.UserSec))
	const batches, each, damaged = listFirst + 1, 150, 1
	for i := range uint64(batches) {
		body, encoding := pack(nil, batchOf(t, each))
		if i+1 == damaged {
			body = body[1:] // whoever reads it says so
		}
		if _, err := s.AppendAudit(ctx, body, encoding, i); err != nil {
			t.Fatal(err)
		}
	}
	var said bytes.Buffer
	l := &Log{store: s, log: slog.New(slog.NewTextHandler(&said, nil))}
	const found = listFirst * each
	for _, c := range []struct {
		limit, want int
		all         bool // are read
	}{{1, 1, false}, {found, found, false}, {found + 1, found, true}} {
		said.Reset()
		events, err := l.List(ctx, "acme", c.limit)
		if err != nil || len(events) != c.want {
			t.Fatalf("limit %d: %d events, %v", c.limit, len(events), err)
		}
		if all := strings.Contains(said.String(), "a damaged audit batch"); all != c.all {
			t.Errorf("limit %d: that all batches are read is %t: %s", c.limit, all, said.String())
		}
		if cap(events) > 2*c.limit {
			t.Errorf("limit %d: %d events are kept", c.limit, cap(events))
		}
		for i, e := range events {
			if want := strconv.Itoa((found - len(events) + i) % each); e.GetSubject() != want {
				t.Fatalf("limit %d: event %d is of %s, not %s", c.limit, i, e.GetSubject(), want)
			}
		}
	}
}
