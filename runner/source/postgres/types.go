package postgres

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// Types by the OIDs that every PostgreSQL gives them.
const (
	oidBool        = 16
	oidBytea       = 17
	oidName        = 19
	oidInt8        = 20
	oidInt2        = 21
	oidInt4        = 23
	oidText        = 25
	oidOID         = 26
	oidXID         = 28
	oidCID         = 29
	oidJSON        = 114
	oidFloat4      = 700
	oidFloat8      = 701
	oidUnknown     = 705
	oidBPChar      = 1042
	oidVarchar     = 1043
	oidDate        = 1082
	oidTime        = 1083
	oidTimestamp   = 1114
	oidTimestampTZ = 1184
	oidInterval    = 1186
	oidNumeric     = 1700
	oidUUID        = 2950
	oidJSONB       = 3802
	oidXID8        = 5069
)

// PostgreSQL counts from 2000-01-01, Arrow from 1970-01-01.
const (
	epochDays   = 10957
	epochMicros = epochDays * dayMicros
	dayMicros   = 86_400_000_000
)

// kind is how a PostgreSQL type becomes an Arrow type.
type kind struct {
	arrow     arrow.DataType
	extension string // of Arrow, if any
	format    int16  // to ask the server for: 0 text, 1 binary
	// into returns what appends a value to a builder of the Arrow type.
	into func(b array.Builder) func(value []byte) error
}

// valueError is a value that its Arrow type can't hold.
type valueError struct{ reason, hint string }

func (e *valueError) Error() string { return e.reason }

var errSize = errors.New("a value of the wrong size")

var be = binary.BigEndian

// kind chooses for a column; note gets what the caller has to know.
func (f field) kind(note func(string)) kind {
	if k, ok := scalar(f.typeOID, f.typmod, f.enum); ok {
		return k
	}
	if f.element != 0 {
		if k, ok := scalar(f.element, f.elementMod, f.elementEnum); ok {
			return f.list(k, note)
		}
	}
	return kind{arrow: arrow.BinaryTypes.String, into: intoText} // the server's own text
}

// scalar is the kind of a type that is decoded from its binary format.
func scalar(oid uint32, typmod int32, enum bool) (kind, bool) {
	k := kind{format: 1}
	switch oid {
	case oidBool:
		k.arrow, k.into = arrow.FixedWidthTypes.Boolean, intoBool
	case oidInt2:
		k.arrow, k.into = arrow.PrimitiveTypes.Int16, intoInt16
	case oidInt4:
		k.arrow, k.into = arrow.PrimitiveTypes.Int32, intoInt32
	case oidInt8:
		k.arrow, k.into = arrow.PrimitiveTypes.Int64, intoInt64
	case oidOID, oidXID, oidCID:
		k.arrow, k.into = arrow.PrimitiveTypes.Uint32, intoUint32
	case oidXID8:
		k.arrow, k.into = arrow.PrimitiveTypes.Uint64, intoUint64
	case oidFloat4:
		k.arrow, k.into = arrow.PrimitiveTypes.Float32, intoFloat32
	case oidFloat8:
		k.arrow, k.into = arrow.PrimitiveTypes.Float64, intoFloat64
	case oidNumeric:
		k.arrow, k.into = numericKind(typmod)
	case oidText, oidVarchar, oidBPChar, oidName, oidUnknown:
		k.arrow, k.into = arrow.BinaryTypes.String, intoText
	case oidBytea:
		k.arrow, k.into = arrow.BinaryTypes.Binary, intoBinary
	case oidUUID:
		k.arrow, k.extension, k.into = &arrow.FixedSizeBinaryType{ByteWidth: 16}, "arrow.uuid", intoUUID
	case oidJSON:
		k.arrow, k.extension, k.into = arrow.BinaryTypes.String, "arrow.json", intoText
	case oidJSONB:
		k.arrow, k.extension, k.into = arrow.BinaryTypes.String, "arrow.json", intoJSONB
	case oidDate:
		k.arrow, k.into = arrow.FixedWidthTypes.Date32, intoDate
	case oidTime:
		k.arrow, k.into = arrow.FixedWidthTypes.Time64us, intoTime
	case oidTimestamp:
		k.arrow, k.into = &arrow.TimestampType{Unit: arrow.Microsecond}, intoTimestamp
	case oidTimestampTZ:
		k.arrow, k.into = &arrow.TimestampType{Unit: arrow.Microsecond, TimeZone: "UTC"}, intoTimestamp
	case oidInterval:
		k.arrow, k.into = arrow.FixedWidthTypes.MonthDayNanoInterval, intoInterval
	default:
		if !enum {
			return kind{}, false
		}
		k.arrow, k.into = arrow.BinaryTypes.String, intoText
	}
	return k, true
}

func intoBool(b array.Builder) func([]byte) error {
	into := b.(*array.BooleanBuilder)
	return func(v []byte) error {
		if len(v) != 1 {
			return errSize
		}
		into.Append(v[0] != 0)
		return nil
	}
}

func intoInt16(b array.Builder) func([]byte) error {
	into := b.(*array.Int16Builder)
	return func(v []byte) error {
		if len(v) != 2 {
			return errSize
		}
		into.Append(int16(be.Uint16(v)))
		return nil
	}
}

func intoInt32(b array.Builder) func([]byte) error {
	into := b.(*array.Int32Builder)
	return func(v []byte) error {
		if len(v) != 4 {
			return errSize
		}
		into.Append(int32(be.Uint32(v)))
		return nil
	}
}

