package file_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/file"
	"github.com/org-runink/runbus/runner/source/sourcetest"
)

func TestConformance(t *testing.T) {
	dir := t.TempDir()
	put := func(name string, content []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	read := func(kv ...string) source.Request {
		r := source.Request{Settings: map[string]string{}}
		for i := 0; i < len(kv); i += 2 {
			r.Settings[kv[i]] = kv[i+1]
		}
		return r
	}
	roots, err := source.OpenRoots(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := roots.Close(); err != nil {
			t.Error(err)
		}
	}()

	const many = sourcetest.MinManyRows
	type row struct {
		N int64  `parquet:"n"`
		S string `parquet:"s,optional"`
	}
	var csv, jsonl, pq bytes.Buffer
	csv.WriteString("n,s\n")
	w := parquet.NewGenericWriter[row](&pq)
	for i := range many {
		fmt.Fprintf(&csv, "%d,text %d\n", i, i)
		fmt.Fprintf(&jsonl, "{\"n\":%d,\"s\":\"text %d\"}\n", i, i)
		if _, err := w.Write([]row{{int64(i), fmt.Sprintf("text %d", i)}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	var none bytes.Buffer
	if err := parquet.NewGenericWriter[row](&none).Close(); err != nil {
		t.Fatal(err)
	}
	put("many.csv", csv.Bytes())
	put("many.jsonl", jsonl.Bytes())
	put("many.parquet", pq.Bytes())
	put("none.csv", []byte("n,s\n"))
	put("none.jsonl", nil)
	put("none.parquet", none.Bytes())
	put("a.csv", []byte("id,when,ok,zip,name,name\n1,2024-01-02T03:04:05+02:00,true,007,,x\n-2,,false,1,\"\",y\n"))
	put("a.jsonl", []byte("{\"id\":1,\"tags\":[\"a\", 2]}\n{\"id\":18446744073709551615,\"f\":0.5}\n"))
	put("broken.csv", []byte("a,b\n1,2\n1\n"))
	put("broken.jsonl", []byte("{\"a\":1}\n{\"a\":\n"))
	put("broken.parquet", []byte(strings.Repeat("PAR1", 10)))

	cases := []sourcetest.Case{
		{Name: "csv", Request: read("path", "a.csv"),
			Schema:  []string{"id: int64", "when: timestamp[us, tz=UTC]", "ok: bool", "zip: utf8", "name: utf8", "name_2: utf8"},
			Rows:    []string{"1 | 2024-01-02T01:04:05Z | true | 007 | NULL | x", "-2 | NULL | false | 1 |  | y"},
			Notices: []string{`"name_2"`}},
		{Name: "jsonl", Request: read("path", "a.jsonl"),
			Schema: []string{"id: decimal(38, 0)", "tags: utf8", "f: float64"},
			Rows:   []string{`1 | ["a",2] | NULL`, "18446744073709551615 | NULL | 0.5"}},
		{Name: "pattern", Request: read("path", filepath.Join(dir, "none.c*"), "types", "n:int64"), Schema: []string{"n: int64", "s: utf8"}},
	}
	for _, format := range []struct{ name, broken string }{{"csv", "line 3"}, {"jsonl", "line 2"}, {"parquet", "footer"}} {
		t.Run(format.name, func(t *testing.T) {
			empty := sourcetest.Case{Request: read("path", "none."+format.name), Schema: []string{"n: int64", "s: utf8"}}
			switch format.name {
			case "csv":
				empty.Schema[0] = "n: utf8"
			case "jsonl":
				empty.Schema = nil
			}
			sourcetest.Exercise(t, file.New(), sourcetest.Fixture{
				Env: source.Env{Roots: roots}, Cases: cases, Empty: empty,
				Many: read("path", "many."+format.name), ManyRows: many,
				Broken: read("path", "broken."+format.name), BrokenText: format.broken,
			})
		})
	}
}
