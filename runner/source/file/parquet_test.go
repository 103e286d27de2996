package file

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/deprecated"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
)

// writeRows writes a Parquet file from rows of values by column, as parquet-go takes them.
func writeRows(t testing.TB, schema *parquet.Schema, perGroup int, rows ...parquet.Row) []byte {
	t.Helper()
	var b bytes.Buffer
	w := parquet.NewWriter(&b, schema)
	for i, row := range rows {
		if _, err := w.WriteRows([]parquet.Row{row}); err != nil {
			t.Fatal(err)
		}
		if perGroup > 0 && (i+1)%perGroup == 0 {
			if err := w.Flush(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// flat is one column of one optional type, with the Arrow type, a value and its text.
type flat struct {
	name  string
	node  parquet.Node
	typ   string
	value parquet.Value
	text  string
}

func flats() []flat {
	le := func(n ...uint32) []byte {
		var b []byte
		for _, x := range n {
			b = binary.LittleEndian.AppendUint32(b, x)
		}
		return b
	}
	return []flat{
		{"bool", parquet.Leaf(parquet.BooleanType), "bool", parquet.BooleanValue(true), "true"},
		{"int8", parquet.Int(8), "int8", parquet.Int32Value(-128), "-128"},
		{"int16", parquet.Int(16), "int16", parquet.Int32Value(-32768), "-32768"},
		{"int32", parquet.Int(32), "int32", parquet.Int32Value(math.MinInt32), "-2147483648"},
		{"int64", parquet.Int(64), "int64", parquet.Int64Value(math.MinInt64), "-9223372036854775808"},
		{"uint8", parquet.Uint(8), "uint8", parquet.Int32Value(255), "255"},
		{"uint16", parquet.Uint(16), "uint16", parquet.Int32Value(65535), "65535"},
		{"uint32", parquet.Uint(32), "uint32", parquet.Int32Value(-1), "4294967295"},
		{"uint64", parquet.Uint(64), "uint64", parquet.Int64Value(-1), "18446744073709551615"},
		{"plain32", parquet.Leaf(parquet.Int32Type), "int32", parquet.Int32Value(7), "7"},
		{"float", parquet.Leaf(parquet.FloatType), "float32", parquet.FloatValue(1.5), "1.5"},
		{"double", parquet.Leaf(parquet.DoubleType), "float64", parquet.DoubleValue(math.Inf(-1)), "-Inf"},
		{"text", parquet.String(), "utf8", parquet.ByteArrayValue([]byte("grüße")), "grüße"},
		{"enum", parquet.Enum(), "utf8", parquet.ByteArrayValue([]byte("RED")), "RED"},
		{"json", parquet.JSON(), "utf8", parquet.ByteArrayValue([]byte(`{"a":1}`)), `{"a":1}`},
		{"bson", parquet.BSON(), "binary", parquet.ByteArrayValue([]byte{1, 2}), "AQI="},
		{"bytes", parquet.Leaf(parquet.ByteArrayType), "binary", parquet.ByteArrayValue([]byte{0xff}), "/w=="},
		{"fixed", parquet.Leaf(parquet.FixedLenByteArrayType(3)), "fixed_size_binary[3]", parquet.FixedLenByteArrayValue([]byte("abc")), "YWJj"},
		{"uuid", parquet.UUID(), "fixed_size_binary[16]", parquet.FixedLenByteArrayValue([]byte("0123456789abcdef")), "MDEyMzQ1Njc4OWFiY2RlZg=="},
		{"date", parquet.Date(), "date32", parquet.Int32Value(-1), "1969-12-31"},
		{"timeMs", parquet.Time(parquet.Millisecond), "time32[ms]", parquet.Int32Value(86_399_999), "23:59:59.999"},
		{"timeUs", parquet.Time(parquet.Microsecond), "time64[us]", parquet.Int64Value(1), "00:00:00.000001"},
		{"timeNs", parquet.Time(parquet.Nanosecond), "time64[ns]", parquet.Int64Value(1), "00:00:00.000000001"},
		{"tsMs", parquet.Timestamp(parquet.Millisecond), "timestamp[ms, tz=UTC]", parquet.Int64Value(-1), "1969-12-31T23:59:59.999Z"},
		{"tsUs", parquet.TimestampAdjusted(parquet.Microsecond, false), "timestamp[us]", parquet.Int64Value(1), "1970-01-01T00:00:00.000001"},
		{"tsNs", parquet.Timestamp(parquet.Nanosecond), "timestamp[ns, tz=UTC]", parquet.Int64Value(1), "1970-01-01T00:00:00.000000001Z"},
		{"int96", parquet.Leaf(parquet.Int96Type), "timestamp[ns]", parquet.Int96Value(deprecated.Int96{1, 0, 2440589}), "1970-01-02T00:00:00.000000001"},
		{"dec32", parquet.Decimal(2, 9, parquet.Int32Type), "decimal(9, 2)", parquet.Int32Value(-1234), "-12.34"},
		{"dec64", parquet.Decimal(3, 18, parquet.Int64Type), "decimal(18, 3)", parquet.Int64Value(1001), "1.001"},
		{"decFixed", parquet.Decimal(0, 38, parquet.FixedLenByteArrayType(16)), "decimal(38, 0)", parquet.FixedLenByteArrayValue(bytes.Repeat([]byte{0xff}, 16)), "-1"},
		{"decBytes", parquet.Decimal(1, 20, parquet.ByteArrayType), "decimal(20, 1)", parquet.ByteArrayValue([]byte{0xff, 0x01}), "-25.5"},
		{"interval", parquet.IntervalNode(), "month_day_nano_interval", parquet.FixedLenByteArrayValue(le(14, 3, 1500)), `{"months":14,"days":3,"nanoseconds":1500000000}`},
	}
}

func TestParquetTypes(t *testing.T) {
	f := newFolder(t)
	for _, c := range flats() {
		t.Run(c.name, func(t *testing.T) {
			schema := parquet.NewSchema("x", parquet.Group{"v": parquet.Optional(c.node)})
			f.write("x.parquet", string(writeRows(t, schema, 0, parquet.Row{c.value.Level(0, 1, 0)}, parquet.Row{parquet.NullValue().Level(0, 0, 0)})))
			got, err := f.fetch("path", "x.parquet")
			if err != nil {
				t.Fatal(err)
			}
			if s := got.schema.Field(0).Type.String(); s != c.typ {
				t.Errorf("type %s, want %s", s, c.typ)
			}
			got.want(t, c.text, "∅")
			required := parquet.NewSchema("x", parquet.Group{"v": parquet.Required(c.node)})
			f.write("y.parquet", string(writeRows(t, required, 0, parquet.Row{c.value.Level(0, 0, 0)})))
			if got, err = f.fetch("path", "y.parquet"); err != nil {
				t.Fatal(err)
			}
			got.want(t, c.text)
		})
	}
	f.write("j.parquet", string(writeRows(t, parquet.NewSchema("x", parquet.Group{"j": parquet.JSON(), "u": parquet.UUID()}), 0)))
	got, err := f.fetch("path", "j.parquet")
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"arrow.json", "arrow.uuid"} {
		if name, _ := got.schema.Field(i).Metadata.GetValue("ARROW:extension:name"); name != want {
			t.Errorf("field %d is marked %q, want %q", i, name, want)
		}
	}
}

// nested has each form of nesting.
type nested struct {
	List  []*int64          `parquet:"list,list,optional"`
	Group *inner            `parquet:"group,optional"`
	Map   map[string]*inner `parquet:"map,optional"`
	Many  []inner           `parquet:"many,list"`
	Plain []int32           `parquet:"plain"`
}

type inner struct {
	A int64    `parquet:"a"`
	B *string  `parquet:"b,optional"`
	C []string `parquet:"c,list"`
}

func TestParquetNested(t *testing.T) {
	one, s := int64(1), "x"
	rows := []nested{
		{List: []*int64{&one, nil, &one}, Group: &inner{A: 1, B: &s, C: []string{"p", "q"}}, Map: map[string]*inner{"k": {A: 2, C: []string{"r"}}}, Many: []inner{{A: 1}, {A: 2, B: &s, C: []string{"u", "v"}}}, Plain: []int32{1, 2}},
		{},
		{List: []*int64{}, Group: &inner{}, Map: map[string]*inner{"n": nil}, Many: []inner{}, Plain: []int32{3}},
	}
	var b bytes.Buffer
	w := parquet.NewGenericWriter[nested](&b)
	if _, err := w.Write(rows); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	f := newFolder(t)
	f.write("n.parquet", b.String())
	got, err := f.fetch("path", "n.parquet", "columns", "list,group,map,many,plain")
	if err != nil {
		t.Fatal(err)
	}
	for _, field := range got.schema.Fields() {
		t.Logf("%s: %s", field.Name, field.Type)
	}
	got.want(t,
		`[1,null,1]|{"a":1,"b":"x","c":["p","q"]}|[{"key":"k","value":{"a":2,"b":null,"c":["r"]}}]|[{"a":1,"b":null,"c":[]},{"a":2,"b":"x","c":["u","v"]}]|[1,2]`,
		`∅|∅|∅|[]|[]`,
		`[]|{"a":0,"b":null,"c":[]}|[{"key":"n","value":null}]|[]|[3]`)
	if id := got.schema.Field(2).Type.ID(); id != arrow.MAP {
		t.Errorf("a map is %s", got.schema.Field(2).Type)
	}
}

// The forms of lists that older writers made.
func TestParquetOldLists(t *testing.T) {
	value := func(n int64, rep, def, col int) parquet.Value { return parquet.Int64Value(n).Level(rep, def, col) }
	leaf := parquet.Leaf(parquet.Int64Type)
	cases := []struct {
		name string
		list parquet.Node
		rows []parquet.Row
		want []string
	}{
		{"two levels", annotated{parquet.Group{"element": parquet.Repeated(leaf)}, parquet.List(leaf).Type()}, []parquet.Row{{value(1, 0, 1, 0), value(2, 1, 1, 0)}, {parquet.NullValue().Level(0, 0, 0)}}, []string{"[1,2]", "[]"}},
		{"array", annotated{parquet.Group{"array": parquet.Repeated(parquet.Group{"x": leaf})}, parquet.List(leaf).Type()}, []parquet.Row{{value(1, 0, 1, 0)}}, []string{`[{"x":1}]`}},
		{"tuple", annotated{parquet.Group{"l_tuple": parquet.Repeated(parquet.Group{"x": leaf})}, parquet.List(leaf).Type()}, []parquet.Row{{value(1, 0, 1, 0)}}, []string{`[{"x":1}]`}},
		{"two fields", annotated{parquet.Group{"bag": parquet.Repeated(parquet.Group{"x": leaf, "y": leaf})}, parquet.List(leaf).Type()}, []parquet.Row{{value(1, 0, 1, 0), value(2, 0, 1, 1)}}, []string{`[{"x":1,"y":2}]`}},
		{"other name", annotated{parquet.Group{"bag": parquet.Repeated(parquet.Group{"item": leaf})}, parquet.List(leaf).Type()}, []parquet.Row{{value(1, 0, 1, 0)}}, []string{`[1]`}},
		{"list of lists", parquet.List(parquet.List(leaf)), []parquet.Row{
			{value(1, 0, 2, 0), value(2, 2, 2, 0), value(3, 1, 2, 0)}, {parquet.NullValue().Level(0, 1, 0), value(4, 1, 2, 0)}, {parquet.NullValue().Level(0, 0, 0)}}, []string{"[[1,2],[3]]", "[[],[4]]", "[]"}},
		{"no annotation", parquet.Repeated(parquet.Group{"x": leaf}), []parquet.Row{{value(1, 0, 1, 0), value(2, 1, 1, 0)}}, []string{`[{"x":1},{"x":2}]`}},
	}
	f := newFolder(t)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			f.write("l.parquet", string(writeRows(t, parquet.NewSchema("x", parquet.Group{"l": c.list}), 0, c.rows...)))
			got, err := f.fetch("path", "l.parquet")
			if err != nil {
				t.Fatal(err)
			}
			got.want(t, c.want...)
		})
	}
}