func intoInt64(b array.Builder) func([]byte) error {
	into := b.(*array.Int64Builder)
	return func(v []byte) error {
		if len(v) != 8 {
			return errSize
		}
		into.Append(int64(be.Uint64(v)))
		return nil
	}
}

func intoUint32(b array.Builder) func([]byte) error {
	into := b.(*array.Uint32Builder)
	return func(v []byte) error {
		if len(v) != 4 {
			return errSize
		}
		into.Append(be.Uint32(v))
		return nil
	}
}

func intoUint64(b array.Builder) func([]byte) error {
	into := b.(*array.Uint64Builder)
	return func(v []byte) error {
		if len(v) != 8 {
			return errSize
		}
		into.Append(be.Uint64(v))
		return nil
	}
}

func intoFloat32(b array.Builder) func([]byte) error {
	into := b.(*array.Float32Builder)
	return func(v []byte) error {
		if len(v) != 4 {
			return errSize
		}
		into.Append(math.Float32frombits(be.Uint32(v)))
		return nil
	}
}

func intoFloat64(b array.Builder) func([]byte) error {
	into := b.(*array.Float64Builder)
	return func(v []byte) error {
		if len(v) != 8 {
			return errSize
		}
		into.Append(math.Float64frombits(be.Uint64(v)))
		return nil
	}
}

func intoText(b array.Builder) func([]byte) error {
	into := b.(*array.StringBuilder).BinaryBuilder
	return func(v []byte) error {
		if !utf8.Valid(v) { // a query can change the session's encoding
			return &valueError{reason: "text that is not UTF-8", hint: "leave client_encoding as it is; select bytes as bytea"}
		}
		into.Append(v)
		return nil
	}
}

func intoBinary(b array.Builder) func([]byte) error {
	into := b.(*array.BinaryBuilder)
	return func(v []byte) error {
		into.Append(v)
		return nil
	}
}

func intoUUID(b array.Builder) func([]byte) error {
	into := b.(*array.FixedSizeBinaryBuilder)
	return func(v []byte) error {
		if len(v) != 16 {
			return errSize
		}
		into.Append(v)
		return nil
	}
}

// intoJSONB takes the text behind the version byte.
func intoJSONB(b array.Builder) func([]byte) error {
	text := intoText(b)
	return func(v []byte) error {
		if len(v) < 1 || v[0] != 1 {
			return errors.New("jsonb of an unknown version")
		}
		return text(v[1:])
	}
}

func intoDate(b array.Builder) func([]byte) error {
	into := b.(*array.Date32Builder)
	return func(v []byte) error {
		if len(v) != 4 {
			return errSize
		}
		days := int32(be.Uint32(v))
		switch {
		case days == math.MaxInt32 || days == math.MinInt32:
			return infinite(days > 0, "date")
		case days > math.MaxInt32-epochDays:
			return &valueError{reason: "a date too late for Arrow's date32"}
		}
		into.Append(arrow.Date32(days + epochDays))
		return nil
	}
}

func infinite(positive bool, what string) error {
	if positive {
		return &valueError{reason: fmt.Sprintf("infinity is a value that Arrow's %s does not have", what)}
	}
	return &valueError{reason: fmt.Sprintf("-infinity is a value that Arrow's %s does not have", what)}
}

func intoTime(b array.Builder) func([]byte) error {
	into := b.(*array.Time64Builder)
	return func(v []byte) error {
		if len(v) != 8 {
			return errSize
		}
		micros := int64(be.Uint64(v))
		switch {
		case micros == dayMicros:
			return &valueError{reason: "24:00:00 is a value that Arrow's time64 does not have"}
		case micros < 0 || micros > dayMicros:
			return errors.New("a time that is not within a day")
		}
		into.Append(arrow.Time64(micros))
		return nil
	}
}

func intoTimestamp(b array.Builder) func([]byte) error {
	into := b.(*array.TimestampBuilder)
	return func(v []byte) error {
		if len(v) != 8 {
			return errSize
		}
		micros := int64(be.Uint64(v))
		if micros > math.MaxInt64-epochMicros || micros == math.MinInt64 {
			if micros == math.MaxInt64 || micros == math.MinInt64 {
				return infinite(micros > 0, "timestamp")
			}
			return &valueError{reason: "a time too late for Arrow's timestamp in microseconds, which ends in the year 294247"}
		}
		into.Append(arrow.Timestamp(micros + epochMicros))
		return nil
	}
}

func intoInterval(b array.Builder) func([]byte) error {
	into := b.(*array.MonthDayNanoIntervalBuilder)
	return func(v []byte) error {
		if len(v) != 16 {
			return errSize
		}
		micros, days, months := int64(be.Uint64(v)), int32(be.Uint32(v[8:])), int32(be.Uint32(v[12:]))
		switch { // PostgreSQL 17 has infinite intervals
		case micros == math.MaxInt64 && days == math.MaxInt32 && months == math.MaxInt32:
			return infinite(true, "interval")
		case micros == math.MinInt64 && days == math.MinInt32 && months == math.MinInt32:
			return infinite(false, "interval")
		case micros > math.MaxInt64/1000 || micros < math.MinInt64/1000:
			return &valueError{reason: "an interval of more than 292 years in hours, minutes and seconds, which Arrow counts in nanoseconds"}
		}
		into.Append(arrow.MonthDayNanoInterval{Months: months, Days: days, Nanoseconds: micros * 1000})
		return nil
	}
}
