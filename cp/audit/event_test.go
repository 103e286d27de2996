package audit

import (
	"bytes"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

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
