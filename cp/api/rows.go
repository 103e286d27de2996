package api

import (
	"bufio"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"strconv"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
)

// rowWriter takes the record batches of one result.
type rowWriter interface {
	schema(*arrow.Schema) error
	batch(arrow.RecordBatch) error
}

// decodeRows reads an Arrow IPC stream to its end and hands its batches to w. It holds one batch at a time. The result of a
// foreign process is foreign bytes: a panic of the decoder is an error.
func decodeRows(r io.Reader, w rowWriter) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the result is not a valid Arrow stream: %v", p)
		}
	}()
	reader, err := ipc.NewReader(r)
	if err != nil {
		return fmt.Errorf("the result is not a valid Arrow stream: %w", err)
	}
	defer reader.Release()
	if err := w.schema(reader.Schema()); err != nil {
		return err
	}
	for reader.Next() {
		if err := w.batch(reader.RecordBatch()); err != nil {
			return err
		}
	}
	if err := reader.Err(); err != nil && err != io.EOF { //nolint:errorlint // the reader returns io.EOF itself
		return fmt.Errorf("the result is not a valid Arrow stream: %w", err)
	}
	return nil
}

// columnNames are the names as keys of a JSON object: the second `x` becomes `x_2`, so that no column is lost.
func columnNames(s *arrow.Schema) []string {
	names, used := make([]string, s.NumFields()), map[string]bool{}
	for i, f := range s.Fields() {
		used[f.Name] = true
		names[i] = f.Name
	}
	taken := map[string]bool{}
	for i, name := range names {
		for n := 2; taken[name]; n++ {
			if next := names[i] + "_" + strconv.Itoa(n); !used[next] && !taken[next] {
				name = next
			}
		}
		taken[name] = true
		names[i] = name
	}
	return names
}

// ndjsonRows writes a line of type `schema` and a line of type `row` per row.
type ndjsonRows struct {
	lines *lineWriter
	keys  [][]byte // `"name":`
}

// Column tells one column of a result.
type Column struct {
	Name     string `json:"name"`
	Type     string `json:"type" doc:"Arrow type"`
	Nullable bool   `json:"nullable"`
}

func (n *ndjsonRows) schema(s *arrow.Schema) error {
	columns := make([]Column, s.NumFields())
	n.keys = make([][]byte, s.NumFields())
	for i, name := range columnNames(s) {
		key, err := json.Marshal(name)
		if err != nil {
			return err
		}
		n.keys[i] = append(key, ':')
		columns[i] = Column{Name: name, Type: s.Field(i).Type.String(), Nullable: s.Field(i).Nullable}
	}
	return n.lines.write(struct {
		Type    string   `json:"type"`
		Columns []Column `json:"columns"`
	}{"schema", columns})
}

func (n *ndjsonRows) batch(b arrow.RecordBatch) error {
	var line []byte
	for row := range int(b.NumRows()) {
		line = append(line[:0], `{"type":"row","row":{`...)
		for col := range int(b.NumCols()) {
			if col > 0 {
				line = append(line, ',')
			}
			line = append(line, n.keys[col]...)
			var err error
			if line, err = appendValue(line, b.Column(col), row); err != nil {
				return fmt.Errorf("column %s: %w", b.ColumnName(col), err)
			}
		}
		line = append(line, '}', '}', '\n')
		if err := n.lines.raw(line); err != nil {
			return err
		}
	}
	return n.lines.flush()
}

// appendValue writes one value as JSON: integers and finite floats as numbers, decimals, timestamps, NaN and infinities as
// text, bytes as base64.
func appendValue(line []byte, a arrow.Array, row int) ([]byte, error) {
	if a.IsNull(row) {
		return append(line, "null"...), nil
	}
	switch a := a.(type) {
	case *array.Int64:
		return strconv.AppendInt(line, a.Value(row), 10), nil
	case *array.Int32:
		return strconv.AppendInt(line, int64(a.Value(row)), 10), nil
	case *array.Boolean:
		return strconv.AppendBool(line, a.Value(row)), nil
	case *array.Decimal128, *array.Decimal256:
		return strconv.AppendQuote(line, valueText(a, row)), nil // digits, sign and point only
	}
	v, err := json.Marshal(a.GetOneForMarshal(row))
	return append(line, v...), err
}

// valueText is a value that is not NULL as text, exactly: arrow's own text of a decimal goes through a float.
func valueText(a arrow.Array, row int) string {
	switch a := a.(type) {
	case *array.Decimal128:
		return a.Value(row).ToString(a.DataType().(*arrow.Decimal128Type).Scale)
	case *array.Decimal256:
		return a.Value(row).ToString(a.DataType().(*arrow.Decimal256Type).Scale)
	}
	return a.ValueStr(row)
}

// csvRows writes a header and a record per row; NULL is an empty field.
type csvRows struct {
	w      *csv.Writer
	flush  func() error
	record []string
}

func newCSVRows(w io.Writer, flush func() error) *csvRows {
	return &csvRows{w: csv.NewWriter(bufio.NewWriter(w)), flush: flush}
}

func (c *csvRows) schema(s *arrow.Schema) error {
	c.record = make([]string, s.NumFields())
	for i, f := range s.Fields() {
		c.record[i] = f.Name
	}
	return c.end(c.w.Write(c.record))
}

func (c *csvRows) batch(b arrow.RecordBatch) error {
	for row := range int(b.NumRows()) {
		for col := range int(b.NumCols()) {
			c.record[col] = ""
			if a := b.Column(col); !a.IsNull(row) {
				c.record[col] = valueText(a, row)
			}
		}
		if err := c.w.Write(c.record); err != nil {
			return err
		}
	}
	return c.end(nil)
}

func (c *csvRows) end(err error) error {
	if err != nil {
		return err
	}
	c.w.Flush()
	if err := c.w.Error(); err != nil {
		return err
	}
	return c.flush()
}
