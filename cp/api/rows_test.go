package api

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/decimal"
	"github.com/apache/arrow-go/v18/arrow/decimal128"
	"github.com/apache/arrow-go/v18/arrow/decimal256"
	"github.com/apache/arrow-go/v18/arrow/float16"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/schemas"
)

// stream encodes a column through an IPC stream and gives it back to decodeRows, as a runner's result comes.
func stream(t testing.TB, schema *arrow.Schema, batches ...arrow.RecordBatch) []byte {
	t.Helper()
	var out bytes.Buffer
	w := ipc.NewWriter(&out, ipc.WithSchema(schema), ipc.WithZstd())
	for _, b := range batches {
		if err := w.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func asNDJSON(t testing.TB, b []byte) []string {
	t.Helper()
	rec := httptest.NewRecorder()
	lines := &lineWriter{w: rec, control: http.NewResponseController(rec)}
	if err := decodeRows(bytes.NewReader(b), &ndjsonRows{lines: lines}); err != nil {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSuffix(rec.Body.String(), "\n"), "\n")
}

func asCSV(t testing.TB, b []byte) string {
	t.Helper()
	var out bytes.Buffer
	if err := decodeRows(bytes.NewReader(b), newCSVRows(&out, func() error { return nil })); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// column builds an array of one type from JSON values as arrow itself reads them, or by hand.
func column(t testing.TB, typ arrow.DataType, fill func(array.Builder)) arrow.Array {
	t.Helper()
	b := array.NewBuilder(memory.DefaultAllocator, typ)
	defer b.Release()
	fill(b)
	return b.NewArray()
}

func one(t testing.TB, f arrow.Field, a arrow.Array) []byte {
	t.Helper()
	schema := arrow.NewSchema([]arrow.Field{f}, nil)
	return stream(t, schema, array.NewRecordBatch(schema, []arrow.Array{a}, int64(a.Len())))
}

func ts(t testing.TB, s string) arrow.Timestamp {
	t.Helper()
	at, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		t.Fatal(err)
	}
	return arrow.Timestamp(at.UnixNano())
}

// One value of every type, as JSON and as CSV, exactly.
func TestValues(t *testing.T) {
	big128, _ := decimal128.FromString("-12345678901234567890123456789012.345678", 38, 6)
	big256, _ := decimal256.FromString("1234567890123456789012345678901234567890123456789012345678901234567890.123456", 76, 6)
	uuid := arrow.NewMetadata([]string{extensionName, "ARROW:extension:metadata"}, []string{"arrow.uuid", ""})
	uuidBytes := []byte{0x55, 0x0e, 0x84, 0x00, 0xe2, 0x9b, 0x41, 0xd4, 0xa7, 0x16, 0x44, 0x66, 0x55, 0x44, 0x00, 0x00}
	pair := arrow.StructOf(arrow.Field{Name: "a", Type: arrow.PrimitiveTypes.Int64, Nullable: true}, arrow.Field{Name: `b"`, Type: &arrow.Decimal128Type{Precision: 38, Scale: 6}, Nullable: true})
	for name, c := range map[string]struct {
		field     arrow.Field
		fill      func(array.Builder)
		json, csv string
	}{
		"int8":              {arrow.Field{Type: arrow.PrimitiveTypes.Int8}, func(b array.Builder) { b.(*array.Int8Builder).Append(-128) }, `-128`, "-128"},
		"int16":             {arrow.Field{Type: arrow.PrimitiveTypes.Int16}, func(b array.Builder) { b.(*array.Int16Builder).Append(-32768) }, `-32768`, "-32768"},
		"int32":             {arrow.Field{Type: arrow.PrimitiveTypes.Int32}, func(b array.Builder) { b.(*array.Int32Builder).Append(math.MinInt32) }, `-2147483648`, "-2147483648"},
		"int64":             {arrow.Field{Type: arrow.PrimitiveTypes.Int64}, func(b array.Builder) { b.(*array.Int64Builder).Append(math.MinInt64) }, `-9223372036854775808`, "-9223372036854775808"},
		"uint8":             {arrow.Field{Type: arrow.PrimitiveTypes.Uint8}, func(b array.Builder) { b.(*array.Uint8Builder).Append(255) }, `255`, "255"},
		"uint16":            {arrow.Field{Type: arrow.PrimitiveTypes.Uint16}, func(b array.Builder) { b.(*array.Uint16Builder).Append(65535) }, `65535`, "65535"},
		"uint32":            {arrow.Field{Type: arrow.PrimitiveTypes.Uint32}, func(b array.Builder) { b.(*array.Uint32Builder).Append(math.MaxUint32) }, `4294967295`, "4294967295"},
		"uint64":            {arrow.Field{Type: arrow.PrimitiveTypes.Uint64}, func(b array.Builder) { b.(*array.Uint64Builder).Append(math.MaxUint64) }, `18446744073709551615`, "18446744073709551615"},
		"bool":              {arrow.Field{Type: arrow.FixedWidthTypes.Boolean}, func(b array.Builder) { b.(*array.BooleanBuilder).Append(true) }, `true`, "true"},
		"float16":           {arrow.Field{Type: arrow.FixedWidthTypes.Float16}, func(b array.Builder) { b.(*array.Float16Builder).Append(float16.New(1.5)) }, `1.5`, "1.5"},
		"float32":           {arrow.Field{Type: arrow.PrimitiveTypes.Float32}, func(b array.Builder) { b.(*array.Float32Builder).Append(0.1) }, `0.1`, "0.1"},
		"float64":           {arrow.Field{Type: arrow.PrimitiveTypes.Float64}, func(b array.Builder) { b.(*array.Float64Builder).Append(100000000.1) }, `100000000.1`, "100000000.1"},
		"float64 tiny":      {arrow.Field{Type: arrow.PrimitiveTypes.Float64}, func(b array.Builder) { b.(*array.Float64Builder).Append(5e-324) }, `5e-324`, "5e-324"},
		"float64 NaN":       {arrow.Field{Type: arrow.PrimitiveTypes.Float64}, func(b array.Builder) { b.(*array.Float64Builder).Append(math.NaN()) }, `"NaN"`, "NaN"},
		"float64 +Inf":      {arrow.Field{Type: arrow.PrimitiveTypes.Float64}, func(b array.Builder) { b.(*array.Float64Builder).Append(math.Inf(1)) }, `"+Inf"`, "+Inf"},
		"float32 -Inf":      {arrow.Field{Type: arrow.PrimitiveTypes.Float32}, func(b array.Builder) { b.(*array.Float32Builder).Append(float32(math.Inf(-1))) }, `"-Inf"`, "-Inf"},
		"decimal32":         {arrow.Field{Type: &arrow.Decimal32Type{Precision: 9, Scale: 4}}, func(b array.Builder) { b.(*array.Decimal32Builder).Append(decimal.Decimal32(-123456789)) }, `"-12345.6789"`, "-12345.6789"},
		"decimal64":         {arrow.Field{Type: &arrow.Decimal64Type{Precision: 18, Scale: 18}}, func(b array.Builder) { b.(*array.Decimal64Builder).Append(decimal.Decimal64(-1)) }, `"-0.000000000000000001"`, "-0.000000000000000001"},
		"decimal128":        {arrow.Field{Type: &arrow.Decimal128Type{Precision: 38, Scale: 6}}, func(b array.Builder) { b.(*array.Decimal128Builder).Append(big128) }, `"-12345678901234567890123456789012.345678"`, "-12345678901234567890123456789012.345678"},
		"decimal128 scale0": {arrow.Field{Type: &arrow.Decimal128Type{Precision: 38, Scale: 0}}, func(b array.Builder) { b.(*array.Decimal128Builder).Append(decimal128.FromI64(7)) }, `"7"`, "7"},
		"decimal128 scale-": {arrow.Field{Type: &arrow.Decimal128Type{Precision: 38, Scale: -3}}, func(b array.Builder) { b.(*array.Decimal128Builder).Append(decimal128.FromI64(-7)) }, `"-7000"`, "-7000"},
		"decimal256":        {arrow.Field{Type: &arrow.Decimal256Type{Precision: 76, Scale: 6}}, func(b array.Builder) { b.(*array.Decimal256Builder).Append(big256) }, `"1234567890123456789012345678901234567890123456789012345678901234567890.123456"`, "1234567890123456789012345678901234567890123456789012345678901234567890.123456"},
		"utf8":              {arrow.Field{Type: arrow.BinaryTypes.String}, func(b array.Builder) { b.(*array.StringBuilder).Append("ä,\"\n<") }, `"ä,\"\n<"`, "\"ä,\"\"\n<\""},
		"large_utf8":        {arrow.Field{Type: arrow.BinaryTypes.LargeString}, func(b array.Builder) { b.(*array.LargeStringBuilder).Append("x") }, `"x"`, "x"},
		"utf8_view":         {arrow.Field{Type: arrow.BinaryTypes.StringView}, func(b array.Builder) { b.(*array.StringViewBuilder).Append("longer than twelve bytes") }, `"longer than twelve bytes"`, "longer than twelve bytes"},
		"binary":            {arrow.Field{Type: arrow.BinaryTypes.Binary}, func(b array.Builder) { b.(*array.BinaryBuilder).Append([]byte{0, 255}) }, `"AP8="`, "AP8="},
		"large_binary":      {arrow.Field{Type: arrow.BinaryTypes.LargeBinary}, func(b array.Builder) { b.(*array.BinaryBuilder).Append([]byte{0, 255}) }, `"AP8="`, "AP8="},
		"binary_view":       {arrow.Field{Type: arrow.BinaryTypes.BinaryView}, func(b array.Builder) { b.(*array.BinaryViewBuilder).Append([]byte{0, 255}) }, `"AP8="`, "AP8="},
		"fixed_size_binary": {arrow.Field{Type: &arrow.FixedSizeBinaryType{ByteWidth: 16}}, func(b array.Builder) { b.(*array.FixedSizeBinaryBuilder).Append(uuidBytes) }, `"VQ6EAOKbQdSnFkRmVUQAAA=="`, "VQ6EAOKbQdSnFkRmVUQAAA=="},
		"uuid":              {arrow.Field{Type: &arrow.FixedSizeBinaryType{ByteWidth: 16}, Metadata: uuid}, func(b array.Builder) { b.(*array.FixedSizeBinaryBuilder).Append(uuidBytes) }, `"550e8400-e29b-41d4-a716-446655440000"`, "550e8400-e29b-41d4-a716-446655440000"},
		"uuid list": {arrow.Field{Type: arrow.ListOfField(arrow.Field{Name: "item", Type: &arrow.FixedSizeBinaryType{ByteWidth: 16}, Metadata: uuid, Nullable: true})}, func(b array.Builder) {
			l := b.(*array.ListBuilder)
			l.Append(true)
			l.ValueBuilder().(*array.FixedSizeBinaryBuilder).Append(uuidBytes)
			l.ValueBuilder().AppendNull()
		}, `["550e8400-e29b-41d4-a716-446655440000",null]`, `"[""550e8400-e29b-41d4-a716-446655440000"",null]"`},
		"timestamp with zone": {arrow.Field{Type: &arrow.TimestampType{Unit: arrow.Nanosecond, TimeZone: "UTC"}}, func(b array.Builder) {
			b.(*array.TimestampBuilder).Append(ts(t, "2024-02-29T23:59:59.123456789Z"))
		}, `"2024-02-29T23:59:59.123456789Z"`, "2024-02-29T23:59:59.123456789Z"},
		"timestamp with a named zone": {arrow.Field{Type: &arrow.TimestampType{Unit: arrow.Second, TimeZone: "Nowhere/Atlantis"}}, func(b array.Builder) { b.(*array.TimestampBuilder).Append(0) },
			`"1970-01-01T00:00:00Z"`, "1970-01-01T00:00:00Z"},
		"timestamp without zone": {arrow.Field{Type: &arrow.TimestampType{Unit: arrow.Microsecond}}, func(b array.Builder) { b.(*array.TimestampBuilder).Append(-1) },
			`"1969-12-31T23:59:59.999999"`, "1969-12-31T23:59:59.999999"},
		"timestamp far away": {arrow.Field{Type: &arrow.TimestampType{Unit: arrow.Second, TimeZone: "UTC"}}, func(b array.Builder) { b.(*array.TimestampBuilder).Append(253402300800) },
			`"10000-01-01T00:00:00Z"`, "10000-01-01T00:00:00Z"},
		"date32":         {arrow.Field{Type: arrow.FixedWidthTypes.Date32}, func(b array.Builder) { b.(*array.Date32Builder).Append(-1) }, `"1969-12-31"`, "1969-12-31"},
		"date64":         {arrow.Field{Type: arrow.FixedWidthTypes.Date64}, func(b array.Builder) { b.(*array.Date64Builder).Append(86400000) }, `"1970-01-02"`, "1970-01-02"},
		"time32":         {arrow.Field{Type: arrow.FixedWidthTypes.Time32ms}, func(b array.Builder) { b.(*array.Time32Builder).Append(86399999) }, `"23:59:59.999"`, "23:59:59.999"},
		"time64":         {arrow.Field{Type: arrow.FixedWidthTypes.Time64ns}, func(b array.Builder) { b.(*array.Time64Builder).Append(1) }, `"00:00:00.000000001"`, "00:00:00.000000001"},
		"duration":       {arrow.Field{Type: arrow.FixedWidthTypes.Duration_us}, func(b array.Builder) { b.(*array.DurationBuilder).Append(-1500000) }, `"-1500000us"`, "-1500000us"},
		"month interval": {arrow.Field{Type: arrow.FixedWidthTypes.MonthInterval}, func(b array.Builder) { b.(*array.MonthIntervalBuilder).Append(13) }, `{"months":13}`, `"{""months"":13}"`},
		"month day nano": {arrow.Field{Type: arrow.FixedWidthTypes.MonthDayNanoInterval}, func(b array.Builder) {
			b.(*array.MonthDayNanoIntervalBuilder).Append(arrow.MonthDayNanoInterval{Months: 1, Days: -2, Nanoseconds: math.MaxInt64})
		}, `{"months":1,"days":-2,"nanoseconds":9223372036854775807}`, `"{""months"":1,""days"":-2,""nanoseconds"":9223372036854775807}"`},
		"null": {arrow.Field{Type: arrow.Null}, func(b array.Builder) { b.AppendNull() }, `null`, `""`},
		"list of floats": {arrow.Field{Type: arrow.ListOf(arrow.PrimitiveTypes.Float64)}, func(b array.Builder) {
			l := b.(*array.ListBuilder)
			l.Append(true)
			l.ValueBuilder().(*array.Float64Builder).AppendValues([]float64{1, math.NaN()}, nil)
		}, `[1,"NaN"]`, `"[1,""NaN""]"`},
		"empty list": {arrow.Field{Type: arrow.LargeListOf(arrow.PrimitiveTypes.Int64)}, func(b array.Builder) { b.(*array.LargeListBuilder).Append(true) }, `[]`, `[]`},
		"fixed size list": {arrow.Field{Type: arrow.FixedSizeListOf(2, arrow.PrimitiveTypes.Int64)}, func(b array.Builder) {
			l := b.(*array.FixedSizeListBuilder)
			l.Append(true)
			l.ValueBuilder().(*array.Int64Builder).AppendValues([]int64{math.MaxInt64, 2}, nil)
		}, `[9223372036854775807,2]`, `"[9223372036854775807,2]"`},
		"struct": {arrow.Field{Type: pair}, func(b array.Builder) {
			s := b.(*array.StructBuilder)
			s.Append(true)
			s.FieldBuilder(0).AppendNull()
			s.FieldBuilder(1).(*array.Decimal128Builder).Append(big128)
		}, `{"a":null,"b\"":"-12345678901234567890123456789012.345678"}`, `"{""a"":null,""b\"""":""-12345678901234567890123456789012.345678""}"`},
		"map": {arrow.Field{Type: arrow.MapOf(arrow.BinaryTypes.String, arrow.PrimitiveTypes.Int64)}, func(b array.Builder) {
			m := b.(*array.MapBuilder)
			m.Append(true)
			m.KeyBuilder().(*array.StringBuilder).Append("k")
			m.ItemBuilder().(*array.Int64Builder).Append(1)
		}, `[{"key":"k","value":1}]`, `"[{""key"":""k"",""value"":1}]"`},
		"dictionary": {arrow.Field{Type: &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}}, func(b array.Builder) {
			if err := b.(*array.BinaryDictionaryBuilder).AppendString("often"); err != nil {
				t.Fatal(err)
			}
		}, `"often"`, "often"},
		"run end encoded": {arrow.Field{Type: arrow.RunEndEncodedOf(arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.String)}, func(b array.Builder) {
			r := b.(*array.RunEndEncodedBuilder)
			r.Append(1)
			r.ValueBuilder().(*array.StringBuilder).Append("run")
		}, `"run"`, "run"},
		"dense union": {arrow.Field{Type: arrow.DenseUnionOf([]arrow.Field{{Name: "i", Type: arrow.PrimitiveTypes.Int64}, {Name: "s", Type: arrow.BinaryTypes.String}}, []arrow.UnionTypeCode{0, 1})}, func(b array.Builder) {
			u := b.(*array.DenseUnionBuilder)
			u.Append(1)
			u.Child(1).(*array.StringBuilder).Append("second")
		}, `"second"`, "second"},
		"sparse union": {arrow.Field{Type: arrow.SparseUnionOf([]arrow.Field{{Name: "i", Type: arrow.PrimitiveTypes.Int64}, {Name: "s", Type: arrow.BinaryTypes.String}}, []arrow.UnionTypeCode{0, 1})}, func(b array.Builder) {
			u := b.(*array.SparseUnionBuilder)
			u.Append(0)
			u.Child(0).(*array.Int64Builder).Append(7)
			u.Child(1).AppendEmptyValue()
		}, `7`, "7"},
	} {
		t.Run(name, func(t *testing.T) {
			c.field.Name, c.field.Nullable = "v", true
			a := column(t, c.field.Type, c.fill)
			defer a.Release()
			b := one(t, c.field, a)
			lines := asNDJSON(t, b)
			if len(lines) != 2 {
				t.Fatalf("lines %q", lines)
			}
			var row struct{ Row struct{ V json.RawMessage } }
			if err := json.Unmarshal([]byte(lines[1]), &row); err != nil {
				t.Fatalf("%s: %v", lines[1], err)
			}
			if got := compact(t, row.Row.V); got != c.json {
				t.Errorf("JSON %s, want %s", got, c.json)
			}
			if got := asCSV(t, b); got != "v\n"+c.csv+"\n" {
				t.Errorf("CSV %q, want %q", got, c.csv)
			}

			// And NULL of the same type.
			if c.field.Type.ID() == arrow.DENSE_UNION || c.field.Type.ID() == arrow.SPARSE_UNION {
				return // has no NULL of its own
			}
			a = column(t, c.field.Type, func(b array.Builder) { b.AppendNull() })
			defer a.Release()
			if lines := asNDJSON(t, one(t, c.field, a)); lines[1] != `{"type":"row","row":{"v":null}}` {
				t.Errorf("NULL is %s", lines[1])
			}
		})
	}
}

// compact undoes json.Marshal's escapes for HTML.
func compact(t *testing.T, raw json.RawMessage) string {
	t.Helper()
	return strings.NewReplacer(`\u003c`, "<", `\u003e`, ">", `\u0026`, "&").Replace(string(raw))
}

func TestTypeNames(t *testing.T) {
	for want, f := range map[string]arrow.Field{
		"int64":      {Type: arrow.PrimitiveTypes.Int64},
		"arrow.uuid": {Type: &arrow.FixedSizeBinaryType{ByteWidth: 16}, Metadata: arrow.NewMetadata([]string{extensionName}, []string{"arrow.uuid"})},
	} {
		if got := typeName(f); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// Columns of the same name stay apart in JSON, and as they are in CSV.
func TestDuplicateColumnNames(t *testing.T) {
	var fields []arrow.Field
	for _, n := range []string{"x", "x", "x_2", "x", "", ""} {
		fields = append(fields, arrow.Field{Name: n, Type: arrow.PrimitiveTypes.Int64})
	}
	schema := arrow.NewSchema(fields, nil)
	if got := strings.Join(columnNames(schema), ","); got != "x,x_3,x_2,x_4,,_2" {
		t.Errorf("names %s", got)
	}
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	for i := range fields {
		b.Field(i).(*array.Int64Builder).Append(int64(i))
	}
	batch := b.NewRecordBatch()
	defer batch.Release()
	s := stream(t, schema, batch)
	if got := asNDJSON(t, s)[1]; got != `{"type":"row","row":{"x":0,"x_3":1,"x_2":2,"x_4":3,"":4,"_2":5}}` {
		t.Errorf("row %s", got)
	}
	if got := asCSV(t, s); got != "x,x,x_2,x,\"\",\"\"\n0,1,2,3,4,5\n" {
		t.Errorf("CSV %q", got)
	}

	// Many of one name are no work that grows with their square.
	fields = make([]arrow.Field, 50_000)
	for i := range fields {
		fields[i] = arrow.Field{Name: "x", Type: arrow.Null}
	}
	names := columnNames(arrow.NewSchema(fields, nil))
	if names[49_999] != "x_50000" {
		t.Errorf("the last is %s", names[49_999])
	}
}

// What CSV readers make of it is what was there; NULL and the empty text differ, and no record is an empty line.
func TestCSV(t *testing.T) {
	schema := arrow.NewSchema([]arrow.Field{{Name: "a", Type: arrow.BinaryTypes.String, Nullable: true}, {Name: "b", Type: arrow.BinaryTypes.String, Nullable: true}}, nil)
	texts := []string{"plain", "", " lead", "trail ", "a,b", `say "hi"`, "two\nlines", "cr\r", "\ttab", `\.`, "ä€𝄞"}
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	for _, s := range texts {
		b.Field(0).(*array.StringBuilder).Append(s)
		b.Field(1).AppendNull()
	}
	batch := b.NewRecordBatch()
	defer batch.Release()
	got := asCSV(t, stream(t, schema, batch))
	r := csv.NewReader(strings.NewReader(got))
	records, err := r.ReadAll()
	if err != nil || len(records) != len(texts)+1 {
		t.Fatalf("%d records, %v:\n%s", len(records), err, got)
	}
	for i, want := range texts {
		if records[i+1][0] != want || records[i+1][1] != "" {
			t.Errorf("%q, want %q and an empty field", records[i+1], want)
		}
	}
	if !strings.Contains(got, "\n\"\",\n") {
		t.Errorf("NULL and the empty text look the same:\n%s", got)
	}

	single := arrow.Field{Name: "a", Type: arrow.BinaryTypes.String, Nullable: true}
	a := column(t, single.Type, func(b array.Builder) { b.AppendNull() })
	defer a.Release()
	if records, err := csv.NewReader(strings.NewReader(asCSV(t, one(t, single, a)))).ReadAll(); err != nil || len(records) != 2 {
		t.Errorf("a NULL alone gives %q, %v", records, err)
	}
}

// A stream that is not one is an error, whatever it does to the decoder, and allocates no more than a batch may.
func TestBrokenStreams(t *testing.T) {
	f := arrow.Field{Name: "v", Type: arrow.BinaryTypes.String}
	a := column(t, f.Type, func(b array.Builder) { b.(*array.StringBuilder).Append(strings.Repeat("x", 1000)) })
	defer a.Release()
	whole := one(t, f, a)
	discard := newCSVRows(&bytes.Buffer{}, func() error { return nil })
	for name, b := range map[string][]byte{
		"empty":         nil,
		"text":          []byte("SELECT 1\n"),
		"cut in schema": whole[:20],
		"cut in batch":  whole[:len(whole)-40],
		"huge metadata": {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f},
		"two streams":   append(bytes.Clone(whole), whole...),
	} {
		err := decodeRows(bytes.NewReader(b), discard)
		if name == "huge metadata" && (err == nil || !strings.Contains(err.Error(), "metadata of 2147483647 bytes")) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil || !strings.Contains(err.Error(), "not a valid Arrow stream") {
			t.Errorf("%s: %v", name, err)
		}
	}
	mem := &bounded{Allocator: memory.DefaultAllocator}
	half := mem.Allocate(maxLive / 2)
	mem.Free(mem.Reallocate(maxLive/2, half))
	mem.Free(mem.Allocate(maxLive))
	defer func() {
		if recover() == nil {
			t.Error("more was allocated than may be")
		}
	}()
	mem.Allocate(maxLive + 1)
}

func FuzzDecodeRows(f *testing.F) {
	schema := arrow.NewSchema([]arrow.Field{
		{Name: "s", Type: arrow.BinaryTypes.String, Nullable: true},
		{Name: "d", Type: &arrow.Decimal128Type{Precision: 38, Scale: 2}},
		{Name: "l", Type: arrow.ListOf(arrow.PrimitiveTypes.Float64)},
		{Name: "e", Type: &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}},
		{Name: "t", Type: &arrow.TimestampType{Unit: arrow.Nanosecond, TimeZone: "UTC"}},
	}, nil)
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	for i := range b.Fields() {
		b.Field(i).AppendEmptyValue()
		b.Field(i).AppendEmptyValue()
	}
	batch := b.NewRecordBatch()
	defer batch.Release()
	f.Add(stream(f, schema, batch))
	f.Add(stream(f, schema))
	numbers, plain := twoNumbers(f, arrow.PrimitiveTypes.Int64)
	f.Add(reframed(f, numbers, 1, window512M+raw(plain, true)))
	f.Add(reframed(f, numbers, 1, window1K+raw(plain[:8], true)+window8M+raw(plain[8:], true)))
	f.Add([]byte{})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0x10, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		rec := httptest.NewRecorder()
		lines := &lineWriter{w: rec, control: http.NewResponseController(rec)}
		_ = decodeRows(bytes.NewReader(b), &ndjsonRows{lines: lines}) // an error or not: no panic, and valid lines
		for line := range strings.Lines(rec.Body.String()) {
			if !json.Valid([]byte(line)) {
				t.Fatalf("not JSON: %q", line)
			}
		}
		_ = decodeRows(bytes.NewReader(b), newCSVRows(&bytes.Buffer{}, func() error { return nil }))
	})
}

