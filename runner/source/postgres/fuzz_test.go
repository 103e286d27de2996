package postgres

import (
	"bytes"
	"encoding/binary"
	"math/big"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// numericBytes is a numeric in the binary format.
func numericBytes(weight int16, sign uint16, scale uint16, digits ...uint16) []byte {
	b := binary.BigEndian.AppendUint16(nil, uint16(len(digits)))
	b = binary.BigEndian.AppendUint16(b, uint16(weight))
	b = binary.BigEndian.AppendUint16(b, sign)
	b = binary.BigEndian.AppendUint16(b, scale)
	for _, d := range digits {
		b = binary.BigEndian.AppendUint16(b, d)
	}
	return b
}

// FuzzNumeric: the ways to decode a numeric agree, and none panics.
func FuzzNumeric(f *testing.F) {
	f.Add(numericBytes(0, 0, 2, 12, 3400), uint8(2))
	f.Add(numericBytes(9, numericNegative, 0, 99, 9999, 9999, 9999, 9999, 9999, 9999, 9999, 9999, 9999), uint8(0))
	f.Add(numericBytes(-1, 0, 38, 9999, 9999, 9999, 9999, 9999, 9999, 9999, 9999, 9999, 9900), uint8(38))
	f.Add(numericBytes(0, numericNaN, 0), uint8(0))
	f.Add(numericBytes(32767, 0, 0, 1), uint8(10))
	f.Add(numericBytes(-32768, 0, 5, 1), uint8(5))
	f.Fuzz(func(t *testing.T, v []byte, s uint8) {
		scale := int(s % 39)
		text := array.NewStringBuilder(memory.DefaultAllocator)
		small := array.NewDecimal128Builder(memory.DefaultAllocator, &arrow.Decimal128Type{Precision: 38, Scale: int32(scale)})
		large := array.NewDecimal256Builder(memory.DefaultAllocator, &arrow.Decimal256Type{Precision: 76, Scale: int32(scale)})
		textErr, smallErr, largeErr := intoNumericText(text)(v), intoDecimal128(scale)(small)(v), intoDecimal256(scale)(large)(v)
		if smallErr == nil && largeErr != nil {
			t.Fatalf("fits 128 bits, but not 256: %v", largeErr)
		}
		if largeErr != nil {
			return
		}
		if textErr != nil {
			t.Fatalf("fits a decimal, but is no text: %v", textErr)
		}
		wide := large.NewDecimal256Array().Value(0)
		if smallErr == nil {
			if got := small.NewDecimal128Array().Value(0); got.BigInt().Cmp(wide.BigInt()) != 0 {
				t.Fatalf("128 bits have %s, 256 have %s", got.BigInt(), wide.BigInt())
			}
		}
		n, err := parseNumeric(v)
		if err != nil {
			t.Fatal(err)
		}
		// The text shows the whole value when its own scale is as fine as its digits are.
		if fine := 4 * (n.len() - 1 - n.weight); n.len() > 0 && n.scale < fine {
			return
		}
		written := text.NewStringArray().Value(0)
		want, ok := new(big.Rat).SetString(written)
		if !ok {
			t.Fatalf("%q is no number", written)
		}
		got := new(big.Rat).SetFrac(wide.BigInt(), new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(scale)), nil))
		if got.Cmp(want) != 0 {
			t.Fatalf("the decimal is %s, the text %s", got, written)
		}
	})
}

// FuzzArray: a value adds exactly one list, or an error.
func FuzzArray(f *testing.F) {
	one := func(dims ...int32) []byte {
		b := binary.BigEndian.AppendUint32(nil, uint32(len(dims)))
		b = binary.BigEndian.AppendUint32(b, 0)
		b = binary.BigEndian.AppendUint32(b, oidInt4)
		total := int32(1)
		for _, d := range dims {
			b = binary.BigEndian.AppendUint32(b, uint32(d))
			b = binary.BigEndian.AppendUint32(b, 1)
			total *= d
		}
		for range total {
			b = append(b, 0, 0, 0, 4, 0, 0, 0, 7)
		}
		return b
	}
	f.Add(one(), uint8(1))
	f.Add(one(3), uint8(1))
	f.Add(one(2, 3), uint8(2))
	f.Add(one(2, 2, 2), uint8(3))
	f.Fuzz(func(t *testing.T, v []byte, d uint8) {
		field := field{name: "a", declared: oidInt4, element: oidInt4, elementMod: -1, dims: int(d%3) + 1}
		k := field.kind(func(string) {})
		b := array.NewBuilder(memory.DefaultAllocator, k.arrow)
		defer b.Release()
		if err := k.into(b)(v); err != nil {
			return
		}
		if b.Len() != 1 {
			t.Fatalf("%d lists for one value", b.Len())
		}
		a := b.NewArray()
		defer a.Release()
		if err := array.NewRecordBatch(arrow.NewSchema([]arrow.Field{{Name: "a", Type: k.arrow, Nullable: true}}, nil), []arrow.Array{a}, 1).NumRows(); err != 1 {
			t.Fatal("no batch of it")
		}
		if text := a.ValueStr(0); !strings.HasPrefix(text, "[") {
			t.Fatalf("the list is written %s", text)
		}
	})
}

