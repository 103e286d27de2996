package source

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/decimal128"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"pgregory.net/rapid"
)

// mixedSchema has columns of every sort.
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

// flatSchema has flat columns only, with metadata and types that have parameters.
var flatMetadata = arrow.MetadataFrom(map[string]string{"k": "v", "": "empty"})

var flatSchema = arrow.NewSchema([]arrow.Field{
	{Name: "n", Type: arrow.PrimitiveTypes.Int64, Nullable: true},
	{Name: "s", Type: arrow.BinaryTypes.LargeString, Nullable: true, Metadata: flatMetadata},
	{Name: "", Type: arrow.BinaryTypes.Binary},
	{Name: "b", Type: arrow.FixedWidthTypes.Boolean, Nullable: true},
	{Name: "small", Type: arrow.PrimitiveTypes.Uint8, Nullable: true},
	{Name: "at", Type: &arrow.TimestampType{Unit: arrow.Millisecond, TimeZone: "Europe/Vienna"}, Nullable: true},
	{Name: "d", Type: &arrow.Decimal128Type{Precision: 12, Scale: 2}, Nullable: true},
	{Name: "id", Type: &arrow.FixedSizeBinaryType{ByteWidth: 3}, Nullable: true},
	{Name: "text", Type: arrow.BinaryTypes.String, Nullable: true},
}, &flatMetadata)

// mixed draws a batch: columns with and without NULLs, empty text, text that compresses and bytes that don't.
func mixed(t *rapid.T, schema *arrow.Schema, mem memory.Allocator) arrow.RecordBatch {
	rows := rapid.SampledFrom([]int{0, 1, 7, 64, 65, 3000}).Draw(t, "rows")
	seed := rapid.Uint64().Draw(t, "seed")
	nulls := rapid.IntRange(0, 3).Draw(t, "nulls")
	r := rand.New(rand.NewPCG(seed, 0))
	null := func() bool { return nulls > 0 && r.IntN(4) < nulls }
	b := array.NewRecordBuilder(mem, schema)
	defer b.Release()
	for i := range rows {
		for j, f := range b.Fields() {
			if schema.Field(j).Nullable && null() {
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
			case *array.LargeStringBuilder:
				f.Append(strings.Repeat("cd", r.IntN(20)))
			case *array.Uint8Builder:
				f.Append(uint8(i))
			case *array.TimestampBuilder:
				f.Append(arrow.Timestamp(i))
			case *array.Decimal128Builder:
				f.Append(decimal128.FromI64(int64(i)))
			case *array.FixedSizeBinaryBuilder:
				f.Append([]byte{1, 2, byte(i)})
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
			default:
				t.Fatalf("no value for a %T", f)
			}
		}
	}
	return b.NewRecordBatch()
}

// What was written comes back, whatever is in it, also from slices of larger batches, and no stream has anything of another.
func TestCompressedStreamRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		schema := rapid.SampledFrom([]*arrow.Schema{mixedSchema, flatSchema, pairSchema}).Draw(t, "schema")
		var stream bytes.Buffer
		z, err := newZstdStream(&stream)
		if err != nil {
			t.Fatal(err)
		}
		if err := z.begin(schema); err != nil {
			t.Fatal(err)
		}
		var sent []arrow.RecordBatch
		for range rapid.IntRange(0, 3).Draw(t, "batches") {
			batch := mixed(t, schema, memory.DefaultAllocator)
			from := rapid.Int64Range(0, batch.NumRows()).Draw(t, "from")
			batch = batch.NewSlice(from, rapid.Int64Range(from, batch.NumRows()).Draw(t, "to"))
			sent = append(sent, batch)
			if err := z.batch(batch); err != nil {
				t.Fatal(err)
			}
		}
		if err := z.end(); err != nil {
			t.Fatal(err)
		}
		r, err := ipc.NewReader(&stream)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Release()
		if got := r.Schema(); !got.Equal(schema) || !got.Metadata().Equal(schema.Metadata()) {
			t.Fatalf("schema %v came back as %v", schema, got)
		}
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

