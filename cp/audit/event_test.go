package audit

import (
	"bytes"
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

func now() time.Time { return time.Unix(1_700_000_000, 0) }

func TestEvent(t *testing.T) {
	e := Event("operator", "tenant.create", "tenant:acme", "ok", "a", "1", "b")
	if d := e.GetDetails(); len(d) != 2 || d["a"] != "1" || d["b"] != "" {
		t.Fatalf("details: %v", d)
	}
	if Event("a", "b", "c", "ok").Details != nil {
		t.Fatal("details of none")
	}
	first, err := encodeEvent(e, now())
	if err != nil || e.GetId() == "" || !e.GetAt().AsTime().Equal(now()) {
		t.Fatalf("filled: %v, %v", e, err)
	}
	id := e.GetId()
	if _, err := encodeEvent(e, now().Add(time.Hour)); err != nil || e.GetId() != id || !e.GetAt().AsTime().Equal(now()) {
		t.Fatalf("filled twice: %v, %v", e, err)
	}
	if len(first) == 0 {
		t.Fatal("nothing is encoded")
	}
}

// The events are written by hand; protobuf's own reader must see in them what was recorded.
func TestEventIsProtobufJSON(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{"", "\x00\x1f\"\\</>&", "\u2028é\U0001f600\x7f"}))
		e := &runbusv1.AuditEvent{
			Id: text.Draw(t, "id"), Tenant: text.Draw(t, "tenant"), Actor: text.Draw(t, "actor"), Action: text.Draw(t, "action"),
			Subject: text.Draw(t, "subject"), Outcome: text.Draw(t, "outcome"),
			At:      &timestamppb.Timestamp{Seconds: rapid.Int64Range(-62135596800, 253402300799).Draw(t, "s"), Nanos: rapid.Int32Range(0, 999999999).Draw(t, "ns")},
			Details: rapid.MapOf(text, text).Draw(t, "details"),
		}
		body, err := appendEvent(nil, e)
		if err != nil {
			t.Fatal(err)
		}
		got := &runbusv1.AuditEvent{}
		if err := protojson.Unmarshal(body, got); err != nil || !proto.Equal(got, e) {
			t.Fatalf("%s\nreads as %v, not %v: %v", body, got, e, err)
		}
		if bytes.ContainsRune(body, '\n') {
			t.Fatalf("more than a line: %q", body)
		}
	})
	if body, err := appendEvent(nil, &runbusv1.AuditEvent{Actor: "a", Action: "b", At: timestamppb.New(now()), Subject: "\xff"}); err == nil {
		t.Fatalf("not UTF-8, and written as %s", body)
	}
}

// An event as values reads like one of Note, whatever its texts are; what can't be written leaves the ones beside it whole.
func TestJot(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := openStore(t, b, b.Conn(t, embedded.UserSec))
	l := newLog(t, b, s, "one")
	began := time.Now()
	for i := range 3 {
		l.Jot(&Brief{
			Tenant: "acme", Actor: "person:é\"", Action: "a.b", Subject: "s:" + strconv.Itoa(i), Outcome: "ok",
			Details: []Detail{{Name: "a", Value: "<x & y>"}, {Name: "b", Value: ""}},
		})
		l.Jot(&Brief{Actor: "x", Action: "y", Subject: "\xff"})
		l.Jot(&Brief{Actor: "\xff", Action: "y"})
		l.Jot(&Brief{Subject: "of nobody"})
		l.Jot(&Brief{Actor: "x", Action: "y", Subject: strings.Repeat("x", maxEventBytes)})
	}
	run(t, l)()
	events, err := l.List(ctx, "acme", 10)
	if err != nil || len(events) != 3 {
		t.Fatalf("%d events, %v", len(events), err)
	}
	for _, e := range events {
		if e.GetActor() != "person:é\"" || e.GetAction() != "a.b" || e.GetOutcome() != "ok" || len(e.GetId()) != 26 ||
			len(e.GetDetails()) != 2 || e.GetDetails()["a"] != "<x & y>" || e.GetAt().AsTime().Sub(began).Abs() > time.Hour {
			t.Errorf("event %v", e)
		}
	}
	if _, err := l.Verify(ctx); err != nil {
		t.Fatal(err)
	}
}

