package audit

import (
	"bytes"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// unwritten is a log without a stream.
func unwritten() *Log {
	return &Log{writer: "one", wake: make(chan struct{}, 1), log: slog.New(slog.DiscardHandler)}
}

// stored takes what waits in l, as it would stand in the stream, and reads it.
func stored(t rapid.TB, l *Log) (events []*runbusv1.AuditEvent, bodies [][]byte) {
	t.Helper()
	for batch := l.take(); len(batch) > 0; batch = l.take() {
		body, err := l.assemble(l.head, batch)
		if err != nil {
			t.Fatal(err)
		}
		read, err := l.head.next(l.head.number+1, body)
		if err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		events, bodies = append(events, read.GetEvents()...), append(bodies, bytes.Clone(body))
		l.finish(batch, nil)
	}
	return events, bodies
}

// drawBrief is an event that sometimes can't be written.
func drawBrief(t *rapid.T, at time.Time) Brief {
	few := func(what string, of ...string) string { return rapid.SampledFrom(of).Draw(t, what) }
	e := Brief{
		At: at, Tenant: few("tenant", "acme", "acme", "acme", "other", ""), Actor: few("actor", "person:a", "person:a", "person:\"é\"", "\xff"),
		Action: few("action", "a", "a", "a", "b", ""), Subject: few("subject", "x", "y", "z", ""), Outcome: few("outcome", "ok", "ok", "failed", ""),
	}
	for _, name := range []string{"a", "b", "c"} {
		switch few(name, "text", "text", "int", "int", "int", "time", "none") {
		case "text":
			e.Details = append(e.Details, Detail{Name: name, Value: few("value", "1", "2", "", "\\", "\xff")})
		case "int":
			e.Details = append(e.Details, Int(name, rapid.Int64Range(1, 2).Draw(t, "n")))
		case "time":
			e.Details = append(e.Details, Took(name, time.Duration(rapid.Int64Range(1, 2).Draw(t, "d"))))
		}
	}
	if rapid.IntRange(0, 20).Draw(t, "many") == 0 {
		for i := range 10 {
			e.Details = append(e.Details, Int("m"+strconv.Itoa(i), 1))
		}
	}
	return e
}

// identified is a copy of e with an id of its time.
func identified(e *runbusv1.AuditEvent) *runbusv1.AuditEvent {
	e = proto.CloneOf(e)
	e.Id = schemas.NewULID(e.GetAt().AsTime())
	return e
}

// Whatever events follow one another, and whatever stands between them, each reads as it was noted.
func TestEventsReadAsTheyWereNoted(t *testing.T) {
	how := append(slices.Repeat([]string{"jot"}, 60), "begin", "begin", "begin", "note", "note", "record", "take")
	rapid.Check(t, func(t *rapid.T) {
		l := unwritten()
		var want, got []*runbusv1.AuditEvent
		at := time.UnixMilli(1_700_000_000_000)
		for range rapid.IntRange(0, 100).Draw(t, "events") {
			at = at.Add(time.Duration(rapid.Int64Range(-1e6, 1e9).Draw(t, "later")))
			e := drawBrief(t, at)
			event := e.Event()
			event.At = timestamppb.New(at)
			switch how[rapid.IntRange(0, len(how)-1).Draw(t, "how")] {
			case "jot":
				l.Jot(&e)
			case "begin":
				var o Opening
				l.Begin(&o, &e)
				l.End(&o, &e)
			case "note":
				l.Note(identified(event))
			case "record":
				if body, err := encodeEvent(identified(event), at); err != nil {
					l.dropped++
				} else {
					l.records++
					l.pending = append(l.pending, part{record: &entry{body: body, done: make(chan error, 1)}})
				}
			case "take":
				events, _ := stored(t, l)
				got = append(got, events...)
				continue
			}
			if l.dropped == 0 {
				want = append(want, event)
			}
			l.dropped = 0 // what can't be written
		}
		events, _ := stored(t, l)
		if got = append(got, events...); len(got) != len(want) {
			t.Fatalf("%d events, not %d", len(got), len(want))
		}
		seen := map[string]bool{}
		for i, e := range got {
			id, err := ulid.ParseStrict(e.GetId())
			if err != nil || ulid.Time(id.Time()).UnixMilli() != e.GetAt().AsTime().UnixMilli() || seen[e.GetId()] {
				t.Fatalf("event %d of %v has id %s, seen %t: %v", i, e.GetAt().AsTime(), e.GetId(), seen[e.GetId()], err)
			}
			seen[e.GetId()] = true
			if e.Id = ""; !proto.Equal(e, want[i]) {
				t.Fatalf("event %d is %v, not %v", i, e, want[i])
			}
		}
	})
}

// dispatched is the end of a dispatch like any other.
func dispatched(n int) *Brief {
	return &Brief{
		Tenant: "acme", Actor: "person:wanda", Action: "dispatch.end", Subject: "dispatch:01ARZ3NDEKTSV4RRFFQ6" + strconv.Itoa(10000+n), Outcome: "ok",
		Details: []Detail{
			Int("bytes", int64(1000+n%10)), {Name: "chosen", Value: "for this action"}, {Name: "outcome", Value: "completed"},
			Took("ran", 812345*time.Nanosecond+time.Duration(n)), Int("rows", 1), {Name: "runner", Value: "edge-1"}, {Name: "source", Value: "file"},
		},
	}
}

// More than fits into one batch goes into several, each of which reads by itself.
func TestAPartThatIsFull(t *testing.T) {
	l := unwritten()
	const n = 600
	for i := range n {
		e := dispatched(i)
		e.Details[4] = Detail{Name: "reason", Value: strconv.Itoa(i) + strings.Repeat("x", 2<<10)}
		l.Jot(e)
	}
	events, bodies := stored(t, l)
	if len(events) != n || len(bodies) < 2 {
		t.Fatalf("%d events in %d batches", len(events), len(bodies))
	}
	for i, e := range events {
		if e.GetTenant() != "acme" || !strings.HasPrefix(e.GetDetails()["reason"], strconv.Itoa(i)+"x") {
			t.Errorf("event %d is %v", i, e)
		}
	}
}
