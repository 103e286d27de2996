package tabular

import (
	"encoding/json"
	"math/big"
	"strconv"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/decimal128"
)

// JSONMetadata marks a field of text as Arrow's extension type arrow.json, as an IPC stream spells it.
var JSONMetadata = arrow.NewMetadata([]string{"ARROW:extension:name", "ARROW:extension:metadata"}, []string{"arrow.json", ""})

// field is the Arrow field of the column.
func (p *plan) field() arrow.Field {
	f := arrow.Field{Name: p.name, Type: p.arrowType(), Nullable: true}
	if p.kind == kindJSON {
		f.Metadata = JSONMetadata
	}
	return f
}

// arrowType is the Arrow type of the column.
func (p *plan) arrowType() arrow.DataType {
	unit := arrow.Microsecond
	if p.nano {
		unit = arrow.Nanosecond
	}
	switch p.kind {
	case kindBool:
		return arrow.FixedWidthTypes.Boolean
	case kindInt:
		return arrow.PrimitiveTypes.Int64
	case kindBigInt:
		return &arrow.Decimal128Type{Precision: 38}
	case kindDecimal:
		return &arrow.Decimal128Type{Precision: p.typ.precision, Scale: p.typ.scale}
	case kindFloat:
		return arrow.PrimitiveTypes.Float64
	case kindDate:
		return arrow.FixedWidthTypes.Date32
	case kindTime:
		return &arrow.TimestampType{Unit: unit}
	case kindTimeZ:
		return &arrow.TimestampType{Unit: unit, TimeZone: "UTC"}
	}
	return arrow.BinaryTypes.String // text, JSON
}

// append adds one value to the builder of its column. False: it does not fit.
func (t *Table) append(p *plan, b array.Builder, c cell) bool {
	if c.form == cellNull {
		b.AppendNull()
		return true
	}
	switch p.kind {
	case kindText:
		return t.appendText(p, b.(*array.StringBuilder), c)
	case kindJSON:
		return t.appendJSON(b.(*array.StringBuilder), c)
	}
	s := c.text
	switch c.form {
	case cellText:
		if len(s) == 0 {
			b.AppendNull()
			return true
		}
	case cellString:
		if p.kind != kindDate && p.kind != kindTime && p.kind != kindTimeZ && !p.set {
			return false
		}
		s = s[1 : len(s)-1]
	case cellNested:
		return false
	case cellBool:
		if p.kind != kindBool {
			return false
		}
	case cellNumber:
		if p.kind == kindBool || p.kind == kindDate || p.kind == kindTime || p.kind == kindTimeZ {
			return false
		}
	}
	return appendScalar(p, b, s)
}

// appendScalar reads s, which is neither text nor JSON, into its builder.
func appendScalar(p *plan, b array.Builder, s []byte) bool {
	switch p.kind {
	case kindBool:
		if !isBool(s) {
			return false
		}
		b.(*array.BooleanBuilder).Append(len(s) == 4)
	case kindInt:
		n, ok := scanNumber(s)
		if !ok || !n.integer || !p.set && (n.leadingZero || n.negative && string(s) == "-0") {
			return false
		}
		v, err := strconv.ParseInt(view(s), 10, 64)
		if err != nil {
			return false
		}
		b.(*array.Int64Builder).Append(v)
	case kindBigInt, kindDecimal:
		v, ok := decimal(s, p)
		if !ok {
			return false
		}
		b.(*array.Decimal128Builder).Append(v)
	case kindFloat:
		if !p.set {
			if l := classify(s); l.kind != kindFloat && (l.kind != kindInt || l.wide) {
				return false
			}
		} else if _, ok := scanNumber(s); !ok && !isFloatWord(s) {
			return false
		}
		v, err := strconv.ParseFloat(view(s), 64)
		if err != nil {
			return false
		}
		b.(*array.Float64Builder).Append(v)
	case kindDate:
		d, ok := scanStamp(s)
		if !ok || !d.date {
			return false
		}
		b.(*array.Date32Builder).Append(arrow.Date32(d.days))
	case kindTime, kindTimeZ:
		d, ok := scanStamp(s)
		if !ok || d.date || d.zone != (p.kind == kindTimeZ) {
			return false
		}
		v := d.unixMicro()
		if p.nano {
			if v, ok = d.unixNano(); !ok {
				return false
			}
		} else if d.places > 6 {
			return false
		}
		b.(*array.TimestampBuilder).Append(arrow.Timestamp(v))
	default:
		return false
	}
	return true
}

