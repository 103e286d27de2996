package api

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// extensionName is the key under which a field of an IPC stream says which extension type it has.
const extensionName = "ARROW:extension:name"

// typeName is a column's type: the name of its extension type if it has one (`arrow.uuid`), else Arrow's name.
func typeName(f arrow.Field) string {
	if name, ok := f.Metadata.GetValue(extensionName); ok {
		return name
	}
	if ext, ok := f.Type.(arrow.ExtensionType); ok {
		return ext.ExtensionName()
	}
	return f.Type.String()
}

// maxText bounds a row as JSON, and a value in CSV, in bytes: a few bytes of Arrow may say the same again and again.
const maxText = maxLive

func errText() error { return fmt.Errorf("more than %d bytes of text", maxText) }

// appendValue writes one value as JSON, exactly: integers, finite floats and booleans as such, lists as arrays, structs as
// objects, maps as arrays of key and value, everything else as the text of valueText.
func appendValue(line []byte, f arrow.Field, a arrow.Array, row int) ([]byte, error) {
	if len(line) > maxText {
		return nil, errText()
	}
	a, row = physical(a, row)
	if a == nil {
		return append(line, "null"...), nil
	}
	switch a := a.(type) {
	case *array.Struct:
		fields := a.DataType().(*arrow.StructType).Fields()
		line = append(line, '{')
		for i, child := range fields {
			if i > 0 {
				line = append(line, ',')
			}
			key, err := json.Marshal(child.Name)
			if err != nil {
				return nil, err
			}
			line = append(append(line, key...), ':')
			if line, err = appendValue(line, child, a.Field(i), row); err != nil {
				return nil, err
			}
		}
		return append(line, '}'), nil
	case array.ListLike:
		element := a.DataType().(arrow.ListLikeType).ElemField()
		start, end := a.ValueOffsets(row)
		line = append(line, '[')
		for i := start; i < end; i++ {
			if i > start {
				line = append(line, ',')
			}
			var err error
			if line, err = appendValue(line, element, a.ListValues(), int(i)); err != nil {
				return nil, err
			}
		}
		return append(line, ']'), nil
	}
	text, bare, err := scalar(f, a, row)
	if err != nil {
		return nil, err
	}
	if bare {
		return append(line, text...), nil
	}
	return appendQuoted(line, text)
}

// quotedAtOnce is how much of a text is quoted at a time: it may get six times as long.
const quotedAtOnce = 64 << 10

// appendQuoted writes a text as JSON.
func appendQuoted(line []byte, text string) ([]byte, error) {
	line = append(line, '"')
	for len(text) > 0 {
		n := min(len(text), quotedAtOnce)
		for back := 0; n < len(text) && back < utf8.UTFMax; back++ {
			if at := quotedAtOnce - back; utf8.RuneStart(text[at]) { // not within a rune
				n = at
				break
			}
		}
		quoted, err := json.Marshal(text[:n])
		if err != nil {
			return nil, err
		}
		if len(line)+len(quoted) > maxText {
			return nil, errText()
		}
		line, text = append(line, quoted[1:len(quoted)-1]...), text[n:]
	}
	return append(line, '"'), nil
}

// valueText is one value as text, exactly, and whether it is NULL. Bytes are base64, a UUID is in its usual form, timestamps are
// RFC 3339 (in UTC; without a zone if the column has none), durations have their unit, nested values are JSON.
func valueText(f arrow.Field, a arrow.Array, row int) (text string, null bool, err error) {
	a, row = physical(a, row)
	if a == nil {
		return "", true, nil
	}
	switch a.(type) {
	case *array.Struct, array.ListLike:
		line, err := appendValue(nil, f, a, row)
		return string(line), false, err
	}
	text, _, err = scalar(f, a, row)
	return text, false, err
}

// physical is where the value of a row lies, behind dictionaries, runs, unions and extension types. It is nil for NULL.
func physical(a arrow.Array, row int) (arrow.Array, int) {
	for {
		if a.IsNull(row) {
			return nil, 0
		}
		switch x := a.(type) {
		case *array.Null:
			return nil, 0
		case *array.Dictionary:
			a, row = x.Dictionary(), x.GetValueIndex(row)
		case *array.RunEndEncoded:
			a, row = x.Values(), x.GetPhysicalIndex(row)
		case *array.DenseUnion:
			a, row = x.Field(x.ChildID(row)), int(x.ValueOffset(row))
		case *array.SparseUnion:
			a = x.Field(x.ChildID(row))
		case array.ExtensionArray:
			if x.ExtensionType().ExtensionName() == "arrow.uuid" {
				return a, row
			}
			a = x.Storage()
		default:
			return a, row
		}
	}
}

