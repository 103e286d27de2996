package schemas_test

import (
	"testing"
	"time"

	"github.com/oklog/ulid/v2"

	"github.com/org-runink/runbus/schemas"
)

func TestNewULID(t *testing.T) {
	at := time.UnixMilli(1_700_000_000_123)
	seen := map[string]bool{}
	for range 10_000 {
		id := schemas.NewULID(at)
		got, err := ulid.ParseStrict(id)
		if err != nil || !ulid.Time(got.Time()).Equal(at) {
			t.Fatalf("%s: %v", id, err)
		}
		if seen[id] {
			t.Fatalf("%s twice", id)
		}
		seen[id] = true
	}
	for _, at := range []time.Time{{}, time.Unix(1<<40, 0)} {
		if _, err := ulid.ParseStrict(schemas.NewULID(at)); err != nil {
			t.Errorf("at %s: %v", at, err)
		}
	}
}

func BenchmarkNewULID(b *testing.B) {
	at := time.Now()
	b.ReportAllocs()
	for b.Loop() {
		schemas.NewULID(at)
	}
}
