package tabular

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"testing"

	"github.com/org-runink/runbus/runner/source"
)

// BenchmarkRead is text → types → Arrow → zstd, in bytes of text.
func BenchmarkRead(b *testing.B) {
	const rows = 200_000
	var csv, jsonl, json bytes.Buffer
	csv.WriteString("id,amount,name,at,day,flag\n")
	json.WriteString("[")
	for i := range rows {
		fmt.Fprintf(&csv, "%d,%d.%02d,name %d,2024-01-01T00:%02d:00Z,2024-02-%02d,%t\n", i, i*7, i%100, i%1000, i%60, i%28+1, i%2 == 0)
		row := fmt.Sprintf(`{"id":%d,"amount":%d.5,"name":"name %d","at":"2024-01-01T00:%02d:00Z","day":"2024-02-%02d","flag":%t}`, i, i*7, i%1000, i%60, i%28+1, i%2 == 0)
		fmt.Fprintln(&jsonl, row)
		if i > 0 {
			json.WriteString(",")
		}
		json.WriteString(row)
	}
	json.WriteString("]")
	for _, c := range []struct {
		name string
		text []byte
		read func(*Table, io.Reader) (int64, error)
	}{
		{"csv", csv.Bytes(), func(t *Table, r io.Reader) (int64, error) { return t.ReadCSV(context.Background(), "x", r) }},
		{"jsonl", jsonl.Bytes(), func(t *Table, r io.Reader) (int64, error) { return t.ReadJSONLines(context.Background(), "x", r) }},
		{"json", json.Bytes(), func(t *Table, r io.Reader) (int64, error) { return t.ReadJSON(context.Background(), "x", r) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(c.text)))
			b.ReportAllocs()
			for b.Loop() {
				out := source.NewOutput(io.Discard, source.Limits{}, nil)
				table := NewTable(Options{Header: true}, out, nil)
				if n, err := c.read(table, bytes.NewReader(c.text)); err != nil || n != rows {
					b.Fatal(n, err)
				}
				if err := table.Finish(); err != nil {
					b.Fatal(err)
				}
				table.Release()
			}
			b.ReportMetric(float64(rows)*float64(b.N)/b.Elapsed().Seconds(), "rows/s")
		})
	}
}
