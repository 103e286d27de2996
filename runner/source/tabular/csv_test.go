package tabular

import (
	"encoding/csv"
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

func TestCSVTypes(t *testing.T) {
	cases := []struct{ name, values, want string }{
		{"int", "1\n-7\n9223372036854775807", "int64"},
		{"beyond int64", "1\n9223372036854775808\n-99999999999999999999999999999999999999", "decimal(38, 0)"},
		{"beyond 38 digits", "1\n999999999999999999999999999999999999999", "utf8"},
		{"leading zero", "1\n007", "utf8"},
		{"minus leading zero", "-07", "utf8"},
		{"plus", "+491234", "utf8"},
		{"zero", "0\n1", "int64"},
		{"minus zero", "-0", "float64"},
		{"float", "1\n1.5\n-.5\n2e3\nNaN\n-Inf", "float64"},
		{"float exact 17 digits", "0.10000000000000001\n1.7976931348623157e308", "float64"},
		{"float loses digits", "0.1234567890123456789", "utf8"},
		{"float beyond range", "1e999", "utf8"},
		{"float underflow", "1e-999", "utf8"},
		{"wide integer among fractions", "9007199254740993\n1.5", "utf8"},
		{"bool", "true\nFALSE\nTrue", "bool"},
		{"bool and int", "true\n1", "utf8"},
		{"thousands", "1,000", "utf8"},
		{"underscore", "1_000", "utf8"},
		{"hex", "0x10", "utf8"},
		{"date", "2024-02-29\n0001-01-01\n9999-12-31", "date32"},
		{"no such date", "2023-02-29", "utf8"},
		{"time of day", "10:00:00", "utf8"},
		{"timestamp", "2024-02-29 10:00:00.5\n2024-02-29T10:00", "timestamp[us]"},
		{"timestamp with zone", "2024-02-29T10:00:00Z\n2024-02-29 10:00:00+0130\n2024-02-29 10:00:00-03", "timestamp[us, tz=UTC]"},
		{"nanoseconds", "2024-02-29T10:00:00.123456789Z", "timestamp[ns, tz=UTC]"},
		{"nanoseconds out of range", "2024-02-29T10:00:00.123456789Z\n9999-01-01T00:00:00Z", "utf8"},
		{"ten digits of fraction", "2024-02-29T10:00:00.1234567891Z", "utf8"},
		{"zone and none", "2024-02-29T10:00:00Z\n2024-02-29T10:00:00", "utf8"},
		{"date and timestamp", "2024-02-29\n2024-02-29T10:00:00", "utf8"},
		{"leap second", "2016-12-31T23:59:60Z", "utf8"},
		{"nothing", "\n", "utf8"},
		{"null and int", "\n1", "int64"},
		{"space", " 1", "utf8"},
		{"word", "x", "utf8"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var text strings.Builder
			w := csv.NewWriter(&text)
			for _, row := range append([]string{"a"}, strings.Split(c.values, "\n")...) {
				if err := w.Write([]string{row, "x"}); err != nil {
					t.Fatal(err)
				}
			}
			w.Flush()
			got, err := runCSV(t, Options{Header: true}, text.String())
			if err != nil {
				t.Fatal(err)
			}
			if got.columns[0] != "a:"+c.want {
				t.Fatalf("column is %s, want a:%s", got.columns[0], c.want)
			}
			if c.want != "utf8" {
				return
			}
			for i, v := range strings.Split(c.values, "\n") { // text keeps every byte
				if v == "" {
					v = "∅"
				}
				if got.rows[i][0] != v {
					t.Errorf("row %d is %q, want %q", i, got.rows[i][0], v)
				}
			}
		})
	}
}

func TestCSVValues(t *testing.T) {
	got, err := runCSV(t, Options{Header: true}, "\xef\xbb\xbfi,f,b,d,ts,tz,s\r\n"+
		"1,1.50,TRUE,1969-12-31,1969-12-31 23:59:59.999999,2024-03-31T02:30:00+02:00,\"a,\"\"b\"\"\r\nc\"\r\n"+
		",,,,,,\r\n"+
		"\"2\",\"-2\",\"false\",\"\",\"\",\"\",\"\"\r\n"+
		"\r\n"+
		"3,1e-3,false,2000-02-29,2000-02-29T00:00,2024-01-01 00:00:00Z,5\" disk")
	if err != nil {
		t.Fatal(err)
	}
	want := lines3("i:int64 f:float64 b:bool d:date32 ts:timestamp[us] tz:timestamp[us, tz=UTC] s:utf8",
		"1|1.5|true|1969-12-31|1969-12-31T23:59:59.999999|2024-03-31T00:30:00Z|a,\"b\"\r\nc",
		"∅|∅|∅|∅|∅|∅|∅",
		"2|-2|false|∅|∅|∅|",
		"3|0.001|false|2000-02-29|2000-02-29T00:00:00|2024-01-01T00:00:00Z|5\" disk")
	if got.String() != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}

