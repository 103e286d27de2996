package source

import (
	"bytes"
	"testing"

	flatbuffers "github.com/google/flatbuffers/go"
	"pgregory.net/rapid"
)

// What is written over the last message is what flatbuffers builds, whatever shapes come after each other.
func TestBatchMetadataIsBuilt(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := batchMetadata{builder: flatbuffers.NewBuilder(64)}
		number := rapid.OneOf(rapid.Int64Range(0, 2), rapid.Int64Range(0, 1<<40))
		list := func(name string) []extent {
			return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) extent {
				return extent{number.Draw(t, "offset"), number.Draw(t, "length")}
			}), 0, 3).Draw(t, name)
		}
		for range rapid.IntRange(1, 20).Draw(t, "batches") {
			b := recordBatch{rows: number.Draw(t, "rows"), nodes: list("nodes"), buffers: list("buffers")}
			body, compressed := number.Draw(t, "body"), rapid.Bool().Draw(t, "compressed")
			want := b.message(flatbuffers.NewBuilder(64), body, compressed)
			if got := m.message(b, body, compressed); !bytes.Equal(got, want) {
				t.Fatalf("%v, body %d, compressed %v: % x, not % x", b, body, compressed, got, want)
			}
		}
	})
}
