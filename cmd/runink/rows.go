package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	"github.com/jedib0t/go-pretty/v6/table"

	"github.com/org-runink/runbus/cmd/internal/process"
)

// tableRows is how many rows a table shows: it is for looking, and is held in memory.
const tableRows = 1000

// jsonRows writes one array of objects, row by row; or keeps it, for --json.
type jsonRows struct {
	w    io.Writer
	keep bool
	kept bytes.Buffer
	n    int
}

func (j *jsonRows) columns([]column) error { return nil }

func (j *jsonRows) row(r json.RawMessage) error {
	before := ",\n"
	if j.n == 0 {
		before = "[\n"
	}
	j.n++
	return j.write(before, r)
}

func (j *jsonRows) end() error {
	if j.n == 0 {
		return j.write("[]\n", nil)
	}
	return j.write("\n]\n", nil)
}

func (j *jsonRows) write(before string, r json.RawMessage) error {
	w := j.w
	if j.keep {
		w = &j.kept
	}
	if _, err := io.WriteString(w, before); err != nil {
		return err
	}
	_, err := w.Write(process.EscapeControls(r))
	return err
}

// tableRowsSink shows the first rows as a table and counts the others.
type tableRowsSink struct {
	w     io.Writer
	most  int
	t     table.Writer
	names []string
	n     int
}

func newTableRows(w io.Writer, most int) *tableRowsSink { return &tableRowsSink{w: w, most: most} }

func (s *tableRowsSink) columns(cs []column) error {
	s.names = make([]string, len(cs))
	for i, c := range cs {
		s.names[i] = c.Name
	}
	s.t = newTable(s.w, s.names)
	return nil
}

func (s *tableRowsSink) row(r json.RawMessage) error {
	s.n++
	if s.n > s.most {
		return nil
	}
	cells := map[string]json.RawMessage{}
	if err := json.Unmarshal(r, &cells); err != nil {
		return fmt.Errorf("a row is damaged: %w", err)
	}
	line := make(table.Row, len(s.names))
	for i, name := range s.names {
		line[i] = cell(cells[name])
	}
	s.t.AppendRow(line)
	return nil
}

func (s *tableRowsSink) end() error {
	if s.t == nil {
		return nil
	}
	s.t.Render()
	if more := s.n - s.most; more > 0 {
		_, err := fmt.Fprintf(s.w, "… and %d more rows\n", more)
		return err
	}
	return nil
}

// cell is a value for a reader: text without quotes and without anything that moves a terminal's cursor.
func cell(v json.RawMessage) string {
	s := string(v)
	if s == "null" {
		return ""
	}
	var text string
	if json.Unmarshal(v, &text) == nil {
		s = text
	}
	return oneLine(s)
}
