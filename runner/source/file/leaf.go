package file

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/big"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/decimal128"
	"github.com/apache/arrow-go/v18/arrow/decimal256"
	"github.com/apache/arrow-go/v18/arrow/float16"
	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/deprecated"
	"github.com/parquet-go/parquet-go/format"

	"github.com/org-runink/runbus/runner/source/tabular"
)

// leaf is the Arrow form of a Parquet column without parts. append adds a value that is not null and returns its bytes.
//
// Signed and unsigned integers, floats, booleans, DATE, TIME and DECIMAL (128 bits up to 38 digits, else 256) become the Arrow
// types of the same name and width. TIMESTAMP keeps its unit; adjusted to UTC it has the zone UTC, else none. INT96, which
// older writers used, is a timestamp in nanoseconds without zone. STRING and ENUM are text, JSON is text marked as arrow.json,
// UUID 16 bytes marked as arrow.uuid, INTERVAL month-day-nano. BSON, geometry, variants' parts and bytes without annotation
// are binary.
type leaf struct {
	typ      arrow.DataType
	metadata arrow.Metadata
	append   func(array.Builder, parquet.Value) (int64, error)
}

var uuidMetadata = arrow.NewMetadata([]string{"ARROW:extension:name", "ARROW:extension:metadata"}, []string{"arrow.uuid", ""})

// leafOf finds the Arrow form of a column.
func leafOf(e *format.SchemaElement) (leaf, error) {
	if l, ok := logicalLeaf(e); ok {
		return l, nil
	}
	if l, ok, err := decimalLeaf(e); ok || err != nil {
		return l, err
	}
	if l, ok := legacyLeaf(e); ok {
		return l, nil
	}
	switch parquet.Kind(e.Type.V) {
	case parquet.Boolean:
		return fixed(arrow.FixedWidthTypes.Boolean, 1, func(b *array.BooleanBuilder, v parquet.Value) { b.Append(v.Boolean()) }), nil
	case parquet.Int32:
		return fixed(arrow.PrimitiveTypes.Int32, 4, func(b *array.Int32Builder, v parquet.Value) { b.Append(v.Int32()) }), nil
	case parquet.Int64:
		return fixed(arrow.PrimitiveTypes.Int64, 8, func(b *array.Int64Builder, v parquet.Value) { b.Append(v.Int64()) }), nil
	case parquet.Int96:
		return leaf{typ: &arrow.TimestampType{Unit: arrow.Nanosecond}, append: appendInt96}, nil
	case parquet.Float:
		return fixed(arrow.PrimitiveTypes.Float32, 4, func(b *array.Float32Builder, v parquet.Value) { b.Append(v.Float()) }), nil
	case parquet.Double:
		return fixed(arrow.PrimitiveTypes.Float64, 8, func(b *array.Float64Builder, v parquet.Value) { b.Append(v.Double()) }), nil
	case parquet.ByteArray:
		return leaf{typ: arrow.BinaryTypes.Binary, append: appendBinary}, nil
	case parquet.FixedLenByteArray:
		return fixedBytes(e)
	}
	return leaf{}, faultf("column %q has the unknown physical type %d", e.Name, e.Type.V)
}

// fixed is a leaf of a builder with one method to append.
func fixed[B array.Builder](t arrow.DataType, size int64, add func(B, parquet.Value)) leaf {
	return leaf{typ: t, append: func(b array.Builder, v parquet.Value) (int64, error) {
		add(b.(B), v)
		return size, nil
	}}
}

func physical(e *format.SchemaElement, k parquet.Kind) bool {
	return e.Type.Valid && parquet.Kind(e.Type.V) == k
}

