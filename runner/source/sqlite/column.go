package sqlite

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// class is the type a value has in SQLite; a set of them is their sum.
type class uint8

const (
	classInteger class = 1 << iota
	classReal
	classText
	classBlob
	classNull class = 0
)

// cell is one value.
type cell struct {
	class   class
	integer int64
	real    float64
	data    []byte // text or blob
}

// kind is how a column comes out.
type kind uint8

const (
	kindText kind = iota
	kindInteger
	kindReal
	kindBool
	kindBinary
	kindDate
	kindStamp     // timestamp without zone
	kindStampZone // instant
	kindMixed     // text of values of several types
)

var arrowTypes = map[kind]arrow.DataType{
	kindText: arrow.BinaryTypes.String, kindMixed: arrow.BinaryTypes.String, kindBinary: arrow.BinaryTypes.Binary,
	kindInteger: arrow.PrimitiveTypes.Int64, kindReal: arrow.PrimitiveTypes.Float64, kindBool: arrow.FixedWidthTypes.Boolean,
	kindDate: arrow.FixedWidthTypes.Date32, kindStamp: &arrow.TimestampType{Unit: arrow.Microsecond},
	kindStampZone: &arrow.TimestampType{Unit: arrow.Microsecond, TimeZone: "UTC"},
}

// declaredKind is what a declared type stands for, by SQLite's own rules of affinity and the usual names. It decides only where
// the values leave it open.
func declaredKind(declared string) kind {
	d, _, _ := strings.Cut(strings.ToUpper(declared), "(")
	d = strings.TrimSpace(d)
	switch has := func(part string) bool { return strings.Contains(d, part) }; {
	case strings.HasPrefix(d, "BOOL"):
		return kindBool
	case d == "DATE":
		return kindDate
	case d == "TIMESTAMPTZ" || d == "TIMESTAMP WITH TIME ZONE":
		return kindStampZone
	case strings.HasPrefix(d, "DATETIME") || strings.HasPrefix(d, "TIMESTAMP"):
		return kindStamp
	case has("INT"):
		return kindInteger
	case has("CHAR"), has("CLOB"), has("TEXT"):
		return kindText
	case has("BLOB"):
		return kindBinary
	case has("REAL"), has("FLOA"), has("DOUB"), has("NUMERIC"), has("DECIMAL"):
		return kindReal
	}
	return kindText
}

// maxExact is the largest integer up to which a float64 has every one.
const maxExact = 1 << 53

// column is one column of a result and what is known of its values.
type column struct {
	name     string
	declared kind

	seen     class
	inexact  bool // an integer beyond ±maxExact
	notBool  bool // an integer but 0 and 1
	notUTF8  bool
	notDate  bool // a text that is none
	notLocal bool // a text that is not a timestamp without zone
	notZoned bool // a text that is not a timestamp with zone
}

// observe takes note of a value.
func (c *column) observe(v cell) {
	c.seen |= v.class
	switch v.class {
	case classInteger:
		c.notBool = c.notBool || v.integer != 0 && v.integer != 1
		c.inexact = c.inexact || v.integer > maxExact || v.integer < -maxExact
	case classText:
		c.notUTF8 = c.notUTF8 || !utf8.Valid(v.data)
		switch c.declared {
		case kindDate, kindStamp, kindStampZone:
			c.observeTime(v.data)
		}
	}
}

func (c *column) observeTime(text []byte) {
	if !c.notDate {
		_, ok := parseDate(text)
		c.notDate = !ok
	}
	if !c.notLocal || !c.notZoned {
		_, zone, ok := parseStamp(text)
		c.notLocal = c.notLocal || !ok || zone
		c.notZoned = c.notZoned || !ok || !zone
	}
}

// kind decides how the column comes out, such that every observed value fits.
func (c *column) kind() kind {
	switch c.seen {
	case classNull:
		return c.declared
	case classInteger:
		if c.declared == kindBool && !c.notBool {
			return kindBool
		}
		return kindInteger
	case classReal:
		return kindReal
	case classInteger | classReal:
		if !c.inexact {
			return kindReal
		}
	case classText:
		dated := c.declared == kindDate || c.declared == kindStamp || c.declared == kindStampZone
		switch {
		case c.notUTF8:
			return kindBinary
		case dated && !c.notDate:
			return kindDate
		case dated && !c.notLocal:
			return kindStamp
		case dated && !c.notZoned:
			return kindStampZone
		}
		return kindText
	case classBlob, classBlob | classText:
		return kindBinary
	}
	if c.notUTF8 {
		return kindBinary
	}
	return kindMixed
}

