package tabular

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
)

func TestJSONLines(t *testing.T) {
	cases := []struct {
		name, text, want string
		o                Options
	}{
		{"types", `{"i":1,"f":1.5,"b":true,"s":"x","d":"2024-01-01","t":"2024-01-01T00:00:00+01:00","n":null,"o":{"a": [1, "x  y"]}}` + "\n\n" + `{"i":2,"f":2,"z":"05"}` + "\r\n",
			lines3("i:int64 f:float64 b:bool s:utf8 d:date32 t:timestamp[us, tz=UTC] n:utf8 o:arrow.json z:utf8",
				`1|1.5|true|x|2024-01-01|2023-12-31T23:00:00Z|∅|{"a":[1,"x  y"]}|∅`, "2|2|∅|∅|∅|∅|∅|∅|05"), Options{}},
		{"mixed is JSON", `{"a":"5"}` + "\n" + `{"a":5}` + "\n" + `{"a":null}`, lines3("a:arrow.json", `"5"`, "5", "∅"), Options{}},
		{"numbers in strings stay text", `{"a":"5"}`, lines3("a:utf8", "5"), Options{}},
		{"big", `{"a":18446744073709551615}`, lines3("a:decimal(38, 0)", "18446744073709551615"), Options{}},
		{"number beyond float", `{"a":0.1234567890123456789}` + "\n" + `{"a":1}`, lines3("a:arrow.json", "0.1234567890123456789", "1"), Options{}},
		{"wide among fractions", `{"a":9007199254740993}` + "\n" + `{"a":0.5}`, lines3("a:arrow.json", "9007199254740993", "0.5"), Options{}},
		{"escapes", `{"a\u00e9":"\u0041\n\ud83d\ude00\"\\\/"}`, lines3("aé:utf8", "A\n😀\"\\/"), Options{}},
		{"values", "1\n2\n", lines3("value:int64", "1", "2"), Options{}},
		{"text of anything", `{"a":"x"}` + "\n" + `{"a":[1, 2]}` + "\n" + `{"a":7}`, lines3("a:utf8", "x", "[1,2]", "7"), Options{Types: map[string]Type{"a": {kind: kindText}}}},
		{"json of anything", `{"a":"x"}` + "\n" + `{"a":7}`, lines3("a:arrow.json", `"x"`, "7"), Options{SampleRows: 1, Types: map[string]Type{"a": {kind: kindJSON}}}},
		{"columns", `{"a":1,"b":2}` + "\n" + `{"b":3,"c":4}`, lines3("b:int64", "2", "3"), Options{Columns: []string{"b"}, SampleRows: 1}},
		{"declared column", `{"a":1}` + "\n" + `{"b":3}`, lines3("b:int64", "∅", "3"), Options{Columns: []string{"b"}, SampleRows: 1, Types: map[string]Type{"b": {kind: kindInt}}}},
		{"empty objects", "{}\n{}", lines3("", "", ""), Options{}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, err := runJSONL(t, c.o, c.text)
			if err != nil {
				t.Fatal(err)
			}
			if got.String() != c.want {
				t.Errorf("got:\n%s\nwant:\n%s", got, c.want)
			}
		})
	}
}

func TestJSONLinesErrors(t *testing.T) {
	cases := []struct {
		name, text string
		want       []string
		o          Options
	}{
		{"not JSON", "{\"a\":1}\n{a}\n", []string{"x.jsonl, line 2", "not JSON"}, Options{}},
		{"twice", `{"a":1,"a":2}`, []string{"line 1", `"a" comes twice`}, Options{}},
		{"twice by escape", `{"a":1,"\u0061":2}`, []string{`"a" comes twice`}, Options{}},
		{"array among objects", "{\"a\":1}\n[1]\n", []string{"line 2", "among objects"}, Options{}},
		{"object among values", "1\n{\"a\":1}\n", []string{"line 2"}, Options{}},
		{"invalid UTF-8", "{\"a\":\"\xff\"}", []string{"line 1", "UTF-8"}, Options{}},
		{"unpaired surrogate", `{"a":"\ud800"}`, []string{"line 1", `column "a"`}, Options{}},
		{"unpaired low surrogate", `{"a":"\udc00x"}`, []string{"line 1"}, Options{}},
		{"unpaired surrogate in a name", `{"\ud800":1}`, []string{"surrogate"}, Options{}},
		{"long", `{"a":"` + strings.Repeat("x", 500) + `"}`, []string{"line 1", "longer than 100"}, Options{MaxRecord: 100}},
		{"late type", "{\"a\":1}\n{\"a\":\"x\"}", []string{"line 2", `column "a"`, "int64"}, Options{SampleRows: 1}},
		{"late number in text", "{\"a\":\"x\"}\n{\"a\":1}", []string{"line 2"}, Options{SampleRows: 1}},
		{"late field", "{\"a\":1}\n{\"b\":1}", []string{`"b"`, "first 1 rows"}, Options{SampleRows: 1}},
		{"absent column", "{\"a\":1}", []string{`"z"`}, Options{Columns: []string{"z"}}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			_, err := runJSONL(t, c.o, c.text)
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q lacks %q", err, w)
				}
			}
		})
	}
}

