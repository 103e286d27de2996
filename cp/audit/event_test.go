package audit

import (
	"testing"
	"time"
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
