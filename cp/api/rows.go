package api

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// rowWriter takes the record batches of one result.
type rowWriter interface {
	schema(*arrow.Schema) error
	batch(arrow.RecordBatch) error
}

// decodeRows reads an Arrow IPC stream to its end and hands its batches to w. It holds one batch at a time. A panic of the
// decoder is an error.
func decodeRows(r io.Reader, w rowWriter) (err error) {
	defer func() {
		if p := recover(); p != nil {
			cause, ok := p.(error)
			if !ok {
				cause = fmt.Errorf("%v", p)
			}
			err = fmt.Errorf("the result is not a valid Arrow stream: %w", cause)
		}
	}()
	mem := &bounded{Allocator: memory.DefaultAllocator}
	reader, err := ipc.NewReaderFromMessageReader(newMessages(r, mem), ipc.WithAllocator(mem))
	if err != nil {
		return fmt.Errorf("the result is not a valid Arrow stream: %w", err)
	}
	defer reader.Release()
	if err := w.schema(reader.Schema()); err != nil {
		return err
	}
	for rows := int64(0); reader.Next(); {
		batch := reader.RecordBatch()
		if rows += batch.NumRows(); rows > maxRows {
			return fmt.Errorf("the result has more than %d rows", maxRows)
		}
		if err := w.batch(batch); err != nil {
			return err
		}
	}
	if err := reader.Err(); err != nil && err != io.EOF {
		return fmt.Errorf("the result is not a valid Arrow stream: %w", err)
	}
	switch n, err := r.Read(make([]byte, 1)); {
	case n > 0:
		return errors.New("the result is not a valid Arrow stream: it goes on after its end")
	case err != nil && err != io.EOF:
		return err
	}
	return nil
}

// columnNames are the names as keys of a JSON object: the second `x` becomes `x_2`, so that no column is lost.
func columnNames(s *arrow.Schema) []string {
	names := make([]string, s.NumFields())
	given := make(map[string]bool, len(names))
	for i, f := range s.Fields() {
		names[i], given[f.Name] = f.Name, true
	}
	taken, last := make(map[string]bool, len(names)), map[string]int{}
	for i, name := range names {
		for n := max(last[names[i]], 2); taken[name]; n++ {
			if next := names[i] + "_" + strconv.Itoa(n); !given[next] && !taken[next] {
				name, last[names[i]] = next, n
			}
		}
		taken[name] = true
		names[i] = name
	}
	return names
}

// ndjsonRows writes a line of type `schema` and a line of type `row` per row.
type ndjsonRows struct {
	lines  *lineWriter
	fields []arrow.Field
	keys   [][]byte // `"name":`
}

// Column tells one column of a result.
type Column struct {
	Name     string `json:"name"`
	Type     string `json:"type" doc:"Arrow type, or the name of the extension type"`
	Nullable bool   `json:"nullable"`
}

func (n *ndjsonRows) schema(s *arrow.Schema) error {
	columns := make([]Column, s.NumFields())
	n.keys, n.fields = make([][]byte, s.NumFields()), s.Fields()
	for i, name := range columnNames(s) {
		key, err := json.Marshal(name)
		if err != nil {
			return err
		}
		n.keys[i] = append(key, ':')
		columns[i] = Column{Name: name, Type: typeName(n.fields[i]), Nullable: n.fields[i].Nullable}
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
			if line, err = appendValue(line, n.fields[col], b.Column(col), row); err != nil {
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

// csvRows writes a header and a record per row, as RFC 4180 has it. NULL is an empty field, empty text is `""`; a NULL that is the
// whole record is `""` too, because most readers skip an empty line.
type csvRows struct {
	w      *bufio.Writer
	flush  func() error
	fields []arrow.Field
}

func newCSVRows(w io.Writer, flush func() error) *csvRows {
	return &csvRows{w: bufio.NewWriterSize(w, 64<<10), flush: flush}
}

func (c *csvRows) schema(s *arrow.Schema) error {
	c.fields = s.Fields()
	for i, f := range c.fields {
		c.field(i, f.Name, false)
	}
	return c.end()
}

func (c *csvRows) batch(b arrow.RecordBatch) error {
	for row := range int(b.NumRows()) {
		for col, f := range c.fields {
			text, null, err := valueText(f, b.Column(col), row)
			if err != nil {
				return fmt.Errorf("column %s: %w", f.Name, err)
			}
			c.field(col, text, null)
		}
		if err := c.w.WriteByte('\n'); err != nil {
			return err
		}
	}
	return c.flushed()
}

// field writes one field of a record. Errors of the writer stay with it.
func (c *csvRows) field(col int, text string, null bool) {
	if col > 0 {
		_ = c.w.WriteByte(',')
	}
	switch {
	case null && len(c.fields) > 1:
	case text == "", text == `\.`, strings.ContainsAny(text, "\",\r\n"), text[0] == ' ', text[len(text)-1] == ' ', text[0] == '\t', text[len(text)-1] == '\t':
		_ = c.w.WriteByte('"')
		_, _ = c.w.WriteString(strings.ReplaceAll(text, `"`, `""`))
		_ = c.w.WriteByte('"')
	default:
		_, _ = c.w.WriteString(text)
	}
}

func (c *csvRows) end() error {
	_ = c.w.WriteByte('\n')
	return c.flushed()
}

func (c *csvRows) flushed() error {
	if err := c.w.Flush(); err != nil {
		return err
	}
	return c.flush()
}