// A result that can't be decoded is told as what it is, though the fetch was cancelled because nobody could take the rest; one
// that was cut short by its fetch keeps the fetch's own end.
func TestAResultThatCannotBeDecoded(t *testing.T) {
	f := arrow.Field{Name: "v", Type: arrow.PrimitiveTypes.Int64}
	a := column(t, f.Type, func(b array.Builder) { b.AppendEmptyValue() })
	defer a.Release()
	whole := one(t, f, a)
	cancelled := dispatch.Outcome{Code: dispatch.OutcomeCancelled, Err: schemas.Errorf(schemas.CodeCancelled, "the fetch was cancelled")}
	for name, c := range map[string]struct {
		chunks  [][]byte
		outcome dispatch.Outcome
		want    string
	}{
		"broken":              {[][]byte{[]byte("this is no Arrow stream"), whole}, cancelled, dispatch.OutcomeFailed},
		"more than a stream":  {[][]byte{whole, whole}, cancelled, dispatch.OutcomeFailed},
		"cut by the fetch":    {[][]byte{whole[:len(whole)/2]}, cancelled, dispatch.OutcomeCancelled},
		"cut by the runner":   {[][]byte{whole[:len(whole)/2]}, dispatch.Outcome{Code: dispatch.OutcomeCompleted}, dispatch.OutcomeFailed},
		"whole":               {[][]byte{whole[:40], whole[40:]}, dispatch.Outcome{Code: dispatch.OutcomeCompleted}, dispatch.OutcomeCompleted},
		"completed with none": {nil, dispatch.Outcome{Code: dispatch.OutcomeCompleted}, dispatch.OutcomeFailed},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				control := http.NewResponseController(w)
				out := newRowAnswer(w, control, mediaCSV, func(w io.Writer) rowWriter { return newCSVRows(w, control.Flush) })
				if c.chunks != nil {
					out.open()
				}
				for _, chunk := range c.chunks {
					_ = out.Chunk(chunk) // an error is what makes the dispatcher cancel
				}
				if err := out.finish(c.outcome); err != nil {
					t.Error(err)
				}
			}))
			defer server.Close()
			resp, err := server.Client().Get(server.URL)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if _, err := io.ReadAll(resp.Body); err != nil {
				t.Fatal(err)
			}
			if got := resp.Trailer.Get("Runbus-Outcome"); got != c.want || resp.Header.Get("Content-Type") != mediaCSV {
				t.Errorf("outcome %q, want %q (%s); %s", got, c.want, resp.Trailer.Get("Runbus-Error"), resp.Header.Get("Content-Type"))
			}
		})
	}
}