// mixture is the notice about a column that has values of several types, empty if it needs none.
func (c *column) mixture() string {
	var names []string
	for i, name := range []string{"INTEGER", "REAL", "TEXT", "BLOB"} {
		if c.seen&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	switch kind := c.kind(); {
	case kind == kindMixed:
		return fmt.Sprintf("column %q holds values of the types %s: it is given as text", c.name, strings.Join(names, ", "))
	case kind == kindBinary && c.seen != classBlob && c.seen != classNull:
		if c.notUTF8 {
			return fmt.Sprintf("column %q holds text that is not UTF-8: it is given as bytes", c.name)
		}
		return fmt.Sprintf("column %q holds values of the types %s: it is given as bytes", c.name, strings.Join(names, ", "))
	}
	return ""
}

// add appends a value to the builder of a kind. It is false for one that does not fit, which happens only if a query gives
// other values the second time.
func (k kind) add(b array.Builder, v cell) bool {
	if v.class == classNull {
		b.AppendNull()
		return true
	}
	switch b := b.(type) {
	case *array.Int64Builder:
		if v.class != classInteger {
			return false
		}
		b.Append(v.integer)
	case *array.Float64Builder:
		switch {
		case v.class == classReal:
			b.Append(v.real)
		case v.class == classInteger && v.integer >= -maxExact && v.integer <= maxExact:
			b.Append(float64(v.integer))
		default:
			return false
		}
	case *array.BooleanBuilder:
		if v.class != classInteger || v.integer != 0 && v.integer != 1 {
			return false
		}
		b.Append(v.integer == 1)
	case *array.Date32Builder:
		day, ok := parseDate(v.data)
		if v.class != classText || !ok {
			return false
		}
		b.Append(day)
	case *array.TimestampBuilder:
		at, zone, ok := parseStamp(v.data)
		if v.class != classText || !ok || zone != (k == kindStampZone) {
			return false
		}
		b.Append(at)
	case *array.BinaryBuilder:
		if v.class == classText || v.class == classBlob {
			b.Append(v.data)
		} else {
			b.Append([]byte(v.text()))
		}
	case *array.StringBuilder:
		if k == kindText && v.class != classText || v.class == classText && !utf8.Valid(v.data) {
			return false
		}
		if v.class == classText {
			b.BinaryBuilder.Append(v.data)
		} else {
			b.Append(v.text())
		}
	default:
		return false
	}
	return true
}

// text is a value in a column of mixed types.
func (v cell) text() string {
	switch v.class {
	case classInteger:
		return strconv.FormatInt(v.integer, 10)
	case classReal:
		s := strconv.FormatFloat(v.real, 'g', -1, 64)
		if !math.IsInf(v.real, 0) && !strings.ContainsAny(s, ".e") {
			s += ".0"
		}
		return s
	case classBlob:
		return "X'" + strings.ToUpper(hex.EncodeToString(v.data)) + "'"
	}
	return string(v.data)
}

// parseDate reads 2006-01-02.
func parseDate(text []byte) (arrow.Date32, bool) {
	if len(text) != len(time.DateOnly) {
		return 0, false
	}
	t, err := time.Parse(time.DateOnly, string(text))
	return arrow.Date32FromTime(t), err == nil
}

// parseStamp reads 2006-01-02 15:04[:05[.999999]][Z|±07:00], also with a T. Finer fractions than a microsecond are none.
func parseStamp(text []byte) (at arrow.Timestamp, zone, ok bool) {
	if len(text) < 16 || len(text) > 32 || text[10] != ' ' && text[10] != 'T' || bytes.IndexByte(text, ',') >= 0 {
		return 0, false, false
	}
	layout := "2006-01-02" + string(text[10]) + "15:04"
	rest := text[16:]
	if len(rest) > 0 && rest[0] == ':' {
		layout += ":05" // a fraction after it is read as well
	}
	if dot := bytes.IndexByte(rest, '.'); dot >= 0 {
		digits := len(rest[dot+1:]) - len(bytes.TrimLeft(rest[dot+1:], "0123456789"))
		if digits == 0 || digits > 6 {
			return 0, false, false
		}
	}
	if bytes.ContainsAny(rest, "Z+-") {
		layout, zone = layout+"Z07:00", true
	}
	t, err := time.Parse(layout, string(text))
	return arrow.Timestamp(t.UnixMicro()), zone, err == nil
}