// annotated is a group with the annotation of another node.
type annotated struct {
	parquet.Node
	typ parquet.Type
}

func (a annotated) Type() parquet.Type { return a.typ }

func TestParquetFiles(t *testing.T) {
	f := newFolder(t)
	ab := parquet.NewSchema("x", parquet.Group{"a": parquet.Int(64), "b": parquet.String()})
	row := func(a int64, b string) parquet.Row {
		return parquet.Row{parquet.Int64Value(a).Level(0, 0, 0), parquet.ByteArrayValue([]byte(b)).Level(0, 0, 1)}
	}
	f.write("p/1.parquet", string(writeRows(t, ab, 2, row(1, "x"), row(2, "y"), row(3, "z"))))
	f.write("p/2.parquet", string(writeRows(t, ab, 0, row(4, "w"))))
	got, err := f.fetch("path", "p/*.parquet")
	if err != nil {
		t.Fatal(err)
	}
	got.want(t, "1|x", "2|y", "3|z", "4|w")
	if got, err = f.fetch("path", "p/*.parquet", "columns", "b"); err != nil {
		t.Fatal(err)
	}
	got.want(t, "x", "y", "z", "w")
	_, err = f.fetch("path", "p/*.parquet", "columns", "q")
	wantError(t, err, schemas.CodeBadSource, `"q"`)
	limited, err := f.fetchLimited(context.Background(), source.Limits{MaxRows: 2}, "path", "p/*.parquet")
	if err != nil || len(limited.rows) != 2 || len(limited.notices) != 1 {
		t.Errorf("%q %q %v", limited.rows, limited.notices, err)
	}

	f.write("p/3.parquet", string(writeRows(t, parquet.NewSchema("x", parquet.Group{"a": parquet.Int(64)}), 0, parquet.Row{parquet.Int64Value(5).Level(0, 0, 0)})))
	_, err = f.fetch("path", "p/*.parquet")
	wantError(t, err, schemas.CodeSource, "3.parquet", "lacks b")
	if got, err = f.fetch("path", "p/*.parquet", "union", "true"); err != nil {
		t.Fatal(err)
	}
	got.want(t, "1|x", "2|y", "3|z", "4|w", "5|∅")
	f.write("p/4.parquet", string(writeRows(t, parquet.NewSchema("x", parquet.Group{"a": parquet.String(), "b": parquet.String()}), 0)))
	_, err = f.fetch("path", "p/*.parquet", "union", "true")
	wantError(t, err, schemas.CodeSource, "4.parquet", `"a"`, "utf8", "int64")
}