// scalar is the text of a value that is not NULL and not nested; bare if that is JSON without quotes.
func scalar(f arrow.Field, a arrow.Array, row int) (text string, bare bool, err error) {
	switch a := a.(type) {
	case *array.Boolean:
		return strconv.FormatBool(a.Value(row)), true, nil
	case *array.Int8:
		return strconv.FormatInt(int64(a.Value(row)), 10), true, nil
	case *array.Int16:
		return strconv.FormatInt(int64(a.Value(row)), 10), true, nil
	case *array.Int32:
		return strconv.FormatInt(int64(a.Value(row)), 10), true, nil
	case *array.Int64:
		return strconv.FormatInt(a.Value(row), 10), true, nil
	case *array.Uint8:
		return strconv.FormatUint(uint64(a.Value(row)), 10), true, nil
	case *array.Uint16:
		return strconv.FormatUint(uint64(a.Value(row)), 10), true, nil
	case *array.Uint32:
		return strconv.FormatUint(uint64(a.Value(row)), 10), true, nil
	case *array.Uint64:
		return strconv.FormatUint(a.Value(row), 10), true, nil
	case *array.Float16:
		return floatText(float64(a.Value(row).Float32()), 32)
	case *array.Float32:
		return floatText(float64(a.Value(row)), 32)
	case *array.Float64:
		return floatText(a.Value(row), 64)
	case *array.Decimal32:
		return decimalText(big.NewInt(int64(a.Value(row))), a), false, nil
	case *array.Decimal64:
		return decimalText(big.NewInt(int64(a.Value(row))), a), false, nil
	case *array.Decimal128:
		return decimalText(a.Value(row).BigInt(), a), false, nil
	case *array.Decimal256:
		return decimalText(a.Value(row).BigInt(), a), false, nil
	case *array.Timestamp:
		t := a.DataType().(*arrow.TimestampType)
		layout := "2006-01-02T15:04:05.999999999"
		if t.TimeZone != "" {
			layout += "Z" // the instant in UTC, whatever zone it is shown in
		}
		return a.Value(row).ToTime(t.Unit).Format(layout), false, nil
	case *array.Date32:
		return a.Value(row).ToTime().Format(time.DateOnly), false, nil
	case *array.Date64:
		return a.Value(row).ToTime().Format(time.DateOnly), false, nil
	case *array.Time32:
		return a.Value(row).ToTime(a.DataType().(*arrow.Time32Type).Unit).Format("15:04:05.999999999"), false, nil
	case *array.Time64:
		return a.Value(row).ToTime(a.DataType().(*arrow.Time64Type).Unit).Format("15:04:05.999999999"), false, nil
	case *array.Duration:
		return fmt.Sprintf("%d%s", int64(a.Value(row)), a.DataType().(*arrow.DurationType).Unit), false, nil
	case *array.FixedSizeBinary:
		if b := a.Value(row); typeName(f) == "arrow.uuid" && len(b) == 16 {
			return uuidText(b), false, nil
		}
		return base64.StdEncoding.EncodeToString(a.Value(row)), false, nil
	case *array.Binary:
		return base64.StdEncoding.EncodeToString(a.Value(row)), false, nil
	case *array.LargeBinary:
		return base64.StdEncoding.EncodeToString(a.Value(row)), false, nil
	case *array.BinaryView:
		return base64.StdEncoding.EncodeToString(a.Value(row)), false, nil
	case array.StringLike:
		return a.Value(row), false, nil
	case array.ExtensionArray: // arrow.uuid, see physical
		return uuidText(a.Storage().(*array.FixedSizeBinary).Value(row)), false, nil
	}
	b, err := json.Marshal(a.GetOneForMarshal(row)) // intervals: objects of their parts
	return string(b), true, err
}

// decimalText writes n / 10^scale with all its digits: arrow's own text goes through a float.
func decimalText(n *big.Int, a arrow.Array) string {
	scale := int(a.DataType().(arrow.DecimalType).GetScale())
	digits, sign := n.String(), ""
	if digits[0] == '-' {
		digits, sign = digits[1:], "-"
	}
	switch {
	case scale < 0 && digits != "0":
		return sign + digits + strings.Repeat("0", min(-scale, 256))
	case scale <= 0:
		return sign + digits
	}
	if missing := min(scale, 256) + 1 - len(digits); missing > 0 {
		digits = strings.Repeat("0", missing) + digits
	}
	point := len(digits) - min(scale, 256)
	return sign + digits[:point] + "." + digits[point:]
}

// floatText is the shortest text that reads back as the same number, as JSON has it; NaN and infinities are no JSON.
func floatText(v float64, bits int) (text string, bare bool, err error) {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return strconv.FormatFloat(v, 'g', -1, bits), false, nil
	}
	var b []byte
	if bits == 32 {
		b, err = json.Marshal(float32(v))
	} else {
		b, err = json.Marshal(v)
	}
	return string(b), true, err
}

func uuidText(b []byte) string {
	return hex.EncodeToString(b[:4]) + "-" + hex.EncodeToString(b[4:6]) + "-" + hex.EncodeToString(b[6:8]) + "-" +
		hex.EncodeToString(b[8:10]) + "-" + hex.EncodeToString(b[10:])
}
