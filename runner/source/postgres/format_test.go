package postgres

import (
	"encoding/hex"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// format writes an Arrow value as PostgreSQL's output functions write the value it came from.
func format(t testing.TB, a arrow.Array, i int) string {
	t.Helper()
	switch a := a.(type) {
	case *array.Boolean:
		return map[bool]string{true: "t", false: "f"}[a.Value(i)]
	case *array.Int16:
		return strconv.Itoa(int(a.Value(i)))
	case *array.Int32:
		return strconv.Itoa(int(a.Value(i)))
	case *array.Int64:
		return strconv.FormatInt(a.Value(i), 10)
	case *array.Uint32:
		return strconv.FormatUint(uint64(a.Value(i)), 10)
	case *array.Uint64:
		return strconv.FormatUint(a.Value(i), 10)
	case *array.Float32:
		return formatFloat(float64(a.Value(i)), 32)
	case *array.Float64:
		return formatFloat(a.Value(i), 64)
	case *array.Decimal128:
		return a.Value(i).ToString(a.DataType().(*arrow.Decimal128Type).Scale)
	case *array.Decimal256:
		return a.Value(i).ToString(a.DataType().(*arrow.Decimal256Type).Scale)
	case *array.String:
		return a.Value(i)
	case *array.Binary:
		return `\x` + hex.EncodeToString(a.Value(i))
	case *array.FixedSizeBinary:
		h := hex.EncodeToString(a.Value(i))
		return strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")
	case *array.Date32:
		return formatTime(time.Unix(int64(a.Value(i))*86400, 0).UTC(), "01-02")
	case *array.Time64:
		return fraction(time.UnixMicro(int64(a.Value(i))).UTC().Format("15:04:05.000000"))
	case *array.Timestamp:
		zone := ""
		if a.DataType().(*arrow.TimestampType).TimeZone == "UTC" {
			zone = "+00"
		}
		at := time.UnixMicro(int64(a.Value(i))).UTC()
		text, _, before := strings.Cut(formatTime(at, "01-02 15:04:05.000000"), " BC")
		if text = fraction(text) + zone; before {
			text += " BC"
		}
		return text
	case *array.MonthDayNanoInterval:
		return formatInterval(a.Value(i))
	case *array.List:
		return formatList(t, a, i)
	}
	t.Fatalf("no format for %s", a.DataType())
	return ""
}

// formatFloat follows float8out: the shortest digits, with an exponent below -4 and from 15 digits (6 for real) on.
func formatFloat(v float64, size int) string {
	switch {
	case math.IsInf(v, 1):
		return "Infinity"
	case math.IsInf(v, -1):
		return "-Infinity"
	case math.IsNaN(v):
		return "NaN"
	}
	digits := map[int]int{32: 6, 64: 15}[size]
	text := strconv.FormatFloat(v, 'e', -1, size)
	exponent, err := strconv.Atoi(text[strings.IndexByte(text, 'e')+1:])
	if err == nil && v != 0 && (exponent < -4 || exponent >= digits) {
		return text
	}
	return strconv.FormatFloat(v, 'f', -1, size)
}

func formatTime(at time.Time, rest string) string {
	year, bc := at.Year(), ""
	if year <= 0 {
		year, bc = 1-year, " BC"
	}
	return fmt.Sprintf("%04d-%s%s", year, at.Format(rest), bc)
}

// fraction drops what PostgreSQL does not write.
func fraction(s string) string { return strings.TrimSuffix(strings.TrimRight(s, "0"), ".") } // there is always a point

// formatInterval follows IntervalStyle postgres.
func formatInterval(v arrow.MonthDayNanoInterval) string {
	var parts []string
	before := false // the last part was negative
	part := func(n int32, unit string) {
		if n == 0 {
			return
		}
		sign, plural := "", "s"
		if before && n > 0 {
			sign = "+"
		}
		if n == 1 {
			plural = ""
		}
		parts = append(parts, fmt.Sprintf("%s%d %s%s", sign, n, unit, plural))
		before = n < 0
	}
	part(v.Months/12, "year")
	part(v.Months%12, "mon")
	part(v.Days, "day")
	if v.Nanoseconds != 0 || len(parts) == 0 {
		micros, sign := v.Nanoseconds/1000, ""
		switch {
		case micros < 0:
			micros, sign = -micros, "-"
		case before:
			sign = "+"
		}
		seconds := micros / 1_000_000
		text := fmt.Sprintf("%s%02d:%02d:%02d", sign, seconds/3600, seconds/60%60, seconds%60)
		if rest := micros % 1_000_000; rest != 0 {
			text += "." + strings.TrimRight(fmt.Sprintf("%06d", rest), "0")
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, " ")
}

// formatList follows array_out, without lower bounds.
func formatList(t testing.TB, a *array.List, i int) string {
	t.Helper()
	from, to := a.ValueOffsets(i)
	items := make([]string, 0, to-from)
	for j := int(from); j < int(to); j++ {
		values := a.ListValues()
		if values.IsNull(j) {
			items = append(items, "NULL")
			continue
		}
		text := format(t, values, j)
		if _, nested := values.(*array.List); !nested && (text == "" || strings.EqualFold(text, "null") || strings.ContainsAny(text, "{},\"\\ \t\n\r\v\f")) {
			text = `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(text) + `"`
		}
		items = append(items, text)
	}
	return "{" + strings.Join(items, ",") + "}"
}