// FuzzScalars: no value of any type panics, adds more than itself, or makes text that is not UTF-8.
func FuzzScalars(f *testing.F) {
	oids := []uint32{
		oidBool, oidBytea, oidName, oidInt8, oidInt2, oidInt4, oidText, oidOID, oidJSON, oidFloat4, oidFloat8, oidDate, oidTime,
		oidTimestamp, oidTimestampTZ, oidInterval, oidNumeric, oidUUID, oidJSONB, oidXID8,
	}
	for i := range oids {
		f.Add(uint8(i), []byte{1, '{', '}'})
		f.Add(uint8(i), bytes.Repeat([]byte{0x7f}, 8))
		f.Add(uint8(i), bytes.Repeat([]byte{0xff}, 16))
	}
	f.Fuzz(func(t *testing.T, which uint8, v []byte) {
		k, ok := scalar(oids[int(which)%len(oids)], -1, false)
		if !ok {
			t.Fatal("a type without a decoder")
		}
		b := array.NewBuilder(memory.DefaultAllocator, k.arrow)
		defer b.Release()
		if err := k.into(b)(v); err != nil {
			if b.Len() != 0 {
				t.Fatalf("%d values after an error", b.Len())
			}
			return
		}
		if b.Len() != 1 {
			t.Fatalf("%d values for one", b.Len())
		}
		a := b.NewArray()
		defer a.Release()
		if text, ok := a.(*array.String); ok && !utf8.ValidString(text.Value(0)) {
			t.Fatalf("%q is not UTF-8", text.Value(0))
		}
	})
}

// FuzzServer: whatever a server sends, the read ends, without a panic and without memory for what did not come.
func FuzzServer(f *testing.F) {
	message := func(kind byte, body ...byte) []byte {
		return append(binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(body)+4)), body...)
	}
	row := message('D', 0, 2, 0, 0, 0, 4, 0, 0, 0, 7, 0xff, 0xff, 0xff, 0xff)
	f.Add(bytes.Join([][]byte{message('1'), message('2'), row, row, message('C', 'S', 0), message('Z', 'T')}, nil))
	f.Add(bytes.Join([][]byte{row, message('E', 'S', 'E', 0, 'C', '2', '2', 0, 'M', 'x', 0, 0), message('Z', 'E')}, nil))
	f.Add(bytes.Join([][]byte{message('N', 'S', 'W', 0, 'M', 'x', 0, 0), message('T', 0, 0), message('Z', 'I')}, nil))
	f.Add([]byte{'D', 0x7f, 0xff, 0xff, 0xff, 0})
	f.Fuzz(func(t *testing.T, said []byte) {
		s := &session{reader: bytes.NewReader(said), buf: make([]byte, 64), note: func(string) {}, over: make(chan struct{})}
		mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
		defer mem.AssertSize(t, 0)
		r := newReader(mem, []field{{name: "n", typeOID: oidInt4, typmod: -1}, {name: "t", typeOID: oidText, typmod: -1}}, s.note)
		defer r.release()
		var rows int64
		err := r.read(s, 1<<40, func(b arrow.RecordBatch) error {
			rows += b.NumRows()
			return nil
		})
		if err == nil && !bytes.Contains(said, []byte{'Z'}) {
			t.Fatalf("%d rows of a result without an end", rows)
		}
		if len(s.buf) > 64+2*len(said)+readBuffer {
			t.Fatalf("a buffer of %d bytes for %d", len(s.buf), len(said))
		}
	})
}
