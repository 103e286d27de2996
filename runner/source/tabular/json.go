package tabular

import (
	"bytes"
	"context"
	"encoding/json"
	"io"

	"github.com/org-runink/runbus/schemas"
)

// jsonRow reads JSON values into records of a table.
type jsonRow struct {
	t     *Table
	rec   record
	stamp []int64 // per column: the row that has it already
	bare  int8    // 0 unknown, 1 objects, 2 other values
	rows  int64
	key   []byte
}

// ReadJSONLines adds the rows of a text with a JSON value on each line. Empty lines are skipped. Returns the number of rows.
func (t *Table) ReadJSONLines(ctx context.Context, part string, r io.Reader) (int64, error) {
	t.begin(part, "line")
	l, err := newLines(r, t.o.maxRecord())
	if err != nil {
		return 0, schemas.Errorf(schemas.CodeSource, "%s: %s", part, err).WithHint("convert it to UTF-8")
	}
	j := &jsonRow{t: t}
	for {
		line, err := l.next()
		switch {
		case err == io.EOF:
			return j.rows, nil
		case err == errLong:
			return j.rows, t.fault(l.no, "the record is longer than %d bytes: is this a text of JSON lines?", t.o.maxRecord())
		case err != nil:
			return j.rows, err
		}
		line = bytes.Trim(line, " \t\r\n")
		if len(line) == 0 {
			continue
		}
		if !json.Valid(line) {
			var v json.RawMessage
			return j.rows, t.fault(l.no, "not JSON: %v", json.Unmarshal(line, &v))
		}
		if err := j.add(ctx, l.no, line); err != nil {
			return j.rows, err
		}
	}
}

// add takes one value of valid JSON.
func (j *jsonRow) add(ctx context.Context, line int64, raw []byte) error {
	t := j.t
	if at := badUTF8(raw); at >= 0 {
		return t.fault(line, "invalid UTF-8 at byte %d", at+1)
	}
	j.rows++
	if err := alive(ctx, j.rows); err != nil {
		return err
	}
	clear(j.rec.cells)
	j.rec.line = line
	if raw[0] != '{' {
		if j.bare == 1 {
			return t.fault(line, "%s among objects", word(raw))
		}
		j.bare = 2
		if err := j.set("value", raw); err != nil {
			return err
		}
		return t.add(&j.rec)
	}
	if j.bare == 2 {
		return t.fault(line, "an object among other values")
	}
	j.bare = 1
	if err := eachField(raw, j.field); err != nil {
		return err
	}
	return t.add(&j.rec)
}

// field sets one field of the row.
func (j *jsonRow) field(key, value []byte) error {
	name, ok := unquote(key, &j.key)
	if !ok {
		return j.t.fault(j.rec.line, "the name of a field has an unpaired surrogate")
	}
	return j.set(view(name), value)
}

func (j *jsonRow) set(name string, value []byte) error {
	i, err := j.t.column(name)
	if err != nil || i < 0 {
		return err
	}
	for len(j.rec.cells) <= i {
		j.rec.cells = append(j.rec.cells, cell{})
		j.stamp = append(j.stamp, 0)
	}
	if j.stamp[i] == j.rows {
		return j.t.fault(j.rec.line, "the field %q comes twice", clip(name, 80))
	}
	j.stamp[i] = j.rows
	j.rec.cells[i] = cell{form: formOf(value), text: value}
	return nil
}

func formOf(raw []byte) cellForm {
	switch raw[0] {
	case '"':
		return cellString
	case '{', '[':
		return cellNested
	case 't', 'f':
		return cellBool
	case 'n':
		return cellNull
	}
	return cellNumber
}

func word(raw []byte) string {
	switch formOf(raw) {
	case cellString:
		return "a string"
	case cellNested:
		return "an array"
	case cellBool:
		return "a boolean"
	case cellNull:
		return "null"
	}
	return "a number"
}

// eachField calls fn for the fields of a valid JSON object, with the raw key and value.
func eachField(raw []byte, fn func(key, value []byte) error) error {
	i := space(raw, 1)
	for raw[i] != '}' {
		end := valueEnd(raw, i)
		key := raw[i:end]
		i = space(raw, space(raw, end)+1) // behind the colon
		end = valueEnd(raw, i)
		if err := fn(key, raw[i:end]); err != nil {
			return err
		}
		if i = space(raw, end); raw[i] == ',' {
			i = space(raw, i+1)
		}
	}
	return nil
}

func space(raw []byte, i int) int {
	for raw[i] == ' ' || raw[i] == '\t' || raw[i] == '\n' || raw[i] == '\r' {
		i++
	}
	return i
}

// valueEnd is where the value that begins at i ends; the text is valid JSON.
func valueEnd(raw []byte, i int) int {
	switch raw[i] {
	case '"':
		return stringEnd(raw, i)
	case '{', '[':
		depth := 0
		for ; ; i++ {
			switch raw[i] {
			case '"':
				i = stringEnd(raw, i) - 1
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			}
		}
	}
	for ; i < len(raw); i++ {
		switch raw[i] {
		case ',', ']', '}', ' ', '\t', '\r', '\n':
			return i
		}
	}
	return i
}

func stringEnd(raw []byte, i int) int {
	for i++; raw[i] != '"'; i++ {
		if raw[i] == '\\' {
			i++
		}
	}
	return i + 1
}