func TestCSVNullText(t *testing.T) {
	got, err := runCSV(t, Options{Header: true, NullText: "NA"}, "a,b\nNA,NA\n\"NA\",1\n,\n")
	if err != nil {
		t.Fatal(err)
	}
	if want := lines3("a:utf8 b:int64", "∅|∅", "NA|1", "|∅"); got.String() != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
	// A lone null in a table of two columns is a ragged row, not an empty line.
	if _, err := runCSV(t, Options{Header: true, NullText: "NA"}, "a,b\nNA\n"); err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("a ragged row of one null gives %v", err)
	}
	one, err := runCSV(t, Options{Header: true}, "a\n1\n\n2\n")
	if err != nil || len(one.rows) != 3 || one.rows[1][0] != "∅" {
		t.Errorf("an empty line in one column: %v %v", one.rows, err)
	}
}

func TestCSVDialects(t *testing.T) {
	cases := []struct {
		name string
		o    Options
		text string
		want string
	}{
		{"no header", Options{}, "1,x\n2,y\n", lines3("c1:int64 c2:utf8", "1|x", "2|y")},
		{"semicolon", Options{Header: true, Delimiter: ';'}, "a;b\n1,5;2\n", lines3("a:utf8 b:int64", "1,5|2")},
		{"single quotes", Options{Header: true, Quote: '\''}, "a,b\n'x,''y',\"z\n", lines3("a:utf8 b:utf8", "x,'y|\"z")},
		{"no quotes", Options{Header: true, NoQuote: true, Delimiter: '\t'}, "a\tb\n\"x\t1\n", lines3("a:utf8 b:int64", "\"x|1")},
		{"columns", Options{Header: true, Columns: []string{"c", "a"}}, "a,b,c\n1,2,3\n", lines3("c:int64 a:int64", "3|1")},
		{"all text", Options{Header: true, AllText: true}, "a,b\n1,2024-01-01\n,\"\"\n", lines3("a:utf8 b:utf8", "1|2024-01-01", "∅|")},
		{"types", Options{Header: true, Types: map[string]Type{"a": {kind: kindText}, "b": {kind: kindDecimal, precision: 6, scale: 2}, "c": {kind: kindFloat}, "d": {kind: kindJSON}, "e": {kind: kindInt}}},
			"a,b,c,d,e\n1,-12.30,0.1234567890123456789,\"{\"\"k\"\": 1}\",007\n", lines3("a:utf8 b:decimal(6, 2) c:float64 d:arrow.json e:int64", "1|-12.3|0.12345678901234568|{\"k\": 1}|7")},
		{"header only", Options{Header: true}, "a,b\n", lines3("a:utf8 b:utf8")},
		{"empty", Options{Header: true}, "", lines3("")},
		{"names", Options{Header: true}, "a,,a,a_2\n1,2,3,4\n", lines3("a:int64 column_2:int64 a_3:int64 a_2:int64", "1|2|3|4")},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got, err := runCSV(t, c.o, c.text)
			if err != nil {
				t.Fatal(err)
			}
			if got.String() != c.want {
				t.Errorf("got:\n%s\nwant:\n%s", got, c.want)
			}
			if c.name == "names" && len(got.notices) != 2 {
				t.Errorf("renamed columns are told in %d notices: %q", len(got.notices), got.notices)
			}
		})
	}
}