func TestParquetDamaged(t *testing.T) {
	f := newFolder(t)
	schema := parquet.NewSchema("x", parquet.Group{"a": parquet.String()})
	var rows []parquet.Row
	for i := range 1000 {
		rows = append(rows, parquet.Row{parquet.ByteArrayValue(fmt.Appendf(nil, "value %d", i)).Level(0, 0, 0)})
	}
	good := writeRows(t, schema, 0, rows...)
	cases := map[string][]byte{
		"empty":   nil,
		"text":    []byte("a,b,c\n1,2,3\n4,5,6\n"),
		"cut":     good[:len(good)-100],
		"no head": append([]byte("XXXX"), good[4:]...),
		"footer":  append(good[:len(good)-8:len(good)-8], 0xff, 0xff, 0xff, 0x7f, 'P', 'A', 'R', '1'),
		"page":    flip(good, 30),
	}
	for name, content := range cases {
		f.write("d.parquet", string(content))
		if got, err := f.fetch("path", "d.parquet"); schemas.CodeOf(err) != schemas.CodeSource || !strings.Contains(err.Error(), "d.parquet") {
			t.Errorf("%s: %v, %d rows", name, err, len(got.rows))
		}
	}
	bad := writeRows(t, schema, 0, parquet.Row{parquet.ByteArrayValue([]byte("\xff")).Level(0, 0, 0)})
	f.write("d.parquet", string(bad))
	_, err := f.fetch("path", "d.parquet")
	wantError(t, err, schemas.CodeSource, `column "a"`, "row 1", "UTF-8")
}

