package postgres

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
)

// TypeMetadata is the key of a field's metadata with the type as PostgreSQL writes it, for example numeric(12,2).
const TypeMetadata = "postgres.type"

// column takes the values of one column. Its builders are reused from batch to batch.
type column struct {
	name    string
	typeOID uint32
	typmod  int32
	format  int16 // 0 text, 1 binary
	builder array.Builder
	append  func(value []byte) error
	fixed   int // Arrow bytes of a value, whatever it is
	factor  int // Arrow bytes for each byte of the value beside fixed
	bytes   *array.BinaryBuilder
	held    int // bytes of the last batch, to have room for as many
}

// reader turns the rows of a result into record batches.
type reader struct {
	schema  *arrow.Schema
	columns []column
}

// newReader chooses a type and a decoder for each column; note gets what the caller has to know. Its memory is given back by release.
func newReader(mem memory.Allocator, fields []field, note func(text string)) *reader {
	r := &reader{columns: make([]column, len(fields))}
	list := make([]arrow.Field, len(fields))
	for i, f := range fields {
		kind := f.kind(note)
		b := array.NewBuilder(mem, kind.arrow)
		r.columns[i] = column{name: f.name, typeOID: f.typeOID, typmod: f.typmod, format: kind.format, builder: b, append: kind.into(b)}
		c := &r.columns[i]
		switch b := b.(type) {
		case *array.StringBuilder:
			c.fixed, c.factor, c.bytes = 4, 1, b.BinaryBuilder
		case *array.BinaryBuilder:
			c.fixed, c.factor, c.bytes = 4, 1, b
		default:
			if t, ok := kind.arrow.(arrow.FixedWidthDataType); ok {
				c.fixed = (t.BitWidth() + 7) / 8
			} else {
				c.fixed, c.factor = 4, 4 // lists: a NULL of four bytes may take a decimal's sixteen
			}
		}
		keys, values := []string{TypeMetadata}, []string{f.typeName}
		if kind.extension != "" {
			keys, values = append(keys, "ARROW:extension:name", "ARROW:extension:metadata"), append(values, kind.extension, "")
		}
		list[i] = arrow.Field{Name: f.name, Type: kind.arrow, Nullable: true, Metadata: arrow.NewMetadata(keys, values)}
	}
	r.schema = arrow.NewSchema(list, nil)
	return r
}

func (r *reader) release() {
	for i := range r.columns {
		r.columns[i].builder.Release()
	}
}

// formats are the formats to ask the server for.
func (r *reader) formats() []int16 {
	formats := make([]int16, len(r.columns))
	for i := range r.columns {
		formats[i] = r.columns[i].format
	}
	return formats
}

// read takes the result of the query that was executed and gives it on in batches of at most source.BatchRows rows and about
// source.BatchBytes bytes. The batch that a limit of most rows will cut has one row more than fits, so that the cut is
// noticed without reading on.
func (r *reader) read(s *session, most int64, write func(arrow.RecordBatch) error) error {
	var rows, total int64
	var bytes int
	fixed := 0
	for i := range r.columns {
		fixed += r.columns[i].fixed
	}
	flush := func() error {
		if rows == 0 {
			return nil
		}
		batch := r.batch(rows)
		defer batch.Release()
		total += rows
		rows, bytes = 0, 0
		return write(batch)
	}
	room := func() int64 { return max(min(source.BatchRows, most-total+1), 1) }
	full := room()
	var failed error
	for {
		kind, body, err := s.receive()
		if err != nil {
			return firstOf(failed, err)
		}
		switch kind {
		case 'D':
			if rows == 0 {
				r.reserve(int(full), fixed)
			}
			variable, err := r.append(body)
			if err != nil {
				return err
			}
			rows++
			if bytes += fixed + variable; rows >= full || bytes >= source.BatchBytes {
				if err := flush(); err != nil {
					return err
				}
				full = room()
			}
		case 'T':
			if err := r.same(body); err != nil {
				return err
			}
		case 'E':
			failed = failure(body)
		case 'Z':
			if failed != nil {
				return failed
			}
			return flush()
		}
	}
}

// same checks that the result is still what was described.
func (r *reader) same(body []byte) error {
	var d pgproto3.RowDescription
	if err := d.Decode(body); err != nil {
		return protocolError("the columns: %s", err)
	}
	same := len(d.Fields) == len(r.columns)
	for i := range d.Fields {
		same = same && d.Fields[i].DataTypeOID == r.columns[i].typeOID && d.Fields[i].TypeModifier == r.columns[i].typmod
	}
	if !same {
		return schemas.Errorf(schemas.CodeSource, "PostgreSQL: the columns of the query changed while it was being read").WithHint("start it again")
	}
	return nil
}

// reserve makes room for a batch at once, as far as a batch of that size can have so many rows.
func (r *reader) reserve(rows, fixed int) {
	rows = min(rows, source.BatchBytes/max(fixed, 1)+1)
	for i := range r.columns {
		c := &r.columns[i]
		c.builder.Reserve(rows)
		if c.bytes != nil && c.held > 0 {
			c.bytes.ReserveData(c.held)
		}
	}
}

// append adds a DataRow and returns how many bytes it took beside those that each row takes.
func (r *reader) append(body []byte) (variable int, err error) {
	if len(body) < 2 || int(binary.BigEndian.Uint16(body)) != len(r.columns) {
		return 0, protocolError("a row without its %d columns", len(r.columns))
	}
	body = body[2:]
	for i := range r.columns {
		c := &r.columns[i]
		if len(body) < 4 {
			return 0, protocolError("a row that ends early")
		}
		size := int(int32(binary.BigEndian.Uint32(body)))
		body = body[4:]
		if size == -1 {
			c.builder.AppendNull()
			continue
		}
		if size < 0 || size > len(body) {
			return 0, protocolError("a value of %d bytes in a row", size)
		}
		if err := c.append(body[:size:size]); err != nil {
			return 0, c.refuse(err)
		}
		variable += size * c.factor
		body = body[size:]
	}
	if len(body) != 0 {
		return 0, protocolError("a row with %d bytes too many", len(body))
	}
	return variable, nil
}

// refuse names the column in an error about one of its values.
func (c *column) refuse(err error) error {
	var v *valueError
	if !errors.As(err, &v) {
		return protocolError("column %q: %s", c.name, err)
	}
	hint := v.hint
	if hint == "" {
		hint = fmt.Sprintf(`select it as text ("%s"::text), or leave such rows out`, strings.ReplaceAll(c.name, `"`, `""`))
	}
	return schemas.Errorf(schemas.CodeSource, "column %q: %s", c.name, v.reason).WithHint(hint)
}

func (r *reader) batch(rows int64) arrow.RecordBatch {
	arrays := make([]arrow.Array, len(r.columns))
	for i := range r.columns {
		c := &r.columns[i]
		if c.bytes != nil {
			c.held = c.bytes.DataLen()
		}
		arrays[i] = c.builder.NewArray()
	}
	batch := array.NewRecordBatch(r.schema, arrays, rows)
	for _, a := range arrays {
		a.Release()
	}
	return batch
}
