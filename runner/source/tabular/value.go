package tabular

import (
	"bytes"
	"math"
	"strconv"
	"unsafe"
)

// kind is what one value looks like, and what a column is.
type kind uint8

const (
	kindNone kind = iota // no value yet
	kindBool
	kindInt
	kindBigInt // integer beyond int64, up to 38 digits
	kindFloat
	kindNumber // JSON number that neither int64, decimal128(38,0) nor float64 holds
	kindDate
	kindTime  // timestamp without zone
	kindTimeZ // timestamp with zone
	kindText
	kindJSON
	kindDecimal // only when set
)

// maxExactInt is the largest n for which float64 holds every integer of −n to n.
const maxExactInt = 1 << 53

// look is what classification found out about one value.
type look struct {
	kind    kind
	wide    bool // kindInt beyond ±2⁵³
	nano    bool // a timestamp with more than six digits of fraction
	outside bool // a timestamp outside of what int64 nanoseconds hold
}

// classify looks at a text that is not empty.
func classify(s []byte) look {
	c := s[0]
	switch {
	case c >= '0' && c <= '9':
		if k := classifyNumber(s); k.kind != kindNone {
			return k
		}
		return classifyTime(s)
	case c == '-' || c == '.':
		if k := classifyNumber(s); k.kind != kindNone {
			return k
		}
		if isFloatWord(s) {
			return look{kind: kindFloat}
		}
	case isBool(s):
		return look{kind: kindBool}
	case isFloatWord(s):
		return look{kind: kindFloat}
	}
	return look{kind: kindText}
}

func isBool(s []byte) bool {
	return len(s) == 4 && bytes.EqualFold(s, []byte("true")) || len(s) == 5 && bytes.EqualFold(s, []byte("false"))
}

func isFloatWord(s []byte) bool {
	switch string(s) {
	case "NaN", "nan", "Inf", "inf", "-Inf", "-inf", "Infinity", "-Infinity":
		return true
	}
	return false
}

// classifyNumber gives kindInt, kindBigInt, kindFloat, or kindNone for what is no number or loses digits as one.
func classifyNumber(s []byte) look {
	n, ok := scanNumber(s)
	if !ok || n.leadingZero {
		return look{}
	}
	if n.integer {
		if n.negative && n.digits == 1 && s[1] == '0' {
			return look{kind: kindFloat} // -0
		}
		v, err := strconv.ParseInt(view(s), 10, 64)
		switch {
		case err == nil:
			return look{kind: kindInt, wide: v > maxExactInt || v < -maxExactInt}
		case n.digits <= 38:
			return look{kind: kindBigInt}
		}
		return look{}
	}
	if n.exactFloat(s) {
		return look{kind: kindFloat}
	}
	return look{}
}

// number is a decimal literal taken apart.
type number struct {
	negative, integer, leadingZero bool
	digits                         int // of the integer part
	significant                    int // digits of the mantissa without zeros at its ends
	mantissaEnd                    int
	exponent                       bool
}

// scanNumber reads -?digits?(.digits?)?([eE][+-]?digits)? with at least one digit in the mantissa.
func scanNumber(s []byte) (number, bool) {
	var n number
	i := 0
	if i < len(s) && s[i] == '-' {
		n.negative = true
		i++
	}
	start := i
	leading, trailing := true, 0 // zeros at the start are not significant, those at the end are counted apart
	digit := func(c byte) {
		if c == '0' {
			if !leading {
				trailing++
			}
			return
		}
		leading = false
		n.significant += trailing + 1
		trailing = 0
	}
	for i < len(s) && s[i] >= '0' && s[i] <= '9' {
		digit(s[i])
		i++
	}
	n.digits = i - start
	n.leadingZero = n.digits > 1 && s[start] == '0'
	n.integer = true
	fraction := 0
	if i < len(s) && s[i] == '.' {
		n.integer = false
		i++
		from := i
		for i < len(s) && s[i] >= '0' && s[i] <= '9' {
			digit(s[i])
			i++
		}
		fraction = i - from
	}
	if n.digits+fraction == 0 {
		return n, false
	}
	n.mantissaEnd = i
	if i < len(s) && (s[i] == 'e' || s[i] == 'E') {
		n.integer, n.exponent = false, true
		i++
		if i < len(s) && (s[i] == '+' || s[i] == '-') {
			i++
		}
		from := i
		for i < len(s) && s[i] >= '0' && s[i] <= '9' {
			i++
		}
		if i == from {
			return n, false
		}
	}
	return n, i == len(s)
}

// exactFloat reports whether float64 gives the literal back digit for digit: printed with as many significant digits, it
// has the same ones. Up to 15 digits that is so for every literal in the range of normal numbers.
func (n number) exactFloat(s []byte) bool {
	v, err := strconv.ParseFloat(view(s), 64)
	if err != nil {
		return false // beyond the range
	}
	if n.significant == 0 {
		return true // a zero
	}
	const smallestNormal = 0x1p-1022
	abs := math.Abs(v)
	if n.significant <= 15 && abs >= smallestNormal {
		return true
	}
	if abs == 0 {
		return false // underflow
	}
	if n.significant > 800 {
		return false // no float64 has more significant digits than 767
	}
	var printed, literal [820]byte
	out := strconv.AppendFloat(printed[:0], abs, 'e', n.significant-1, 64)
	have := literal[:0]
	for _, c := range s[:n.mantissaEnd] {
		if c >= '0' && c <= '9' && (len(have) > 0 || c != '0') && len(have) < n.significant {
			have = append(have, c)
		}
	}
	k := 0
	for _, c := range out {
		if c == 'e' {
			break
		}
		if c == '.' {
			continue
		}
		if k >= len(have) || have[k] != c {
			return false
		}
		k++
	}
	return k == len(have)
}

// view is s as a string without a copy; the result must not outlive the bytes.
func view(s []byte) string { return unsafe.String(unsafe.SliceData(s), len(s)) } //nolint:gosec // as its comment says