// Numbers are written as strconv and time write them, in the note as in an event of Record.
func TestNumbersOfDetails(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64().Draw(t, "n")
		for want, d := range map[string]Detail{strconv.FormatInt(n, 10): Int("n", n), time.Duration(n).String(): Took("d", time.Duration(n))} {
			b, err := d.appendValue(nil)
			if err != nil || string(b) != `"`+want+`"` {
				t.Fatalf("%s, not %s: %v", b, want, err)
			}
			brief := Brief{Actor: "a", Action: "b", Details: []Detail{d}}
			if got := brief.Event().GetDetails()[d.Name]; got != want {
				t.Fatalf("%s, not %s", got, want)
			}
		}
	})
}

// clock must write what the time package writes.
func TestClock(t *testing.T) {
	var c clock
	rapid.Check(t, func(t *rapid.T) {
		at := time.Unix(rapid.Int64Range(0, 3).Draw(t, "s"), rapid.Int64Range(0, 999_999_999).Draw(t, "ns"))
		if got, want := string(c.append(nil, at)), at.UTC().Format("2006-01-02T15:04:05.000000000Z"); got != want {
			t.Fatalf("%s, not %s", got, want)
		}
	})
}

func BenchmarkJot(b *testing.B) {
	l := &Log{wake: make(chan struct{}, 1)}
	e := Brief{
		Tenant: "acme", Actor: "person:wanda", Action: "dispatch.end", Subject: "dispatch:01ARZ3NDEKTSV4RRFFQ69G5FAV", Outcome: "ok",
		Details: []Detail{{Name: "bytes", Value: "1024"}, {Name: "outcome", Value: "completed"}, {Name: "ran", Value: "812.345µs"}, {Name: "rows", Value: "1"}, {Name: "runner", Value: "edge-1"}, {Name: "source", Value: "file"}},
	}
	b.ReportAllocs()
	for b.Loop() {
		l.Jot(&e)
		if l.notes == maxNotes {
			l.finish(l.take(), nil)
		}
	}
}

func TestPlain(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := string(rapid.SliceOfN(rapid.OneOf(rapid.ByteRange('#', 'Z'), rapid.Byte()), 0, 40).Draw(t, "s"))
		if isPlain(s) != plainBytes(s) {
			t.Fatalf("%q: %t", s, isPlain(s))
		}
	})
}

func TestCounter(t *testing.T) {
	var c counter
	seen := map[string]bool{}
	for i := range 5000 {
		at := time.UnixMilli(1_700_000_000_000 + int64(i/100))
		c.next(at)
		id := string(c.text[:])
		got, err := ulid.ParseStrict(id)
		if err != nil || !ulid.Time(got.Time()).Equal(at) || seen[id] {
			t.Fatalf("%s of %s, seen %t: %v", id, at, seen[id], err)
		}
		seen[id] = true
	}
}

// Who notes faster than can be written is held back, and let go when there is room, when nothing can be written, and by its
// context.
func TestHold(t *testing.T) {
	b := bustest.Start(t)
	s := openStore(t, b, b.Conn(t, embedded.UserSec))
	fill := func() *Log {
		l := newLog(t, b, s, "one")
		l.Hold(t.Context()) // there is room
		for range crowdedAt {
			l.Jot(&Brief{Actor: "x", Action: "y"})
		}
		return l
	}
	for name, free := range map[string]func(*Log){
		"written": func(l *Log) { run(t, l)() },
		"failing": func(l *Log) { l.setFailing(errors.New("no disk")) },
	} {
		l := fill()
		held := make(chan struct{})
		go func() {
			l.Hold(context.Background())
			close(held)
		}()
		if !l.crowded.Load() {
			t.Errorf("%s: nobody would be held back", name)
		}
		free(l)
		<-held
		if l.crowded.Load() {
			t.Errorf("%s: it is still crowded", name)
		}
	}
	l := fill()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	l.Hold(gone)
}

// What somebody called a thing stands in the audit only if it may be shown.
func TestSubjectsOfNamesThatPeopleGive(t *testing.T) {
	for name, want := range map[string]string{
		"edge": "runner:edge", "01J0NE.x_y": "runner:01J0NE.x_y", "": "runner", "a b": "runner", strings.Repeat("x", 65): "runner",
		schemas.NewSessionToken(): "runner", schemas.TicketPrefix + "x": "runner",
	} {
		if got := Subject("runner", name); got != want {
			t.Errorf("%q is %q, want %q", name, got, want)
		}
	}
}
