package tabular

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// cellForm is the form of one value in its text.
type cellForm uint8

const (
	cellNull   cellForm = iota // null, or absent
	cellText                   // CSV field
	cellString                 // JSON string, raw with its quotes
	cellNumber                 // JSON number
	cellBool                   // JSON true, false
	cellNested                 // JSON object, array
)

// cell is one value. Its text is the reader's until the next row.
type cell struct {
	form cellForm
	text []byte
}

// record is one row: cells by the table's column index, and where it stands.
type record struct {
	line  int64 // line of a CSV or of JSON lines, number of the row in a JSON document
	cells []cell
}

// Table turns the rows of one fetch into record batches: it gathers a sample, decides the types, and writes. The rows may
// come from several texts, which are read one after the other. Columns are matched by name. It is used by one goroutine.
type Table struct {
	o   Options
	out *source.Output
	mem memory.Allocator

	wanted map[string]bool // Options.Columns
	names  []string
	index  map[string]int
	stats  []stats
	part   string // the text that is being read
	unit   string // `line` or `row`, for messages

	scanning bool // rows teach only
	decided  bool
	sample   []record
	origins  []string // part of each sampled row
	size     int      // memory of the sample
	learnt   int64    // rows that taught
	ignored  map[string]bool
	header   []string // of the first CSV text
	headerOf string

	schema   *arrow.Schema
	plans    []plan
	builders []array.Builder
	rows     int
	bytes    int
	scratch  []byte
}

// plan is one column of the result.
type plan struct {
	column int // index of the table's column
	name   string
	kind   kind
	typ    Type
	set    bool // by the types setting
	nano   bool
}

// NewTable returns a Table that writes to out. mem may be nil. Release must be called.
func NewTable(o Options, out *source.Output, mem memory.Allocator) *Table {
	if mem == nil {
		mem = memory.DefaultAllocator
	}
	t := &Table{o: o, out: out, mem: mem, index: map[string]int{}, ignored: map[string]bool{}, wanted: map[string]bool{}}
	for _, name := range o.Columns {
		t.wanted[name] = true
	}
	return t
}

// Scan makes the rows that follow teach the types and nothing else; they are read again after Decide.
func (t *Table) Scan() { t.scanning = true }

// Decide fixes the types after a Scan and starts the output.
func (t *Table) Decide() error {
	t.scanning = false
	if t.decided {
		return nil
	}
	return t.decide()
}

// Finish ends the table: what is still held is written. A table without rows has its schema all the same.
func (t *Table) Finish() error {
	if err := t.Decide(); err != nil {
		return err
	}
	return t.flush()
}

// Release frees what the table holds.
func (t *Table) Release() {
	for _, b := range t.builders {
		b.Release()
	}
	t.builders = nil
}

// Names are the columns seen so far, in the order in which they came.
func (t *Table) Names() []string { return slices.Clone(t.names) }

// column is the index of the column of that name, −1 for one that is not wanted.
func (t *Table) column(name string) (int, error) {
	if i, ok := t.index[name]; ok {
		return i, nil
	}
	if len(t.wanted) > 0 && !t.wanted[name] {
		return -1, nil
	}
	if t.decided {
		if t.o.IgnoreUnknown {
			if !t.ignored[name] && len(t.ignored) < 100 {
				t.ignored[name] = true
				t.out.Notice(runbusv1.NoticeCode_NOTICE_CODE_SOURCE, fmt.Sprintf("the field %q was left out: none of the first %d rows has it (first seen in %s)", clip(name, 80), t.learnt, t.part))
			}
			return -1, nil
		}
		return 0, schemas.Errorf(schemas.CodeSource, "%s: the field %q is in none of the first %d rows", t.part, clip(name, 80), t.learnt).
			WithHint("raise sampleRows, name the wanted ones in columns, or leave it out with unknownFields=notice")
	}
	if len(t.names) == maxColumns {
		return 0, schemas.Errorf(schemas.CodeSource, "%s: more than %d columns", t.part, maxColumns).WithHint("name the wanted ones in columns")
	}
	name = strings.Clone(name)
	i := len(t.names)
	t.names, t.index[name] = append(t.names, name), i
	t.stats = append(t.stats, stats{})
	return i, nil
}

// add takes one row.
func (t *Table) add(r *record) error {
	if t.decided {
		return t.write(r, t.part)
	}
	t.learnt++
	for i, c := range r.cells {
		t.stats[i].observe(c)
	}
	if t.scanning {
		return nil
	}
	t.keep(r)
	if len(t.sample) >= t.o.sampleRows() || t.size >= sampleBytes {
		return t.decide()
	}
	return nil
}

