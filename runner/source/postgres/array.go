package postgres

import (
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// maxDims is the most dimensions that PostgreSQL gives an array.
const maxDims = 6

var errArray = errors.New("a malformed array")

// list is the kind of an array: lists in lists, as deep as the column was declared.
func (f field) list(element kind, note func(string)) kind {
	item := arrow.Field{Name: "item", Type: element.arrow, Nullable: true}
	if element.extension != "" {
		item.Metadata = arrow.NewMetadata([]string{"ARROW:extension:name", "ARROW:extension:metadata"}, []string{element.extension, ""})
	}
	var whole arrow.DataType
	for range f.dims {
		whole = arrow.ListOfField(item)
		item = arrow.Field{Name: "item", Type: whole, Nullable: true}
	}
	return kind{arrow: whole, format: 1, into: func(b array.Builder) func([]byte) error {
		l := &lists{declared: f.declared, levels: make([]*array.ListBuilder, f.dims)}
		for i := range l.levels {
			l.levels[i] = b.(*array.ListBuilder)
			b = l.levels[i].ValueBuilder()
		}
		l.items, l.append = b, element.into(b)
		l.shifted = func() {
			note(fmt.Sprintf("column %q has arrays that don't count from 1: their lower bounds are left out", f.name))
		}
		return l.value
	}}
}

// lists takes the values of an array column.
type lists struct {
	declared uint32 // OID of the element type, as each value repeats it
	levels   []*array.ListBuilder
	items    array.Builder
	append   func([]byte) error
	shifted  func()

	sizes [maxDims]int
	rest  []byte
}

// value adds one array: dimensions, a flag for NULLs, the element's OID, length and lower bound for each dimension, elements.
func (l *lists) value(v []byte) error {
	if len(v) < 12 {
		return errArray
	}
	dims := int(be.Uint32(v))
	if be.Uint32(v[8:]) != l.declared {
		return errArray
	}
	v = v[12:]
	switch {
	case dims == 0 && len(v) == 0:
		l.levels[0].Append(true)
		return nil
	case dims < 1 || dims > maxDims || len(v) < 8*dims:
		return errArray
	case dims != len(l.levels):
		return &valueError{reason: fmt.Sprintf("an array of %d dimensions, where the column is read with %d", dims, len(l.levels))}
	}
	total := 1
	for i := range dims {
		size, lower := int(int32(be.Uint32(v))), int32(be.Uint32(v[4:]))
		v = v[8:]
		if size < 1 || size > 1<<28 { // PostgreSQL allows 2^27 elements
			return errArray
		}
		if total *= size; total > 1<<28 {
			return errArray
		}
		l.sizes[i] = size
		if lower != 1 && l.shifted != nil {
			l.shifted()
			l.shifted = nil
		}
	}
	if total > len(v)/4 { // each element has its length at least
		return errArray
	}
	l.items.Reserve(total)
	l.rest = v
	if err := l.level(0); err != nil {
		return err
	}
	if len(l.rest) != 0 {
		return errArray
	}
	l.rest = nil
	return nil
}

func (l *lists) level(n int) error {
	l.levels[n].Append(true)
	for range l.sizes[n] {
		if n+1 < len(l.levels) {
			if err := l.level(n + 1); err != nil {
				return err
			}
			continue
		}
		if len(l.rest) < 4 {
			return errArray
		}
		size := int(int32(be.Uint32(l.rest)))
		l.rest = l.rest[4:]
		if size == -1 {
			l.items.AppendNull()
			continue
		}
		if size < 0 || size > len(l.rest) {
			return errArray
		}
		if err := l.append(l.rest[:size:size]); err != nil {
			return err
		}
		l.rest = l.rest[size:]
	}
	return nil
}