// logicalLeaf is for the annotations of today.
func logicalLeaf(e *format.SchemaElement) (leaf, bool) {
	switch t := e.LogicalType.Value.(type) {
	case *format.StringType, *format.EnumType:
		return textLeaf(e)
	case *format.JsonType:
		return jsonLeaf(e)
	case *format.DateType:
		return dateLeaf(e)
	case *format.TimeType:
		return timeLeaf(e, unitOf(t.Unit))
	case *format.TimestampType:
		return timestampLeaf(e, unitOf(t.Unit), t.IsAdjustedToUTC)
	case *format.IntType:
		return intLeaf(e, int(t.BitWidth), t.IsSigned)
	case *format.NullType:
		return leaf{typ: arrow.Null, append: func(array.Builder, parquet.Value) (int64, error) {
			return 0, errors.New("a column of nulls has a value")
		}}, true
	case *format.UUIDType:
		if physical(e, parquet.FixedLenByteArray) && e.TypeLength.V == 16 {
			l, _ := fixedBytes(e) // the length is right
			l.metadata = uuidMetadata
			return l, true
		}
	case *format.Float16Type:
		if physical(e, parquet.FixedLenByteArray) && e.TypeLength.V == 2 {
			return leaf{typ: arrow.FixedWidthTypes.Float16, append: appendFloat16}, true
		}
	}
	return leaf{}, false
}

// legacyLeaf is for the annotations of older writers.
func legacyLeaf(e *format.SchemaElement) (leaf, bool) {
	if e.LogicalType.Value != nil || !e.ConvertedType.Valid {
		return leaf{}, false
	}
	switch e.ConvertedType.V {
	case deprecated.UTF8, deprecated.Enum:
		return textLeaf(e)
	case deprecated.Json:
		return jsonLeaf(e)
	case deprecated.Date:
		return dateLeaf(e)
	case deprecated.TimeMillis:
		return timeLeaf(e, arrow.Millisecond)
	case deprecated.TimeMicros:
		return timeLeaf(e, arrow.Microsecond)
	case deprecated.TimestampMillis:
		return timestampLeaf(e, arrow.Millisecond, true)
	case deprecated.TimestampMicros:
		return timestampLeaf(e, arrow.Microsecond, true)
	case deprecated.Int8:
		return intLeaf(e, 8, true)
	case deprecated.Int16:
		return intLeaf(e, 16, true)
	case deprecated.Int32:
		return intLeaf(e, 32, true)
	case deprecated.Int64:
		return intLeaf(e, 64, true)
	case deprecated.Uint8:
		return intLeaf(e, 8, false)
	case deprecated.Uint16:
		return intLeaf(e, 16, false)
	case deprecated.Uint32:
		return intLeaf(e, 32, false)
	case deprecated.Uint64:
		return intLeaf(e, 64, false)
	case deprecated.Interval:
		if physical(e, parquet.FixedLenByteArray) && e.TypeLength.V == 12 {
			return leaf{typ: arrow.FixedWidthTypes.MonthDayNanoInterval, append: appendInterval}, true
		}
	}
	return leaf{}, false
}

func unitOf(u format.TimeUnit) arrow.TimeUnit {
	switch u.Value.(type) {
	case *format.MilliSeconds:
		return arrow.Millisecond
	case *format.MicroSeconds:
		return arrow.Microsecond
	}
	return arrow.Nanosecond
}

func textLeaf(e *format.SchemaElement) (leaf, bool) {
	return leaf{typ: arrow.BinaryTypes.String, append: appendText}, physical(e, parquet.ByteArray)
}

func jsonLeaf(e *format.SchemaElement) (leaf, bool) {
	return leaf{typ: arrow.BinaryTypes.String, metadata: tabular.JSONMetadata, append: appendText}, physical(e, parquet.ByteArray)
}

func dateLeaf(e *format.SchemaElement) (leaf, bool) {
	return fixed(arrow.FixedWidthTypes.Date32, 4, func(b *array.Date32Builder, v parquet.Value) { b.Append(arrow.Date32(v.Int32())) }), physical(e, parquet.Int32)
}

func timeLeaf(e *format.SchemaElement, unit arrow.TimeUnit) (leaf, bool) {
	if unit == arrow.Millisecond {
		return fixed(arrow.FixedWidthTypes.Time32ms, 4, func(b *array.Time32Builder, v parquet.Value) { b.Append(arrow.Time32(v.Int32())) }), physical(e, parquet.Int32)
	}
	return fixed(&arrow.Time64Type{Unit: unit}, 8, func(b *array.Time64Builder, v parquet.Value) { b.Append(arrow.Time64(v.Int64())) }), physical(e, parquet.Int64)
}