func TestUnknownFieldsNotice(t *testing.T) {
	got, err := runJSONL(t, Options{SampleRows: 1, IgnoreUnknown: true}, "{\"a\":1}\n{\"a\":2,\"b\":1}\n{\"a\":3,\"b\":2}")
	if err != nil {
		t.Fatal(err)
	}
	if len(got.rows) != 3 || len(got.notices) != 1 || !strings.Contains(got.notices[0], `"b"`) {
		t.Errorf("rows %v, notices %q", got.rows, got.notices)
	}
}

func TestJSONDocuments(t *testing.T) {
	path := func(s string) Path {
		p, err := ParsePath(s)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	cases := []struct{ name, path, text, want string }{
		{"root array", "", ` [ {"a":1} , {"a":2} ] `, lines3("a:int64", "1", "2")},
		{"mark", "", "\xef\xbb\xbf[{\"a\":1}]", lines3("a:int64", "1")},
		{"root object", "", `{"a":1,"b":[1,2]}`, lines3("a:int64 b:arrow.json", "1|[1,2]")},
		{"nested", "data.items", `{"x":[{"data":{}}],"data":{"no":{"items":[9]},"items":[{"a":1}],"z":0},"y":1}`, lines3("a:int64", "1")},
		{"index", "data[1].rows", `{"data":[{"rows":[{"a":9}]},{"rows":[{"a":1}]},3]}`, lines3("a:int64", "1")},
		{"dotted index", "data.1", `{"data":[[8],[{"a":1}]]}`, lines3("a:int64", "1")},
		{"digit field", "data.1", `{"data":{"1":[{"a":1}]}}`, lines3("a:int64", "1")},
		{"quoted", `$["a.b"]["c]"]`, `{"a.b":{"c]":[{"a":1}]}}`, lines3("a:int64", "1")},
		{"null", "data", `{"data":null}`, lines3("")},
		{"empty", "data", `{"data":[]}`, lines3("")},
		{"scalars", "", `[1,2.5]`, lines3("value:float64", "1", "2.5")},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, err := runJSON(t, Options{Rows: path(c.path)}, c.text)
			if err != nil {
				t.Fatal(err)
			}
			if got.String() != c.want {
				t.Errorf("got:\n%s\nwant:\n%s", got, c.want)
			}
		})
	}
	bad := []struct {
		name, path, text string
		want             []string
	}{
		{"absent", "data.items", `{"data":{"rows":[],"meta":1}}`, []string{"nothing at $.data.items"}},
		{"scalar", "data", `{"data":5}`, []string{"$.data", "a number"}},
		{"cut", "", `[{"a":1},`, []string{"ends too early"}},
		{"cut row", "", `[{"a":1},{"a"`, []string{"ends too early"}},
		{"nothing", "", ``, []string{"ends too early"}},
		{"more", "", `[] []`, []string{"goes on"}},
		{"garbage behind", "", `[] x`, []string{"goes on"}},
		{"not JSON", "", `<html>`, []string{"not JSON"}},
		{"not JSON inside", "", `[{"a":1},{a:2}]`, []string{"not JSON"}},
		{"twice", "data", `{"data":[],"data":[]}`, []string{"twice"}},
		{"UTF-16", "", "\xfe\xff\x00[", []string{"UTF-16"}},
		{"row number", "", `[{"a":1},{"a":1,"a":2}]`, []string{"x.json, row 2"}},
	}
	for _, c := range bad {
		t.Run(c.name, func(t *testing.T) {
			_, err := runJSON(t, Options{Rows: path(c.path)}, c.text)
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q lacks %q", err, w)
				}
			}
		})
	}
	_, err := runJSON(t, Options{Rows: path("data.items")}, `{"data":{"rows":[],"meta":1}}`)
	if d := schemas.ToDetail(err); !strings.Contains(d.GetHint(), "rows, meta") {
		t.Errorf("the hint does not say what is there: %q", d.GetHint())
	}
}

func TestJSONCaptures(t *testing.T) {
	rows, next := Path{{Name: "items", Index: -1}}, Path{{Name: "meta", Index: -1}, {Name: "next", Index: -1}}
	for _, text := range []string{`{"meta":{"next":"c1"},"items":[{"a":1}]}`, `{"items":[{"a":1}],"meta":{"a":[],"next":"c1"}}`} {
		c := &Capture{Path: next}
		got, err := runJSON(t, Options{Rows: rows}, text, c)
		if err != nil || len(got.rows) != 1 || string(c.Raw) != `"c1"` {
			t.Errorf("%s: %v %v %s", text, err, got.rows, c.Raw)
		}
	}
}

