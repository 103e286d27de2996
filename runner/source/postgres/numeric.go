package postgres

import (
	"errors"
	"math/big"
	"math/bits"
	"strconv"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/decimal128"
	"github.com/apache/arrow-go/v18/arrow/decimal256"
)

// The sign word of a numeric, which tells the special values too.
const (
	numericPositive = 0x0000
	numericNegative = 0x4000
	numericNaN      = 0xC000
	numericInfinity = 0xD000
	numericMinusInf = 0xF000
)

var errNumeric = errors.New("a malformed numeric")

// numeric is a value in PostgreSQL's binary format: digits to the base 10000, of which the first counts 10000^weight.
type numeric struct {
	digits []byte // two bytes each, big-endian
	weight int
	sign   uint16
	scale  int // decimal digits to show behind the point
}

func parseNumeric(v []byte) (numeric, error) {
	if len(v) < 8 {
		return numeric{}, errNumeric
	}
	n := numeric{digits: v[8:], weight: int(int16(be.Uint16(v[2:]))), sign: be.Uint16(v[4:]), scale: int(be.Uint16(v[6:]))}
	if len(n.digits) != 2*int(be.Uint16(v)) || n.scale > 0x3FFF {
		return numeric{}, errNumeric
	}
	switch n.sign {
	case numericPositive, numericNegative, numericNaN, numericInfinity, numericMinusInf:
	default:
		return numeric{}, errNumeric
	}
	return n, nil
}

func (n numeric) len() int { return len(n.digits) / 2 }

func (n numeric) digit(i int) uint64 { return uint64(be.Uint16(n.digits[2*i:])) }

// numericKind chooses by the declared precision and scale.
func numericKind(typmod int32) (arrow.DataType, func(array.Builder) func([]byte) error) {
	if typmod < 4 {
		return arrow.BinaryTypes.String, intoNumericText
	}
	precision := (typmod - 4) >> 16 & 0xFFFF
	scale := (typmod - 4) & 0x7FF
	if scale >= 0x400 { // since PostgreSQL 15 it may be negative: -1000 to 1000
		scale -= 0x800
	}
	if scale < 0 { // 12345 as numeric(3,-2) is 12300: digits before the point
		precision, scale = precision-scale, 0
	}
	precision = max(precision, scale) // as 0.00012 is numeric(2,5)
	switch {
	case precision <= 38:
		return &arrow.Decimal128Type{Precision: precision, Scale: scale}, intoDecimal128(int(scale))
	case precision <= 76:
		return &arrow.Decimal256Type{Precision: precision, Scale: scale}, intoDecimal256(int(scale))
	}
	return arrow.BinaryTypes.String, intoNumericText
}

// special is the error for what a decimal does not have.
func (n numeric) special() error {
	switch n.sign {
	case numericNaN:
		return &valueError{reason: "NaN is a value that Arrow's decimal does not have"}
	case numericInfinity, numericMinusInf:
		return infinite(n.sign == numericInfinity, "decimal")
	}
	return nil
}

var errScale = errors.New("a numeric that does not fit its declared precision and scale")

var powers = [...]uint64{1, 10, 100, 1000, 10000}

// unscaled calls push for each step of computing the value times 10^scale from the most significant digit on: v = v*factor +
// add. Digits that the scale has no place for are an error: there are none where the declared scale is true.
func (n numeric) unscaled(scale int, push func(factor, add uint64) bool) error {
	last := n.len() - 1
	for i := 0; i <= last; i++ {
		d := n.digit(i)
		if d > 9999 {
			return errNumeric
		}
		switch place := 4*(n.weight-i) + scale; {
		case place >= 0:
			if !push(10000, d) {
				return errScale
			}
		case place > -4:
			cut := powers[-place]
			if d%cut != 0 || !push(powers[4+place], d/cut) {
				return errScale
			}
		case d != 0:
			return errScale
		}
	}
	if last < 0 {
		return nil
	}
	zeros := 4*(n.weight-last) + scale
	if zeros > 80 {
		zeros = 80 // no value but 0 fits then
	}
	for ; zeros > 0; zeros -= 4 {
		if !push(powers[min(zeros, 4)], 0) {
			return errScale
		}
	}
	return nil
}