func TestCSVErrors(t *testing.T) {
	long := strings.Repeat("x", 300)
	cases := []struct {
		name string
		o    Options
		text string
		want []string
	}{
		{"ragged", Options{Header: true}, "a,b\n1,2\n\"x\ny\",2\n1\n", []string{"x.csv, line 5", "1 fields", "header has 2"}},
		{"too wide", Options{}, "1,2\n1,2,3\n", []string{"line 2", "3 fields", "first row has 2"}},
		{"open quote", Options{Header: true}, "a\n1\n\"x\ny\n", []string{"line 3", "never closed"}},
		{"behind quote", Options{Header: true}, "a,b\n1,\"x\"y\n", []string{"line 2", "field 2", "closing quote"}},
		{"NUL", Options{Header: true}, "a\nx\x00y\n", []string{"line 2", "NUL"}},
		{"UTF-16", Options{Header: true}, "\xff\xfea\x00", []string{"UTF-16"}},
		{"latin1", Options{Header: true}, "a\nok\nM\xfcller\n", []string{"line 3", "invalid UTF-8", "byte 2"}},
		{"latin1 in quotes", Options{Header: true}, "a\n\"ok\nM\xfcller\"\n", []string{"line 3", "invalid UTF-8"}},
		{"bare CR", Options{Header: true}, "a\rb\rc\n", []string{"line 1", "carriage return"}},
		{"long line", Options{Header: true, MaxRecord: 200}, "a\n1\n" + long + "\n", []string{"line 3", "longer than 200"}},
		{"long quoted", Options{Header: true, MaxRecord: 200}, "a\n\"" + strings.Repeat("x\n", 200) + "\"\n", []string{"line 2", "longer than 200"}},
		{"misfit", Options{Header: true, SampleRows: 2}, "a,b\n1,2\n3,4\n5,x\n", []string{"line 4", `column "b"`, `"x"`, "int64", "first 2 rows"}},
		{"late leading zero", Options{Header: true, SampleRows: 1}, "a\n1\n007\n", []string{"line 3", `"007"`}},
		{"late fraction", Options{Header: true, SampleRows: 1}, "a\n1\n1.0\n", []string{"line 3"}},
		{"late precision", Options{Header: true, SampleRows: 1}, "a\n1.5\n0.1234567890123456789\n", []string{"line 3"}},
		{"late wide integer", Options{Header: true, SampleRows: 1}, "a\n1.5\n9007199254740993\n", []string{"line 3"}},
		{"late nanoseconds", Options{Header: true, SampleRows: 1}, "a\n2024-01-01T00:00:00Z\n2024-01-01T00:00:00.0000001Z\n", []string{"line 3"}},
		{"set type", Options{Header: true, Types: map[string]Type{"a": {kind: kindInt}}}, "a\nx\n", []string{"line 2", "types setting"}},
		{"set decimal", Options{Header: true, Types: map[string]Type{"a": {kind: kindDecimal, precision: 4, scale: 2}}}, "a\n1.234\n", []string{"line 2", "decimal(4, 2)"}},
		{"unknown type column", Options{Header: true, Types: map[string]Type{"z": {kind: kindInt}}}, "a\n1\n", []string{`"z"`}},
		{"no such column", Options{Header: true, Columns: []string{"z"}}, "a\n1\n", []string{`no column "z"`}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			_, err := runCSV(t, c.o, c.text)
			if err == nil {
				t.Fatal("no error")
			}
			if code := schemas.CodeOf(err); code != schemas.CodeSource && code != schemas.CodeBadSource {
				t.Errorf("code %s", code)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q lacks %q", err, w)
				}
			}
		})
	}
}

func TestCSVManyLines(t *testing.T) {
	// Lines longer than the read buffer, and quoted fields over many lines, in one text.
	long := strings.Repeat("é", 100_000)
	quoted := strings.Repeat("line \"\"x\"\"\n", 20_000)
	got, err := runCSV(t, Options{Header: true}, "a,b\n"+long+",\""+quoted+"\"\nlast,row\n")
	if err != nil {
		t.Fatal(err)
	}
	if got.rows[0][0] != long || got.rows[0][1] != strings.ReplaceAll(quoted, `""`, `"`) || got.rows[1][1] != "row" {
		t.Error("a long record came out changed")
	}
}

// FuzzCSV compares with the standard library where both accept, and looks for panics else.
func FuzzCSV(f *testing.F) {
	for _, s := range []string{"a,b\n1,2\n", "a\n\"x\"\"y\"\n", "a,b\n\"1\n2\",3\r\n\n4,5", "\xef\xbb\xbfa\n1", "a\n\x00", "a\n\"", "a,a,\n1,2,3\n", "a\n2024-01-01T00:00:00.5+01:00\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, err := runCSV(t, Options{Header: true, AllText: true, MaxRecord: 1 << 16}, text)
		if _, err := runCSV(t, Options{Header: true, SampleRows: 2, MaxRecord: 1 << 16}, text); err != nil && schemas.CodeOf(err) == schemas.CodeFailed {
			t.Fatalf("an error without a code: %v", err)
		}
		if err != nil || strings.Contains(text, "\r") {
			return
		}
		r := csv.NewReader(strings.NewReader(strings.TrimPrefix(text, "\xef\xbb\xbf")))
		records, err := r.ReadAll()
		if err != nil || len(records) == 0 || len(records[0]) < 2 || len(records)-1 != len(got.rows) {
			if err == nil && len(records) > 0 && len(records[0]) > 1 {
				t.Fatalf("%d rows, encoding/csv has %d", len(got.rows), len(records)-1)
			}
			return
		}
		for i, row := range records[1:] {
			for k, v := range row {
				if g := got.rows[i][k]; g != v && (g != "∅" || v != "") {
					t.Fatalf("row %d field %d is %q, encoding/csv has %q", i, k, g, v)
				}
			}
		}
	})
}