// decimal reads a literal without loss into the precision and scale of p.
func decimal(s []byte, p *plan) (decimal128.Num, bool) {
	precision, scale := int32(38), int32(0)
	if p.kind == kindDecimal {
		precision, scale = p.typ.precision, p.typ.scale
	}
	n, ok := scanNumber(s)
	if !ok || n.exponent || !p.set && (n.leadingZero || !n.integer) {
		return decimal128.Num{}, false
	}
	var digits [64]byte
	buf := digits[:0]
	if n.negative {
		buf = append(buf, '-')
		s = s[1:]
	}
	places, point := int32(0), false
	for _, c := range s {
		if c == '.' {
			point = true
			continue
		}
		if point {
			if places == scale {
				if c != '0' {
					return decimal128.Num{}, false
				}
				continue
			}
			places++
		}
		if len(buf) == cap(buf) {
			return decimal128.Num{}, false
		}
		buf = append(buf, c)
	}
	for ; places < scale; places++ {
		if len(buf) == cap(buf) {
			return decimal128.Num{}, false
		}
		buf = append(buf, '0')
	}
	v, ok := new(big.Int).SetString(string(buf), 10)
	if !ok || v.BitLen() > 127 {
		return decimal128.Num{}, false
	}
	d := decimal128.FromBigInt(v)
	return d, d.FitsInPrecision(precision)
}

// appendText adds a value to a text column: a CSV field or a JSON string as it is. Other JSON values only where the column was
// set to text, as JSON.
func (t *Table) appendText(p *plan, b *array.StringBuilder, c cell) bool {
	switch {
	case c.form == cellText:
		b.BinaryBuilder.Append(c.text)
	case c.form == cellString:
		text, ok := unquote(c.text, &t.scratch)
		if !ok {
			return false
		}
		b.BinaryBuilder.Append(text)
	case p.set:
		b.BinaryBuilder.Append(compact(c.text, &t.scratch))
	default:
		return false
	}
	return true
}

// appendJSON adds a value to a JSON column. A CSV field in a column that was set to json must be JSON itself.
func (t *Table) appendJSON(b *array.StringBuilder, c cell) bool {
	text := c.text
	switch c.form {
	case cellText:
		if len(text) == 0 {
			b.AppendNull()
			return true
		}
		if !json.Valid(text) {
			return false
		}
	case cellNested:
		text = compact(text, &t.scratch)
	}
	b.BinaryBuilder.Append(text)
	return true
}

// unquote is the text of a valid JSON string. scratch is reused. False: it has an unpaired surrogate, which UTF-8 has no
// form for.
func unquote(raw []byte, scratch *[]byte) ([]byte, bool) {
	inner := raw[1 : len(raw)-1]
	i := 0
	for i < len(inner) && inner[i] != '\\' {
		i++
	}
	if i == len(inner) {
		return inner, true
	}
	out := append((*scratch)[:0], inner[:i]...) //nolint:gocritic // it goes back into scratch below
	for i < len(inner) {
		c := inner[i]
		if c != '\\' {
			out = append(out, c)
			i++
			continue
		}
		i++
		switch c = inner[i]; c {
		case 'b':
			out = append(out, '\b')
		case 'f':
			out = append(out, '\f')
		case 'n':
			out = append(out, '\n')
		case 'r':
			out = append(out, '\r')
		case 't':
			out = append(out, '\t')
		case 'u':
			r := hex4(inner[i+1:])
			i += 4
			if r >= 0xdc00 && r < 0xe000 {
				return nil, false
			}
			if r >= 0xd800 && r < 0xdc00 {
				if i+6 >= len(inner) || inner[i+1] != '\\' || inner[i+2] != 'u' {
					return nil, false
				}
				low := hex4(inner[i+3:])
				if low < 0xdc00 || low >= 0xe000 {
					return nil, false
				}
				r = 0x10000 + (r-0xd800)<<10 + (low - 0xdc00)
				i += 6
			}
			out = utf8.AppendRune(out, r)
		default: // " \ /
			out = append(out, c)
		}
		i++
	}
	*scratch = out
	return out, true
}

// hex4 reads four hex digits, which the JSON grammar has checked.
func hex4(s []byte) rune {
	var r rune
	for _, c := range s[:4] {
		r <<= 4
		switch {
		case c <= '9':
			r |= rune(c - '0')
		case c >= 'a':
			r |= rune(c - 'a' + 10)
		default:
			r |= rune(c - 'A' + 10)
		}
	}
	return r
}

// compact is a valid JSON value without the space between its parts. scratch is reused.
func compact(raw []byte, scratch *[]byte) []byte {
	out := (*scratch)[:0]
	quoted := false
	for i := 0; i < len(raw); i++ {
		c := raw[i]
		switch {
		case quoted:
			switch c {
			case '\\':
				out = append(out, c)
				i++
				c = raw[i]
			case '"':
				quoted = false
			}
		case c == '"':
			quoted = true
		case c == ' ' || c == '\t' || c == '\n' || c == '\r':
			continue
		}
		out = append(out, c)
	}
	*scratch = out
	return out
}
