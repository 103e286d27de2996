package tabular

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/runner/source"
)

func TestMain(m *testing.M) { leak.Main(m) }

// result is a table as text: `name:type` of each column, and the rows.
type result struct {
	columns []string
	rows    [][]string
	notices []string
}

// run reads a text and gives the result as it comes out of the Arrow stream.
func run(t testing.TB, o Options, read func(*Table) error) (result, error) {
	t.Helper()
	mem := memory.NewCheckedAllocator(memory.DefaultAllocator)
	defer mem.AssertSize(t, 0)
	var buf bytes.Buffer
	out := source.NewOutput(&buf, source.Limits{}, nil)
	table := NewTable(o, out, mem)
	defer table.Release()
	if err := read(table); err != nil {
		return result{}, err
	}
	if err := table.Finish(); err != nil {
		return result{}, err
	}
	if err := out.Close(); err != nil {
		return result{}, err
	}
	r, err := ipc.NewReader(&buf)
	if err != nil {
		return result{}, err
	}
	defer r.Release()
	var res result
	for _, f := range r.Schema().Fields() {
		typ := f.Type.String()
		if name, ok := f.Metadata.GetValue("ARROW:extension:name"); ok {
			typ = name
		}
		res.columns = append(res.columns, f.Name+":"+typ)
	}
	for r.Next() {
		batch := r.RecordBatch()
		for i := range int(batch.NumRows()) {
			var row []string
			for _, c := range batch.Columns() {
				if c.IsNull(i) {
					row = append(row, "∅")
				} else {
					row = append(row, c.ValueStr(i))
				}
			}
			res.rows = append(res.rows, row)
		}
	}
	for _, n := range out.Notices() {
		res.notices = append(res.notices, n.GetMessage())
	}
	if int64(len(res.rows)) != out.Rows() {
		t.Errorf("the stream has %d rows, the output counted %d", len(res.rows), out.Rows())
	}
	return res, r.Err()
}

func runCSV(t testing.TB, o Options, text string) (result, error) {
	return run(t, o, func(table *Table) error {
		_, err := table.ReadCSV(context.Background(), "x.csv", strings.NewReader(text))
		return err
	})
}

func runJSONL(t testing.TB, o Options, text string) (result, error) {
	return run(t, o, func(table *Table) error {
		_, err := table.ReadJSONLines(context.Background(), "x.jsonl", strings.NewReader(text))
		return err
	})
}

func runJSON(t testing.TB, o Options, text string, captures ...*Capture) (result, error) {
	return run(t, o, func(table *Table) error {
		_, err := table.ReadJSON(context.Background(), "x.json", strings.NewReader(text), captures...)
		return err
	})
}

func (r result) String() string {
	var b strings.Builder
	fmt.Fprintln(&b, strings.Join(r.columns, " "))
	for _, row := range r.rows {
		fmt.Fprintln(&b, strings.Join(row, "|"))
	}
	return b.String()
}

func lines3(s ...string) string { return strings.Join(s, "\n") + "\n" }