func intoDecimal128(scale int) func(array.Builder) func([]byte) error {
	return func(b array.Builder) func([]byte) error {
		into := b.(*array.Decimal128Builder)
		var hi, lo uint64
		push := func(factor, add uint64) bool {
			carry, low := bits.Mul64(lo, factor)
			over, high := bits.Mul64(hi, factor)
			low, c := bits.Add64(low, add, 0)
			high, c = bits.Add64(high, carry, c)
			hi, lo = high, low
			return over == 0 && c == 0 && high < 1<<63
		}
		return func(v []byte) error {
			n, err := parseNumeric(v)
			if err != nil {
				return err
			}
			if err := n.special(); err != nil {
				return err
			}
			hi, lo = 0, 0
			if small, ok := n.small(scale); ok {
				lo = small
			} else if err := n.unscaled(scale, push); err != nil {
				return err
			}
			value := decimal128.New(int64(hi), lo)
			if n.sign == numericNegative {
				value = value.Negate()
			}
			into.Append(value)
			return nil
		}
	}
}

// small is the fast way for up to 16 digits, all before the end of the scale.
func (n numeric) small(scale int) (uint64, bool) {
	count := n.len()
	zeros := 4*(n.weight-count+1) + scale
	if count > 4 || zeros > 3 || zeros < -3 {
		return 0, false
	}
	var value uint64
	for i := range count {
		d := n.digit(i)
		if d > 9999 {
			return 0, false
		}
		value = value*10000 + d
	}
	if zeros >= 0 {
		return value * powers[zeros], true
	}
	cut := powers[-zeros]
	return value / cut, value%cut == 0
}

func intoDecimal256(scale int) func(array.Builder) func([]byte) error {
	return func(b array.Builder) func([]byte) error {
		into := b.(*array.Decimal256Builder)
		return func(v []byte) error {
			n, err := parseNumeric(v)
			if err != nil {
				return err
			}
			if err := n.special(); err != nil {
				return err
			}
			var value, word big.Int
			if err := n.unscaled(scale, func(factor, add uint64) bool {
				value.Mul(&value, word.SetUint64(factor))
				value.Add(&value, word.SetUint64(add))
				return value.BitLen() < 256
			}); err != nil {
				return err
			}
			if n.sign == numericNegative {
				value.Neg(&value)
			}
			into.Append(decimal256.FromBigInt(&value))
			return nil
		}
	}
}

func intoNumericText(b array.Builder) func([]byte) error {
	into := b.(*array.StringBuilder).BinaryBuilder
	var text []byte
	return func(v []byte) error {
		n, err := parseNumeric(v)
		if err != nil {
			return err
		}
		if text, err = n.appendText(text[:0]); err != nil {
			return err
		}
		into.Append(text)
		return nil
	}
}

// appendText writes n as the server does.
func (n numeric) appendText(text []byte) ([]byte, error) {
	switch n.sign {
	case numericNaN:
		return append(text, "NaN"...), nil
	case numericInfinity:
		return append(text, "Infinity"...), nil
	case numericMinusInf:
		return append(text, "-Infinity"...), nil
	case numericNegative:
		text = append(text, '-')
	}
	for i := range n.len() {
		if n.digit(i) > 9999 {
			return nil, errNumeric
		}
	}
	if n.weight < 0 {
		text = append(text, '0')
	}
	for i := 0; i <= n.weight; i++ {
		if i == 0 {
			text = strconv.AppendUint(text, n.digitOrZero(0), 10)
		} else {
			text = appendGroup(text, n.digitOrZero(i))
		}
	}
	if n.scale > 0 {
		text = append(text, '.')
		end := len(text) + n.scale
		for i := n.weight + 1; len(text) < end; i++ {
			text = appendGroup(text, n.digitOrZero(i))
		}
		text = text[:end]
	}
	return text, nil
}

func (n numeric) digitOrZero(i int) uint64 {
	if i < 0 || i >= n.len() {
		return 0
	}
	return n.digit(i)
}

func appendGroup(text []byte, d uint64) []byte {
	return append(text, '0'+byte(d/1000), '0'+byte(d/100%10), '0'+byte(d/10%10), '0'+byte(d%10))
}
