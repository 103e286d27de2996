package api

import (
	"bytes"
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// Headers of Zstandard frames.
const (
	window1K   = "\x28\xb5\x2f\xfd\x00\x00"
	window8M   = "\x28\xb5\x2f\xfd\x00\x68"
	window9M   = "\x28\xb5\x2f\xfd\x00\x69"
	window512M = "\x28\xb5\x2f\xfd\x00\x98"
	summed1K   = "\x28\xb5\x2f\xfd\x04\x00"                 // a checksum comes behind its blocks
	single512M = "\x28\xb5\x2f\xfd\xa0\x00\x00\x00\x20"     // all in one segment, as large as its content
	skippable  = "\x53\x2a\x4d\x18\x03\x00\x00\x00\x28\xb5" // says that a byte more is skipped
)

// raw is a block of a frame as it is, the last or not.
func raw(b []byte, last bool) string {
	head := uint32(len(b)) << 3
	if last {
		head |= 1
	}
	return string([]byte{byte(head), byte(head >> 8), byte(head >> 16)}) + string(b)
}

// reframed is a stream whose n-th message, that has two numbers of 64 bits in one buffer, has these frames for that.
func reframed(t testing.TB, stream []byte, n int, frames string) []byte {
	t.Helper()
	at := 0
	for ; n > 0; n-- {
		size := int(binary.LittleEndian.Uint32(stream[at+4:]))
		v := &verifier{b: stream[at+8 : at+8+size]}
		at += 8 + size + int(v.message())
	}
	size := int(binary.LittleEndian.Uint32(stream[at+4:]))
	meta := bytes.Clone(stream[at+8 : at+8+size])
	v := &verifier{b: meta}
	length := int(v.message())
	if v.err != nil || v.packed == 0 {
		t.Fatalf("%d buffers, %v", v.packed, v.err)
	}
	rest := stream[at+8+size+length:]
	last := v.buffers + 16*(v.packed-1)
	body := bytes.Clone(stream[at+8+size:][:binary.LittleEndian.Uint64(meta[last:])])
	body = binary.LittleEndian.AppendUint64(body, 16)
	body = append(body, frames...)
	binary.LittleEndian.PutUint64(meta[last+8:], uint64(8+len(frames)))
	body = append(body, make([]byte, -len(body)&7)...)
	binary.LittleEndian.PutUint64(meta[v.table(v.ref(0)).slot(3, 8):], uint64(len(body)))
	return slices.Concat(stream[:at+8], meta, body, rest)
}

// twoNumbers are two numbers, and their bytes.
func twoNumbers(t testing.TB, typ arrow.DataType) (stream, plain []byte) {
	t.Helper()
	f := arrow.Field{Name: "v", Type: typ}
	a := column(t, f.Type, func(b array.Builder) {
		for _, n := range []int64{1, 2} {
			switch b := b.(type) {
			case *array.Int64Builder:
				b.Append(n)
			case *array.Int64DictionaryBuilder:
				if err := b.Append(n); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
	defer a.Release()
	plain = binary.LittleEndian.AppendUint64(plain, 1)
	return one(t, f, a), binary.LittleEndian.AppendUint64(plain, 2)
}

// A Zstandard frame gets no more memory than any runner's needs, wherever in a buffer it is, in a batch and in a dictionary.
func TestZstandardWindows(t *testing.T) {
	for kind, typ := range map[string]arrow.DataType{
		"batch":      arrow.PrimitiveTypes.Int64,
		"dictionary": &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.PrimitiveTypes.Int64},
	} {
		stream, plain := twoNumbers(t, typ)
		want := asNDJSON(t, stream)
		for name, c := range map[string]struct{ frames, refused string }{
			"as a runner's":          {window1K + raw(plain, true), ""},
			"the largest":            {window8M + raw(plain, true), ""},
			"several":                {window1K + raw(plain[:8], true) + skippable + "x" + window8M + raw(plain[8:12], false) + raw(plain[12:], true), ""},
			"too large":              {window9M + raw(plain, true), "window of 9437184 bytes"},
			"huge":                   {window512M + raw(plain, true), "window of 536870912 bytes"},
			"a huge segment":         {single512M + raw(plain, true), "window of 536870912 bytes"},
			"behind another":         {window1K + raw(plain[:8], true) + window512M + raw(plain[8:], true), "window of 536870912 bytes"},
			"behind many blocks":     {window1K + raw(plain[:4], false) + raw(plain[4:8], true) + window512M + raw(plain[8:], true), "window of 536870912 bytes"},
			"behind a repeated":      {window1K + "\x43\x00\x00\x01" + window512M + raw(plain[8:], true), "window of 536870912 bytes"},
			"behind a checksum":      {summed1K + raw(plain[:8], true) + "\x00\x00\x00\x00" + window512M + raw(plain[8:], true), "window of 536870912 bytes"},
			"behind what is skipped": {skippable + "x" + window512M + raw(plain, true), "window of 536870912 bytes"},
			"behind all":             {window1K + raw(plain, true) + window512M + raw(nil, true), "window of 536870912 bytes"},
		} {
			got := reframed(t, stream, 1, c.frames)
			if c.refused == "" {
				if lines := asNDJSON(t, got); !slices.Equal(lines, want) {
					t.Errorf("%s, %s: %q", kind, name, lines)
				}
				continue
			}
			if err := decoded(got); err == nil || !strings.Contains(err.Error(), c.refused) || !strings.Contains(err.Error(), "not a valid Arrow stream") {
				t.Errorf("%s, %s: %v", kind, name, err)
			}
		}
	}
}

// A batch in LZ4, which no runner sends, is refused before its decoder sees it.
func TestNoLZ4(t *testing.T) {
	b := array.NewInt64Builder(memory.DefaultAllocator)
	defer b.Release()
	b.AppendValues([]int64{1, 2}, nil)
	a := b.NewArray()
	defer a.Release()
	schema := arrow.NewSchema([]arrow.Field{{Name: "v", Type: a.DataType()}}, nil)
	batch := array.NewRecordBatch(schema, []arrow.Array{a}, 2)
	defer batch.Release()
	var out bytes.Buffer
	w := ipc.NewWriter(&out, ipc.WithSchema(schema), ipc.WithLZ4())
	if err := w.Write(batch); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := decoded(out.Bytes()); err == nil || !strings.Contains(err.Error(), "compressed with codec 0") {
		t.Error(err)
	}
}

// The buffers of a compressed batch may not be the same bytes again and again.
func TestCompressedBuffersThatOverlap(t *testing.T) {
	stream, plain := twoNumbers(t, arrow.PrimitiveTypes.Int64)
	whole := reframed(t, stream, 1, window1K+raw(plain, true))
	meta := metadata(t, whole, 1)
	v := &verifier{b: meta}
	v.message()
	if v.packed < 2 {
		t.Fatalf("%d buffers", v.packed)
	}
	last := v.buffers + 16*(v.packed-1)
	copy(meta[v.buffers:last], meta[last:last+16])
	if err := decoded(whole); err == nil || !strings.Contains(err.Error(), "a compressed buffer of") {
		t.Error(err)
	}
}