// keep copies a row into the sample.
func (t *Table) keep(r *record) {
	const cellSize, rowSize = 32, 64
	n := 0
	for _, c := range r.cells {
		n += len(c.text)
	}
	text := make([]byte, 0, n)
	cells := make([]cell, len(r.cells))
	for i, c := range r.cells {
		from := len(text)
		text = append(text, c.text...)
		cells[i] = cell{form: c.form, text: text[from:len(text):len(text)]}
	}
	t.sample = append(t.sample, record{line: r.line, cells: cells})
	t.origins = append(t.origins, t.part)
	t.size += n + len(cells)*cellSize + rowSize
}

// decide fixes columns and types, starts the output and writes the sample.
func (t *Table) decide() error {
	names := t.o.Columns
	if len(names) == 0 {
		names = t.names
	}
	for name := range t.o.Types {
		if !slices.Contains(names, name) && !slices.Contains(t.names, name) {
			return schemas.Errorf(schemas.CodeBadSource, "the types setting names the column %q, which is not there", clip(name, 80)).WithHint(listNames(t.names))
		}
	}
	fields := make([]arrow.Field, 0, len(names))
	for _, name := range slices.Clone(names) {
		if _, seen := t.index[name]; !seen && t.learnt > 0 {
			if _, declared := t.o.Types[name]; !declared {
				return schemas.Errorf(schemas.CodeBadSource, "none of the first %d rows has the column %q", t.learnt, clip(name, 80)).
					WithHint(listNames(t.names) + "; if it comes later, declare it in types")
			}
		}
		i, err := t.column(name)
		if err != nil {
			return err
		}
		p := t.plan(i, name)
		t.plans = append(t.plans, p)
		fields = append(fields, p.field())
	}
	t.schema = arrow.NewSchema(fields, nil)
	for _, f := range fields {
		t.builders = append(t.builders, array.NewBuilder(t.mem, f.Type))
	}
	t.decided = true
	if err := t.out.Start(t.schema); err != nil {
		return err
	}
	sample, origins := t.sample, t.origins
	t.sample, t.origins = nil, nil
	for i := range sample {
		if err := t.write(&sample[i], origins[i]); err != nil {
			return err
		}
		sample[i] = record{}
	}
	return nil
}

func (t *Table) plan(i int, name string) plan {
	p := plan{column: i, name: name}
	s := &t.stats[i]
	if typ, ok := t.o.Types[name]; ok {
		p.kind, p.typ, p.set = typ.kind, typ, true
	} else if t.o.AllText {
		p.kind, p.set = kindText, true
	} else {
		p.kind = s.decide()
	}
	p.nano = s.nano && !s.outside && (p.kind == kindTime || p.kind == kindTimeZ)
	return p
}

// write appends one row to the batch.
func (t *Table) write(r *record, part string) error {
	for i := range t.plans {
		p := &t.plans[i]
		c := cell{}
		if p.column < len(r.cells) {
			c = r.cells[p.column]
		}
		if !t.append(p, t.builders[i], c) {
			return t.misfit(p, c, r, part)
		}
		t.bytes += len(c.text) + 8
	}
	t.rows++
	if t.rows >= source.BatchRows || t.bytes >= source.BatchBytes {
		return t.flush()
	}
	return nil
}

// flush hands the batch over.
func (t *Table) flush() error {
	if t.rows == 0 {
		return nil
	}
	columns := make([]arrow.Array, len(t.builders))
	for i, b := range t.builders {
		columns[i] = b.NewArray()
		defer columns[i].Release()
	}
	batch := array.NewRecordBatch(t.schema, columns, int64(t.rows))
	defer batch.Release()
	t.rows, t.bytes = 0, 0
	return t.out.Write(batch)
}

// misfit is the error for a value that its column does not take.
func (t *Table) misfit(p *plan, c cell, r *record, part string) error {
	why := fmt.Sprintf("as the first %d rows said", t.learnt)
	if p.set {
		why = "as the types setting says"
	}
	return schemas.Errorf(schemas.CodeSource, "%s, %s %d, column %q: %s does not fit %s, %s", part, t.unit, r.line, clip(p.name, 80), show(c), p.arrowType(), why).
		WithHint(fmt.Sprintf("set types=%s:text (in JSON, json keeps every value) or allText=true, or raise sampleRows", p.name))
}

// show is a value for a message.
func show(c cell) string {
	if c.form == cellText {
		return fmt.Sprintf("%q", clip(string(c.text), 60))
	}
	return clip(string(c.text), 60)
}

// begin names the text that is read next.
func (t *Table) begin(part, unit string) { t.part, t.unit = part, unit }

func listNames(names []string) string {
	if len(names) == 0 {
		return "there are no columns"
	}
	return "the columns are " + clip(strings.Join(names, ", "), 400)
}

// clip shortens foreign text for a message.
func clip(s string, most int) string {
	if len(s) <= most {
		return strings.ToValidUTF8(s, "�")
	}
	return strings.ToValidUTF8(s[:most], "�") + fmt.Sprintf("… (%d bytes)", len(s))
}

// every is how many rows pass between two looks at the context.
const every = 256

func alive(ctx context.Context, row int64) error {
	if row%every == 0 {
		return ctx.Err()
	}
	return nil
}