func timestampLeaf(e *format.SchemaElement, unit arrow.TimeUnit, utc bool) (leaf, bool) {
	t := &arrow.TimestampType{Unit: unit}
	if utc {
		t.TimeZone = "UTC"
	}
	return fixed(t, 8, func(b *array.TimestampBuilder, v parquet.Value) { b.Append(arrow.Timestamp(v.Int64())) }), physical(e, parquet.Int64)
}

func intLeaf(e *format.SchemaElement, width int, signed bool) (leaf, bool) {
	if width == 64 {
		if signed {
			return leaf{}, false // as without annotation
		}
		return fixed(arrow.PrimitiveTypes.Uint64, 8, func(b *array.Uint64Builder, v parquet.Value) { b.Append(v.Uint64()) }), physical(e, parquet.Int64)
	}
	is32 := physical(e, parquet.Int32)
	switch {
	case width == 8 && signed:
		return narrow(arrow.PrimitiveTypes.Int8, 1, func(b *array.Int8Builder, n int32) bool { b.Append(int8(n)); return n == int32(int8(n)) }), is32
	case width == 16 && signed:
		return narrow(arrow.PrimitiveTypes.Int16, 2, func(b *array.Int16Builder, n int32) bool { b.Append(int16(n)); return n == int32(int16(n)) }), is32
	case width == 8:
		return narrow(arrow.PrimitiveTypes.Uint8, 1, func(b *array.Uint8Builder, n int32) bool { b.Append(uint8(n)); return n == int32(uint8(n)) }), is32
	case width == 16:
		return narrow(arrow.PrimitiveTypes.Uint16, 2, func(b *array.Uint16Builder, n int32) bool { b.Append(uint16(n)); return n == int32(uint16(n)) }), is32
	case width == 32 && !signed:
		return fixed(arrow.PrimitiveTypes.Uint32, 4, func(b *array.Uint32Builder, v parquet.Value) { b.Append(v.Uint32()) }), is32
	}
	return leaf{}, false
}

// narrow is a leaf of integers that are 32 bits wide in the file and less in Arrow.
func narrow[B array.Builder](t arrow.DataType, size int64, add func(B, int32) bool) leaf {
	return leaf{typ: t, append: func(b array.Builder, v parquet.Value) (int64, error) {
		if !add(b.(B), v.Int32()) {
			return 0, fmt.Errorf("%d is beyond the range of %s", v.Int32(), t)
		}
		return size, nil
	}}
}

// fixedBytes is a column of byte strings of one length.
func fixedBytes(e *format.SchemaElement) (leaf, error) {
	width := int(e.TypeLength.V)
	if !e.TypeLength.Valid || width <= 0 || width > 1<<20 {
		return leaf{}, faultf("column %q has byte strings of the length %d", e.Name, width)
	}
	return leaf{typ: &arrow.FixedSizeBinaryType{ByteWidth: width}, append: func(b array.Builder, v parquet.Value) (int64, error) {
		s := v.ByteArray()
		if len(s) != width {
			return 0, fmt.Errorf("a value has %d bytes, not %d", len(s), width)
		}
		b.(*array.FixedSizeBinaryBuilder).Append(s)
		return int64(width), nil
	}}, nil
}