// Each of these schemas differs from the first in one thing that its message tells: none is taken for another.
func TestSchemasAreToldApart(t *testing.T) {
	field := func(change func(*arrow.Field)) *arrow.Schema {
		f := arrow.Field{Name: "a", Type: arrow.FixedWidthTypes.Timestamp_ms}
		if change != nil {
			change(&f)
		}
		return arrow.NewSchema([]arrow.Field{f}, nil)
	}
	meta := arrow.MetadataFrom(map[string]string{"k": "v"})
	all := []*arrow.Schema{
		field(nil),
		field(func(f *arrow.Field) { f.Name = "b" }),
		field(func(f *arrow.Field) { f.Nullable = true }),
		field(func(f *arrow.Field) { f.Metadata = meta }),
		field(func(f *arrow.Field) { f.Type = arrow.FixedWidthTypes.Timestamp_us }),
		field(func(f *arrow.Field) { f.Type = &arrow.TimestampType{Unit: arrow.Millisecond, TimeZone: "Asia/Tokyo"} }),
		field(func(f *arrow.Field) { f.Type = &arrow.FixedSizeBinaryType{ByteWidth: 1} }),
		field(func(f *arrow.Field) { f.Type = &arrow.FixedSizeBinaryType{ByteWidth: 2} }),
		field(func(f *arrow.Field) { f.Type = &arrow.Decimal128Type{Precision: 2, Scale: 1} }),
		field(func(f *arrow.Field) { f.Type = &arrow.Decimal128Type{Precision: 2, Scale: 0} }),
		arrow.NewSchema(field(nil).Fields(), &meta),
		arrow.NewSchema(append(field(nil).Fields(), field(nil).Field(0)), nil),
		arrow.NewSchema(nil, nil),
	}
	seen := map[string]int{}
	for i, s := range all {
		key := string(describe(nil, s))
		if other, ok := seen[key]; ok {
			t.Errorf("%v is taken for %v", s, all[other])
		}
		seen[key] = i
	}
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

// TestWhatDoesNotCompressIsLeftAlone: after a few batches of noise most go out as they are, and what compresses again is found.
func TestWhatDoesNotCompressIsLeftAlone(t *testing.T) {
	schema := arrow.NewSchema([]arrow.Field{{Name: "b", Type: arrow.BinaryTypes.Binary}}, nil)
	batchOf := func(cell []byte) arrow.RecordBatch {
		b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
		defer b.Release()
		column, ok := b.Field(0).(*array.BinaryBuilder)
		if !ok {
			t.Fatal("not a binary column")
		}
		column.Append(cell)
		return b.NewRecordBatch()
	}
	noise, zeros := make([]byte, 64<<10), make([]byte, 64<<10)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range noise {
		noise[i] = byte(r.Uint32())
	}
	var stream bytes.Buffer
	out := NewOutput(&stream, Limits{}, nil)
	if err := out.Start(schema); err != nil {
		t.Fatal(err)
	}
	var sizes []int
	write := func(cell []byte) {
		before := stream.Len()
		batch := batchOf(cell)
		defer batch.Release()
		if err := out.Write(batch); err != nil {
			t.Fatal(err)
		}
		sizes = append(sizes, stream.Len()-before)
	}
	const noisy = 1 + 1 + 1 + 3 + 1 // tried, left alone, tried, three left alone, tried
	for range noisy {
		write(noise)
	}
	for range mostSkipped {
		write(zeros)
	}
	write(zeros)
	write(zeros)
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	tried := 0
	for _, n := range sizes[:noisy] {
		if n != sizes[1] {
			tried++
		}
	}
	if tried != 3 {
		t.Errorf("of %d noisy batches %d were compressed, not 3: %v", noisy, tried, sizes[:noisy])
	}
	if first, last := sizes[noisy], sizes[len(sizes)-1]; first < len(zeros) || last > len(zeros)/10 {
		t.Errorf("a batch of zeros has %d bytes right after the noise, and %d at the end", first, last)
	}
	reader, err := ipc.NewReader(&stream)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Release()
	for i := 0; reader.Next(); i++ {
		want := zeros
		if i < noisy {
			want = noise
		}
		column, ok := reader.RecordBatch().Column(0).(*array.Binary)
		if !ok || !bytes.Equal(column.Value(0), want) {
			t.Fatalf("batch %d is another", i)
		}
		sizes = sizes[1:]
	}
	if err := reader.Err(); err != nil || len(sizes) > 0 {
		t.Fatalf("%d batches did not arrive: %v", len(sizes), err)
	}
}