// manyRows is a JSON document that never was in memory as a whole.
type manyRows struct {
	n, of int
	rest  []byte
	pad   string
}

func (m *manyRows) Read(p []byte) (int, error) {
	if len(m.rest) == 0 {
		switch {
		case m.n == 0:
			m.rest = []byte(`{"meta":{},"items":[`)
		case m.n <= m.of:
			m.rest = fmt.Appendf(nil, `{"a":%d,"b":"%s"},`, m.n, m.pad)
			if m.n == m.of {
				m.rest = m.rest[:len(m.rest)-1]
			}
		case m.n == m.of+1:
			m.rest = []byte(`]}`)
		default:
			return 0, io.EOF
		}
		m.n++
	}
	n := copy(p, m.rest)
	m.rest = m.rest[n:]
	return n, nil
}

func TestJSONMemoryIsBounded(t *testing.T) {
	const rows = 20_000
	text := &manyRows{of: rows, pad: strings.Repeat("x", 2000)} // 40 MB
	out := source.NewOutput(io.Discard, source.Limits{}, nil)
	table := NewTable(Options{SampleRows: 100, Rows: Path{{Name: "items", Index: -1}}}, out, nil)
	defer table.Release()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	n, err := table.ReadJSON(context.Background(), "big", text)
	if err != nil || n != rows {
		t.Fatal(n, err)
	}
	runtime.ReadMemStats(&after)
	if err := table.Finish(); err != nil {
		t.Fatal(err)
	}
	if out.Rows() != rows {
		t.Errorf("%d rows", out.Rows())
	}
	if grown := int64(after.HeapSys) - int64(before.HeapSys); grown > 24<<20 {
		t.Errorf("the heap grew by %d MiB for a document of 40 MB", grown>>20)
	}
}

func TestJSONValueIsBounded(t *testing.T) {
	for _, path := range []Path{nil, {{Name: "items", Index: -1}}} {
		_, err := runJSON(t, Options{MaxRecord: 1000, Rows: path}, `{"x":"`+strings.Repeat("y", 200_000)+`","items":[]}`)
		if err == nil || !strings.Contains(err.Error(), "more than 1000 bytes") {
			t.Errorf("path %s: %v", path, err)
		}
	}
}

func TestCancel(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := run(t, Options{Header: true}, func(table *Table) error {
		_, err := table.ReadCSV(ctx, "x", strings.NewReader("a\n"+strings.Repeat("1\n", 1000)))
		return err
	})
	if err != context.Canceled {
		t.Errorf("got %v", err)
	}
}

func FuzzJSONLines(f *testing.F) {
	for _, s := range []string{`{"a":1}`, "{\"a\":[1,{\"b\":\"\\ud83d\\ude00\"}]}\n{\"c\":null}", `{"a":1e999}`, "1\n2", `{"":""}`, `{"a" : "\u12"}`, "{\"a\":\"2024-01-01\"}\n{\"a\":\"x\"}"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if _, err := runJSONL(t, Options{SampleRows: 2, MaxRecord: 1 << 16}, text); err != nil && schemas.CodeOf(err) == schemas.CodeFailed {
			t.Fatalf("an error without a code: %v", err)
		}
		// As text, every string comes out as encoding/json reads it.
		got, err := runJSONL(t, Options{AllText: true}, text)
		if err != nil || strings.ContainsAny(text, "\n\r") || len(got.rows) != 1 {
			return
		}
		var object map[string]any
		if json.Unmarshal([]byte(text), &object) != nil {
			return
		}
		for i, c := range got.columns {
			if s, ok := object[strings.TrimSuffix(c, ":utf8")].(string); ok && got.rows[0][i] != s {
				t.Fatalf("%s is %q, encoding/json has %q", c, got.rows[0][i], s)
			}
		}
	})
}

func FuzzJSON(f *testing.F) {
	f.Add(`{"data":{"items":[{"a":1}]},"next":"x"}`, "data.items", "next")
	f.Add(`[1,2]`, "", "a")
	f.Add(`[[{"a":1}]]`, "0", "[1]")
	f.Fuzz(func(t *testing.T, text, rows, next string) {
		p, err1 := ParsePath(rows)
		q, err2 := ParsePath(next)
		if err1 != nil || err2 != nil || len(q) == 0 {
			return
		}
		if _, err := runJSON(t, Options{Rows: p, SampleRows: 2, MaxRecord: 1 << 16}, text, &Capture{Path: q}); err != nil && schemas.CodeOf(err) == schemas.CodeFailed {
			t.Fatalf("an error without a code: %v", err)
		}
	})
}
