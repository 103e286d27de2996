package source

import (
	"bytes"
	"encoding/binary"
	"strconv"
	"sync"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// arrow's writer encodes the schema anew for each stream and makes several objects for each column: for a result of one row that was
// most of what a fetch cost the runner. Streams of flat columns, which is what connectors make most, are therefore written here: the
// message of a schema is kept for the next stream that has it, and that of a batch is built in memory that streams take turns
// with.

// flat reports whether each column of the schema is of a type whose arrays have no children: validity, perhaps offsets, and values.
func flat(schema *arrow.Schema) bool {
	for i := range schema.NumFields() {
		if !flatType(schema.Field(i).Type) {
			return false
		}
	}
	return true
}

func flatType(t arrow.DataType) bool {
	return t.ID() == arrow.BOOL || fixedWidth(t) > 0 || offsetWidth(t) > 0
}

// fixedWidth is the bytes of a value, 0 for types that have no such width.
func fixedWidth(t arrow.DataType) int {
	switch t.ID() {
	case arrow.INT8, arrow.INT16, arrow.INT32, arrow.INT64, arrow.UINT8, arrow.UINT16, arrow.UINT32, arrow.UINT64,
		arrow.FLOAT16, arrow.FLOAT32, arrow.FLOAT64, arrow.DATE32, arrow.DATE64, arrow.TIME32, arrow.TIME64, arrow.TIMESTAMP,
		arrow.DURATION, arrow.DECIMAL128, arrow.DECIMAL256, arrow.FIXED_SIZE_BINARY:
		if w, ok := t.(arrow.FixedWidthDataType); ok {
			return w.Bytes()
		}
	}
	return 0
}

// offsetWidth is the bytes of an offset, 0 for types without.
func offsetWidth(t arrow.DataType) int {
	switch t.ID() {
	case arrow.STRING, arrow.BINARY:
		return 4
	case arrow.LARGE_STRING, arrow.LARGE_BINARY:
		return 8
	}
	return 0
}

// mostSchemas bounds how many messages of schemas are kept, largestSchema how large one may be, in bytes.
const (
	mostSchemas   = 256
	largestSchema = 16 << 10
)

// schemaMessages are the messages of flat schemas that were written lately, by what describes a schema.
var schemaMessages = struct {
	sync.Mutex
	of map[string][]byte
}{of: make(map[string][]byte)}

// schemaMessage is the message of a flat schema, which nobody changes. memory is overwritten and handed back for the next call.
func schemaMessage(schema *arrow.Schema, scratch []byte) (message, _ []byte, err error) {
	key := describe(scratch[:0], schema)
	kept := &schemaMessages
	kept.Lock()
	defer kept.Unlock()
	if message := kept.of[string(key)]; message != nil {
		return message, key, nil
	}
	payload := ipc.GetSchemaPayload(schema, memory.DefaultAllocator)
	defer payload.Release()
	var w bytes.Buffer
	if _, err := payload.WritePayload(&w); err != nil {
		return nil, key, err
	}
	if w.Len()+len(key) <= largestSchema {
		if len(kept.of) >= mostSchemas {
			clear(kept.of)
		}
		kept.of[string(key)] = w.Bytes()
	}
	return w.Bytes(), key, nil
}

// describe appends what tells a flat schema from every other: names, types and metadata, each text with its length before it.
func describe(b []byte, schema *arrow.Schema) []byte {
	text := func(s string) {
		b = append(strconv.AppendInt(b, int64(len(s)), 10), ':')
		b = append(b, s...)
	}
	metadata := func(m arrow.Metadata) {
		b = append(strconv.AppendInt(b, int64(m.Len()), 10), ';')
		if m.Len() == 0 {
			return
		}
		for i, k := range m.Keys() {
			text(k)
			text(m.Values()[i])
		}
	}
	b = append(b, byte(schema.Endianness()))
	metadata(schema.Metadata())
	for i := range schema.NumFields() {
		f := schema.Field(i)
		text(f.Name)
		b = append(b, byte(f.Type.ID()))
		text(f.Type.String()) // not its fingerprint, which leaves the width of fixed_size_binary out
		b = strconv.AppendBool(b, f.Nullable)
		metadata(f.Metadata)
	}
	return b
}

// take fills nodes and parts with the columns of a batch with a flat schema. It reports false for one that arrow's writer must bring
// into shape first: a slice whose validity or offsets don't begin at a byte or at 0. The buffers stay those of the batch.
func (z *zstdStream) take(batch arrow.RecordBatch) bool {
	z.nodes, z.parts = z.nodes[:0], z.parts[:0]
	for _, column := range batch.Columns() {
		data := column.Data()
		rows, from, nulls, buffers := data.Len(), data.Offset(), column.NullN(), data.Buffers()
		if len(buffers) < 2 {
			return false
		}
		var valid []byte
		if nulls > 0 {
			if valid = bits(buffers[0], from, rows); valid == nil {
				return false
			}
		}
		z.nodes = append(z.nodes, extent{int64(rows), int64(nulls)})
		z.put(valid)
		var values []byte
		switch width, offsets := fixedWidth(data.DataType()), offsetWidth(data.DataType()); {
		case width > 0:
			values = cut(buffers[1], from*width, rows*width)
		case offsets > 0:
			list := cut(buffers[1], from*offsets, (rows+1)*offsets)
			if list == nil || len(buffers) < 3 || offsetAt(list, 0, offsets) != 0 {
				return false
			}
			z.put(list)
			end := offsetAt(list, rows, offsets)
			if end == 0 {
				z.put(nil)
				continue
			}
			values = cut(buffers[2], 0, end)
		default: // bool
			values = bits(buffers[1], from, rows)
		}
		if values == nil {
			return false
		}
		z.put(values)
	}
	return true
}

// put appends a part; what the one that stood there before was compressed into is used again.
func (z *zstdStream) put(in []byte) {
	if n := len(z.parts); n < cap(z.parts) {
		z.parts = z.parts[:n+1]
		z.parts[n].in = in
		return
	}
	z.parts = append(z.parts, part{in: in})
}

// cut is n bytes of a buffer, nil if it does not have them or n is 0.
func cut(b *memory.Buffer, from, n int) []byte {
	if b == nil || n == 0 || from+n > b.Len() {
		return nil
	}
	return b.Bytes()[from : from+n : from+n]
}

// bits is the bytes of n bits of a buffer, nil if they don't begin at a byte.
func bits(b *memory.Buffer, from, n int) []byte {
	if from%8 != 0 {
		return nil
	}
	return cut(b, from/8, (n+7)/8)
}

func offsetAt(list []byte, i, width int) int {
	if width == 4 {
		return int(binary.NativeEndian.Uint32(list[4*i:]))
	}
	return int(binary.NativeEndian.Uint64(list[8*i:])) // of memory that is there
}