func flip(b []byte, at int) []byte {
	b = bytes.Clone(b)
	for i := range 8 {
		b[at+i] ^= 0xff
	}
	return b
}

func TestParquetMemoryIsBounded(t *testing.T) {
	// One row group of 100 MB in pages of 1 MB.
	f := newFolder(t)
	var b bytes.Buffer
	w := parquet.NewWriter(&b, parquet.NewSchema("x", parquet.Group{"a": parquet.String()}), parquet.PageBufferSize(1<<20))
	pad := bytes.Repeat([]byte("x"), 10_000)
	const rows = 10_000
	for i := range rows {
		v := append(fmt.Appendf(nil, "%08d", i), pad...)
		if _, err := w.WriteRows([]parquet.Row{{parquet.ByteArrayValue(v).Level(0, 0, 0)}}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	f.write("big.parquet", b.String())
	b = bytes.Buffer{}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	out := source.NewOutput(discard{}, source.Limits{}, nil)
	if err := New().Fetch(context.Background(), f.env, source.Request{Settings: map[string]string{"path": "big.parquet"}}, out); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if out.Rows() != rows {
		t.Errorf("%d rows", out.Rows())
	}
	if grown := int64(after.HeapSys) - int64(before.HeapSys); grown > 48<<20 {
		t.Errorf("the heap grew by %d MiB for a row group of 100 MB", grown>>20)
	}
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// FuzzParquet: foreign bytes give an error or rows, never a panic.
func FuzzParquet(f *testing.F) {
	schema := parquet.NewSchema("x", parquet.Group{"a": parquet.Optional(parquet.String()), "l": parquet.List(parquet.Leaf(parquet.Int64Type))})
	seed := writeRows(f, schema, 1,
		parquet.Row{parquet.ByteArrayValue([]byte("x")).Level(0, 1, 0), parquet.Int64Value(1).Level(0, 1, 1), parquet.Int64Value(2).Level(1, 1, 1)},
		parquet.Row{parquet.NullValue().Level(0, 0, 0), parquet.NullValue().Level(0, 0, 1)})
	f.Add(seed)
	f.Add(flip(seed, 40))
	f.Add(flip(seed, len(seed)-60))
	for _, c := range flats() {
		f.Add(writeRows(f, parquet.NewSchema("x", parquet.Group{"v": parquet.Optional(c.node)}), 0, parquet.Row{c.value.Level(0, 1, 0)}))
	}
	env := source.Env{}
	f.Fuzz(func(t *testing.T, b []byte) {
		err := openParquet("x.parquet", bytes.NewReader(b), int64(len(b)), env, func(file *parquet.File, top []*node) error {
			var fields []arrow.Field
			for _, n := range top {
				fields = append(fields, n.field())
			}
			schema := arrow.NewSchema(fields, nil)
			j := &job{env: env, out: source.NewOutput(discard{}, source.Limits{MaxRows: 10_000, MaxBytes: 64 << 20}, nil)}
			if err := j.out.Start(schema); err != nil {
				return err
			}
			return j.readParquet(context.Background(), file, top, schema)
		})
		if err != nil && err != source.ErrLimit && schemas.CodeOf(err) == schemas.CodeFailed {
			t.Fatalf("an error without a code: %v", err)
		}
	})
}