// decimalLeaf is for DECIMAL in its four physical forms. False: the column is none.
func decimalLeaf(e *format.SchemaElement) (leaf, bool, error) {
	precision, scale := e.Precision.V, e.Scale.V
	if d, ok := e.LogicalType.Value.(*format.DecimalType); ok {
		precision, scale = d.Precision, d.Scale
	} else if !converted(e, deprecated.Decimal) {
		return leaf{}, false, nil
	}
	if precision < 1 || precision > 76 || scale < 0 || scale > precision {
		return leaf{}, false, faultf("column %q is DECIMAL(%d,%d), which Arrow has no type for", e.Name, precision, scale)
	}
	value := func(v parquet.Value) *big.Int { return bigEndian(v.ByteArray()) }
	switch parquet.Kind(e.Type.V) {
	case parquet.Int32:
		value = func(v parquet.Value) *big.Int { return big.NewInt(int64(v.Int32())) }
	case parquet.Int64:
		value = func(v parquet.Value) *big.Int { return big.NewInt(v.Int64()) }
	case parquet.ByteArray, parquet.FixedLenByteArray:
	default:
		return leaf{}, false, faultf("column %q is a DECIMAL of the physical type %d", e.Name, e.Type.V)
	}
	if precision > 38 {
		return leaf{typ: &arrow.Decimal256Type{Precision: precision, Scale: scale}, append: func(b array.Builder, v parquet.Value) (int64, error) {
			n := value(v)
			if n.BitLen() > 255 || !decimal256.FromBigInt(n).FitsInPrecision(precision) {
				return 0, fmt.Errorf("a decimal has more than %d digits", precision)
			}
			b.(*array.Decimal256Builder).Append(decimal256.FromBigInt(n))
			return 32, nil
		}}, true, nil
	}
	return leaf{typ: &arrow.Decimal128Type{Precision: precision, Scale: scale}, append: func(b array.Builder, v parquet.Value) (int64, error) {
		n := value(v)
		if n.BitLen() > 127 || !decimal128.FromBigInt(n).FitsInPrecision(precision) {
			return 0, fmt.Errorf("a decimal has more than %d digits", precision)
		}
		b.(*array.Decimal128Builder).Append(decimal128.FromBigInt(n))
		return 16, nil
	}}, true, nil
}

// bigEndian reads a two's complement number.
func bigEndian(s []byte) *big.Int {
	n := new(big.Int).SetBytes(s)
	if len(s) > 0 && s[0] >= 0x80 {
		n.Sub(n, new(big.Int).Lsh(big.NewInt(1), uint(len(s))*8))
	}
	return n
}

func appendText(b array.Builder, v parquet.Value) (int64, error) {
	s := v.ByteArray()
	if !utf8.Valid(s) {
		return 0, errors.New("a text is not UTF-8")
	}
	b.(*array.StringBuilder).BinaryBuilder.Append(s)
	return int64(len(s)) + 4, nil
}

func appendBinary(b array.Builder, v parquet.Value) (int64, error) {
	s := v.ByteArray()
	b.(*array.BinaryBuilder).Append(s)
	return int64(len(s)) + 4, nil
}

func appendFloat16(b array.Builder, v parquet.Value) (int64, error) {
	s := v.ByteArray()
	if len(s) != 2 {
		return 0, fmt.Errorf("a half float has %d bytes", len(s))
	}
	b.(*array.Float16Builder).Append(float16.FromBits(binary.LittleEndian.Uint16(s)))
	return 2, nil
}

// appendInterval reads months, days and milliseconds.
func appendInterval(b array.Builder, v parquet.Value) (int64, error) {
	s := v.ByteArray()
	if len(s) != 12 {
		return 0, fmt.Errorf("an interval has %d bytes", len(s))
	}
	months, days := binary.LittleEndian.Uint32(s), binary.LittleEndian.Uint32(s[4:])
	if months > 1<<31-1 || days > 1<<31-1 {
		return 0, fmt.Errorf("an interval of %d months and %d days is beyond Arrow's range", months, days)
	}
	nanos := int64(binary.LittleEndian.Uint32(s[8:])) * 1_000_000
	b.(*array.MonthDayNanoIntervalBuilder).Append(arrow.MonthDayNanoInterval{Months: int32(months), Days: int32(days), Nanoseconds: nanos})
	return 16, nil
}

// appendInt96 reads nanoseconds of the day and the Julian day.
func appendInt96(b array.Builder, v parquet.Value) (int64, error) {
	x := v.Int96()
	const julianEpoch, day = 2440588, 86_400_000_000_000
	nanos := int64(uint64(x[1])<<32 | uint64(x[0]))
	days := int64(x[2]) - julianEpoch
	if nanos < 0 || nanos > day || days < -106_751 || days > 106_750 {
		return 0, errors.New("an INT96 timestamp is outside of 1677 to 2262")
	}
	b.(*array.TimestampBuilder).Append(arrow.Timestamp(days*day + nanos))
	return 8, nil
}
