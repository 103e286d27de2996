package source

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"pgregory.net/rapid"
)

var mixedSchema = arrow.NewSchema([]arrow.Field{
	{Name: "n", Type: arrow.PrimitiveTypes.Int64, Nullable: true},
	{Name: "s", Type: arrow.BinaryTypes.String, Nullable: true},
	{Name: "b", Type: arrow.BinaryTypes.Binary, Nullable: true},
	{Name: "null", Type: arrow.Null, Nullable: true},
	{Name: "flag", Type: arrow.FixedWidthTypes.Boolean, Nullable: true},
	{Name: "list", Type: arrow.ListOf(arrow.BinaryTypes.String), Nullable: true},
	{Name: "pair", Type: arrow.StructOf(arrow.Field{Name: "d", Type: &arrow.Decimal128Type{Precision: 12, Scale: 2}, Nullable: true}), Nullable: true},
	{Name: "word", Type: &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}, Nullable: true},
}, nil)

// mixed draws a batch: columns with and without NULLs, empty text, text that compresses and bytes that don't.
func mixed(t *rapid.T, mem memory.Allocator) arrow.RecordBatch {
	rows := rapid.SampledFrom([]int{0, 1, 7, 64, 65, 3000}).Draw(t, "rows")
	seed := rapid.Uint64().Draw(t, "seed")
	nulls := rapid.IntRange(0, 3).Draw(t, "nulls")
	r := rand.New(rand.NewPCG(seed, 0))
	null := func() bool { return nulls > 0 && r.IntN(4) < nulls }
	b := array.NewRecordBuilder(mem, mixedSchema)
	defer b.Release()
	for i := range rows {
		for _, f := range b.Fields() {
			if null() {
				f.AppendNull()
				continue
			}
			switch f := f.(type) {
			case *array.Int64Builder:
				f.Append(int64(i))
			case *array.StringBuilder:
				f.Append(strings.Repeat("ab", r.IntN(20)))
			case *array.BinaryBuilder:
				v := make([]byte, r.IntN(40))
				for j := range v {
					v[j] = byte(r.Uint32())
				}
				f.Append(v)
			case *array.NullBuilder:
				f.AppendNull()
			case *array.BooleanBuilder:
				f.Append(r.IntN(2) == 0)
			case *array.ListBuilder:
				f.Append(true)
				for range r.IntN(4) {
					f.ValueBuilder().(*array.StringBuilder).Append("x")
				}
			case *array.StructBuilder:
				f.Append(true)
				f.FieldBuilder(0).AppendValueFromString("12.50") //nolint:errcheck // it is a decimal
			case *array.BinaryDictionaryBuilder:
				f.AppendString("w") //nolint:errcheck // it is text
			}
		}
	}
	return b.NewRecordBatch()
}

// What was written comes back, whatever is in it, also from slices of larger batches.
func TestCompressedStreamRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var stream bytes.Buffer
		z, err := newZstdStream(&stream)
		if err != nil {
			t.Fatal(err)
		}
		w := ipc.NewWriterWithPayloadWriter(z, ipc.WithSchema(mixedSchema))
		var sent []arrow.RecordBatch
		for range rapid.IntRange(0, 3).Draw(t, "batches") {
			batch := mixed(t, memory.DefaultAllocator)
			from := rapid.Int64Range(0, batch.NumRows()).Draw(t, "from")
			batch = batch.NewSlice(from, rapid.Int64Range(from, batch.NumRows()).Draw(t, "to"))
			sent = append(sent, batch)
			if err := w.Write(batch); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		r, err := ipc.NewReader(&stream)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Release()
		for i := range sent {
			if !r.Next() {
				t.Fatalf("the stream ended before batch %d: %v", i, r.Err())
			}
			if !array.RecordEqual(sent[i], r.RecordBatch()) {
				t.Fatalf("batch %d: %v came back as %v", i, sent[i], r.RecordBatch())
			}
		}
		if r.Next() || r.Err() != nil {
			t.Fatalf("behind the last batch: %v", r.Err())
		}
		if stream.Len() != 0 {
			t.Fatalf("%d bytes behind the end mark", stream.Len())
		}
	})
}

// The batches are compressed, and say so, and what does not compress is not made larger by more than its prefix.
func TestStreamIsCompressed(t *testing.T) {
	size := func(batch arrow.RecordBatch) int {
		var stream bytes.Buffer
		o := NewOutput(&stream, Limits{}, nil)
		if err := o.Start(batch.Schema()); err != nil {
			t.Fatal(err)
		}
		from := stream.Len()
		if err := o.Write(batch); err != nil {
			t.Fatal(err)
		}
		return stream.Len() - from
	}
	text := pairs(memory.DefaultAllocator, 0, 1000, 500)
	if n := size(text); n > 20_000 {
		t.Errorf("half a megabyte of the same letter takes %d bytes", n)
	}
	b := array.NewRecordBuilder(memory.DefaultAllocator, pairSchema)
	noise := rand.New(rand.NewPCG(1, 2))
	for range 1000 {
		b.Field(0).(*array.Int64Builder).Append(int64(noise.Uint64()))
		b.Field(1).AppendNull()
	}
	if n := size(b.NewRecordBatch()); n < 8000 || n > 9500 {
		t.Errorf("8000 bytes of noise take %d bytes", n)
	}
}
