package postgres

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/jackc/pgx/v5"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
)

// typesSetup makes what the cases below need.
const typesSetup = `
	CREATE TYPE mood AS ENUM ('sad', 'so so', 'happy, "very"');
	CREATE DOMAIN cents AS numeric(10,2) CHECK (VALUE > -1000);
	CREATE DOMAIN positive AS cents CHECK (VALUE > 0);
	CREATE DOMAIN pair AS int[] CHECK (cardinality(VALUE) = 2);
	CREATE TYPE point3 AS (x int, label text, at timestamptz);
	CREATE TYPE tsr AS RANGE (subtype = int);`

// typeCases are the values of every type; each is compared to the server's own text. A NULL is added to all of them.
var typeCases = []struct {
	pg     string // the type of the column
	arrow  string
	name   string // postgres.type, if it is not pg
	values []string
}{
	{"boolean", "bool", "", []string{"true", "false"}},
	{"smallint", "int16", "", []string{"-32768", "0", "32767"}},
	{"integer", "int32", "", []string{"-2147483648", "0", "2147483647"}},
	{"bigint", "int64", "", []string{"-9223372036854775808", "0", "9223372036854775807"}},
	{"oid", "uint32", "", []string{"0", "4294967295"}},
	{"xid", "uint32", "", []string{"3", "4294967295"}},
	{"xid8", "uint64", "", []string{"3", "18446744073709551615"}},
	{"real", "float32", "", []string{"NaN", "Infinity", "-Infinity", "-0", "0", "1.1", "3.4028235e38", "1e-45", "16777216", "123456.7", "1234567.8", "0.0001", "0.00001"}},
	{"double precision", "float64", "", []string{"NaN", "Infinity", "-Infinity", "-0", "0", "0.1", "1.7976931348623157e308", "5e-324", "9007199254740993", "123456789012345.6", "1e15", "0.0001", "0.00001"}},
	{"numeric(12,2)", "decimal(12, 2)", "", []string{"0", "0.01", "-0.01", "0.1", "1", "10", "100", "9999.99", "10000", "10000.01", "-9999999999.99", "9999999999.99", "1000000000", "120000.50"}},
	{"numeric(5,5)", "decimal(5, 5)", "", []string{"0.00001", "-0.99999", "0.1", "0"}},
	{"numeric(38,0)", "decimal(38, 0)", "", []string{"99999999999999999999999999999999999999", "-99999999999999999999999999999999999999", "1", "10000000000000000000000000000000000000", "0"}},
	{"numeric(38,38)", "decimal(38, 38)", "", []string{"0.99999999999999999999999999999999999999", "-0.00000000000000000000000000000000000001", "0"}},
	{"numeric(38,19)", "decimal(38, 19)", "", []string{"9999999999999999999.9999999999999999999", "-1.0000000000000000001", "0.5"}},
	{"numeric(39,3)", "decimal256(39, 3)", "", []string{"999999999999999999999999999999999999.999", "-0.001", "0", "12345.6"}},
	{"numeric(76,40)", "decimal256(76, 40)", "", []string{"999999999999999999999999999999999999.9999999999999999999999999999999999999999", "-0.0000000000000000000000000000000000000001"}},
	{"numeric(77,1)", "utf8", "", []string{"1234567890123456789012345678901234567890123456789012345678901234567890123456.7", "NaN"}},
	{"numeric(5,-2)", "decimal(7, 0)", "", []string{"1234567", "-9999900", "149", "0"}},
	{"numeric(2,4)", "decimal(4, 4)", "", []string{"0.0012", "-0.0099"}},
	{"numeric", "utf8", "", []string{"NaN", "Infinity", "-Infinity", "0", "0.000", "-0.1", "1e100", "-1e-100", "123456789.123456789", "0.00001", "10000", "100000000", "99990000.0001", "1e-1000", "12345678901234567890123456789012345678901234567890.5"}},
	{"text", "utf8", "", []string{"", "plain", "NULL", "Žluťoučký kůň 🐎", "tab\tquote\"back\\slash\nline"}},
	{"varchar(20)", "utf8", "character varying(20)", []string{"", "abc"}},
	{"char(5)", "utf8", "character(5)", []string{"ab", ""}},
	{"name", "utf8", "", []string{"pg_class"}},
	{"bytea", "binary", "", []string{"", `\x00ff10`, `\xdeadbeef`}},
	{"uuid", "fixed_size_binary[16]", "", []string{"00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "ffffffff-ffff-ffff-ffff-ffffffffffff"}},
	{"json", "utf8", "", []string{`{"b": 1,  "a": [null, 1.50]}`, `null`, `"x"`}},
	{"jsonb", "utf8", "", []string{`{"b": 1,  "a": [null, 1.50]}`, `null`, `{"ž": "\u0061"}`}},
	{"date", "date32", "", []string{"1970-01-01", "2000-02-29", "1969-12-31", "0001-01-01", "0001-12-31 BC", "4713-01-01 BC", "9999-12-31", "10000-01-01", "5874897-12-31"}},
	{"time", "time64[us]", "time without time zone", []string{"00:00:00", "23:59:59.999999", "12:30:00.5"}},
	{"timestamp", "timestamp[us]", "timestamp without time zone", []string{"1970-01-01 00:00:00", "1969-12-31 23:59:59.999999", "2024-02-29 12:00:00.123456", "0001-01-01 00:00:00 BC", "4713-01-01 00:00:00 BC", "294246-12-31 23:59:59.999999"}},
	{"timestamptz", "timestamp[us, tz=UTC]", "timestamp with time zone", []string{"1970-01-01 00:00:00+00", "2024-03-31 02:30:00+02", "2024-06-15 12:00:00.000001-11:30", "0044-03-15 12:00:00+00 BC", "294246-12-31 23:59:59+00"}},
	{"timestamp(0)", "timestamp[us]", "timestamp(0) without time zone", []string{"2024-02-29 12:00:00.6"}},
	{"interval", "month_day_nano_interval", "", []string{"0", "1 year 2 mons 3 days 04:05:06.789", "-1 mons +1 day", "-1 years -2 mons +3 days -04:05:06", "1 day -00:00:01", "-1 day +00:00:01", "2562047:47:16.854", "178000000 years", "-1 day", "1 mon"}},
	{"mood", "utf8", "", []string{"sad", `happy, "very"`}},
	{"cents", "decimal(10, 2)", "numeric(10,2)", []string{"12.34", "-999.99"}},
	{"positive", "decimal(10, 2)", "numeric(10,2)", []string{"0.01"}},
	{"pair", "list<item: int32, nullable>", "integer[]", []string{"{1,2}"}},
	// By the server's own text.
	{"timetz", "utf8", "time with time zone", []string{"12:00:00+02", "24:00:00-15:59"}},
	{"money", "utf8", "", []string{"$1,234.56", "-$0.01"}},
	{"bit(5)", "utf8", "", []string{"10101"}},
	{"bit varying", "utf8", "", []string{"", "1"}},
	{"inet", "utf8", "", []string{"10.0.0.1/8", "::1"}},
	{"cidr", "utf8", "", []string{"10.0.0.0/8"}},
	{"macaddr", "utf8", "", []string{"08:00:2b:01:02:03"}},
	{"int4range", "utf8", "", []string{"[1,10)", "empty", "(,)"}},
	{"tsr", "utf8", "", []string{"[1,2]"}},
	{"int4multirange", "utf8", "", []string{"{[1,3),[5,7)}"}},
	{"point", "utf8", "", []string{"(1.5,-2)"}},
	{"point3", "utf8", "", []string{`(1,"a, b","2024-01-01 00:00:00+00")`, "(,,)"}},
	{"tsvector", "utf8", "", []string{"'cat':3 'fat':2"}},
	{"xml", "utf8", "", []string{"<a>1</a>"}},
	{`"char"`, "utf8", "", []string{"x"}},
	{"regclass", "utf8", "", []string{"pg_class"}},
	{"pg_lsn", "utf8", "", []string{"16/B374D848"}},
	{"point3[]", "utf8", "", []string{`{"(1,a,)",NULL}`}},
	{"inet[]", "utf8", "", []string{"{10.0.0.1,NULL}"}},
	// Arrays.
	{"boolean[]", "list<item: bool, nullable>", "", []string{"{t,f,NULL}", "{}"}},
	{"smallint[]", "list<item: int16, nullable>", "", []string{"{-1,NULL,1}"}},
	{"integer[]", "list<item: int32, nullable>", "", []string{"{}", "{1,NULL,3}", "{NULL}", "{-2147483648,2147483647}"}},
	{"bigint[]", "list<item: int64, nullable>", "", []string{"{1,NULL,9223372036854775807}"}},
	{"real[]", "list<item: float32, nullable>", "", []string{"{NaN,1.5,NULL,-Infinity}"}},
	{"double precision[]", "list<item: float64, nullable>", "", []string{"{NaN,1.5,NULL,-0,Infinity}"}},
	{"numeric(6,2)[]", "list<item: decimal(6, 2), nullable>", "", []string{"{1.25,NULL,-0.01}"}},
	{"numeric[]", "list<item: utf8, nullable>", "", []string{"{1.250,NULL,NaN,Infinity}"}},
	{"text[]", "list<item: utf8, nullable>", "", []string{`{a,"",NULL,"NULL","b c","d\"e","f\\g","{,}"}`}},
	{"varchar(3)[]", "list<item: utf8, nullable>", "character varying(3)[]", []string{"{abc,NULL}"}},
	{"char(3)[]", "list<item: utf8, nullable>", "character(3)[]", []string{"{ab,NULL}"}},
	{"bytea[]", "list<item: binary, nullable>", "", []string{`{"\\x00ff",NULL,"\\x"}`}},
	{"uuid[]", "list<item: fixed_size_binary[16], nullable>", "", []string{"{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11,NULL}"}},
	{"json[]", "list<item: utf8, nullable>", "", []string{`{"{\"a\": 1}",NULL}`}},
	{"jsonb[]", "list<item: utf8, nullable>", "", []string{`{"{\"a\": 1}",NULL}`}},
	{"date[]", "list<item: date32, nullable>", "", []string{`{1970-01-01,NULL,"0001-12-31 BC"}`}},
	{"time[]", "list<item: time64[us], nullable>", "time without time zone[]", []string{"{12:30:00.5,NULL}"}},
	{"timestamp[]", "list<item: timestamp[us], nullable>", "timestamp without time zone[]", []string{`{"2024-02-29 12:00:00.123456",NULL}`}},
	{"timestamptz[]", "list<item: timestamp[us, tz=UTC], nullable>", "timestamp with time zone[]", []string{`{"2024-02-29 12:00:00.123456+00",NULL}`}},
	{"interval[]", "list<item: month_day_nano_interval, nullable>", "", []string{`{"1 mon -1 days +00:00:01",NULL}`}},
	{"mood[]", "list<item: utf8, nullable>", "", []string{`{sad,"happy, \"very\"",NULL}`}},
	{"positive[]", "list<item: decimal(10, 2), nullable>", "", []string{"{1.50,NULL}"}},
	{"integer[][]", "list<item: list<item: int32, nullable>, nullable>", "integer[]", []string{"{}", "{{1,NULL,3},{4,5,6}}"}},
	{"text[][][]", "list<item: list<item: list<item: utf8, nullable>, nullable>, nullable>", "text[]", []string{`{{{a,"b c"},{NULL,d}}}`}},
}

// Every type comes through as the server itself writes it (issue 2; SPEC F1).
func TestTypesAgainstTheServersText(t *testing.T) {
	admin := ownDatabase(t, "types", "UTF8")
	exec(t, admin, typesSetup)
	for i, c := range typeCases {
		t.Run(c.pg, func(t *testing.T) {
			table := fmt.Sprintf("types_%d", i)
			exec(t, admin, fmt.Sprintf("CREATE TABLE %s (n serial, v %s)", table, c.pg))
			for _, v := range c.values {
				exec(t, admin, fmt.Sprintf("INSERT INTO %s (v) VALUES ('%s')", table, strings.ReplaceAll(v, "'", "''")))
			}
			exec(t, admin, fmt.Sprintf("INSERT INTO %s (v) VALUES (NULL)", table))
			r := must(t, request(shared, "SELECT v FROM "+table+" ORDER BY n", "database", "types"))
			want := textOf(t, admin, "SELECT v FROM "+table+" ORDER BY n")
			f := r.schema.Field(0)
			if got := f.Type.String(); got != c.arrow {
				t.Errorf("the Arrow type is %s, want %s", got, c.arrow)
			}
			name := c.name
			if name == "" {
				name = c.pg
			}
			if got, _ := f.Metadata.GetValue(TypeMetadata); got != name {
				t.Errorf("the metadata says %q, want %q", got, name)
			}
			if int(r.rows()) != len(want) {
				t.Fatalf("%d rows, want %d", r.rows(), len(want))
			}
			row := 0
			for _, b := range r.batches {
				for i := range int(b.NumRows()) {
					got := "NULL"
					if b.Column(0).IsValid(i) {
						got = "=" + format(t, b.Column(0), i)
					}
					if got != want[row] {
						t.Errorf("row %d is %s, the server writes %s", row, got, want[row])
					}
					row++
				}
			}
		})
	}
}

// ownDatabase makes a database and connects to it, in the formats that the cases are written in.
func ownDatabase(t testing.TB, name, encoding string) *pgx.Conn {
	t.Helper()
	shared.Exec(t, fmt.Sprintf("CREATE DATABASE %s ENCODING '%s' TEMPLATE template0", name, encoding))
	t.Cleanup(func() {
		if err := execCleanup("DROP DATABASE " + name + " WITH (FORCE)"); err != nil {
			t.Error(err)
		}
	})
	config, err := pgx.ParseConfig(strings.Replace(shared.ConnString(), "dbname=postgres", "dbname="+name, 1))
	if err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return conn
}

func exec(t testing.TB, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.PgConn().Exec(t.Context(), sql).ReadAll(); err != nil {
		t.Fatalf("%v\nin: %s", err, sql)
	}
}

// textOf is the first column of a query in the server's text format: NULL, or the text after a =.
func textOf(t testing.TB, conn *pgx.Conn, sql string) []string {
	t.Helper()
	results, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
	if err != nil {
		t.Fatalf("%v\nin: %s", err, sql)
	}
	var texts []string
	for _, row := range results[0].Rows {
		if row[0] == nil {
			texts = append(texts, "NULL")
		} else {
			texts = append(texts, "="+string(row[0]))
		}
	}
	return texts
}

// What Arrow can't hold is an error that names the column and what to do, never another value.
func TestValuesArrowCannotHold(t *testing.T) {
	shared.Exec(t, "CREATE TABLE matrix (flat int[]); INSERT INTO matrix VALUES ('{{1,2},{3,4}}')")
	t.Cleanup(func() { dropTable(t, "matrix") })
	for query, want := range map[string]string{
		`SELECT 'infinity'::date AS "a ""b"`:         `infinity`,
		`SELECT '-infinity'::date AS c`:              `-infinity`,
		`SELECT 'infinity'::timestamptz AS c`:        `infinity`,
		`SELECT '-infinity'::timestamp AS c`:         `-infinity`,
		`SELECT '294270-01-01'::timestamp AS c`:      `too late`,
		`SELECT '24:00:00'::time AS c`:               `24:00:00`,
		`SELECT '9000000:00:00'::interval AS c`:      `292 years`,
		`SELECT 'NaN'::numeric(5,2) AS c`:            `NaN`,
		`SELECT 'NaN'::numeric(50,2) AS c`:           `NaN`,
		`SELECT ARRAY['infinity'::date] AS c`:        `infinity`,
		`SELECT flat AS c FROM matrix`:               `2 dimensions`,
		`SELECT ARRAY[[1,2],[3,4]] AS c`:             `2 dimensions`,
		`SELECT 1, 'x', NULL, 'infinity'::date AS c`: `"c"`,
		`SELECT (CASE WHEN i = 50000 THEN 'NaN'::numeric ELSE i END)::numeric(9,2) AS c FROM generate_series(1, 100000) i`: `NaN`,
	} {
		r := fetchAll(t.Context(), t, request(shared, query), source.Limits{})
		var e *schemas.Error
		if !asError(r.err, &e) || e.Code != schemas.CodeSource || !strings.Contains(e.Message, want) || !strings.Contains(e.Message, "column ") {
			t.Errorf("%s: %v; want a %s about its column and %q", query, r.err, schemas.CodeSource, want)
			continue
		}
		if !strings.Contains(e.Hint, "::text") {
			t.Errorf("%s: the hint is %q", query, e.Hint)
		}
	}
	// And as text they come through.
	r := must(t, request(shared, `SELECT 'infinity'::date::text, 'NaN'::numeric(5,2)::numeric, ARRAY[[1,2],[3,4]]::text`))
	for i, want := range []string{"infinity", "NaN", "{{1,2},{3,4}}"} {
		if got := r.batches[0].Column(i).(*array.String).Value(0); got != want {
			t.Errorf("column %d is %q, want %q", i, got, want)
		}
	}
}

func TestExtensionTypes(t *testing.T) {
	r := must(t, request(shared, `SELECT '{}'::json AS j, '{}'::jsonb AS b, gen_random_uuid() AS u, ARRAY[gen_random_uuid()] AS l, 'x' AS t`))
	name := func(f arrow.Field) string {
		v, _ := f.Metadata.GetValue("ARROW:extension:name")
		return v
	}
	list := r.schema.Field(3).Type.(*arrow.ListType).ElemField()
	for i, want := range []string{"arrow.json", "arrow.json", "arrow.uuid", "", ""} {
		if got := name(r.schema.Field(i)); got != want {
			t.Errorf("column %s has the extension %q, want %q", r.schema.Field(i).Name, got, want)
		}
	}
	if got := name(list); got != "arrow.uuid" {
		t.Errorf("the items of a list of UUIDs have the extension %q", got)
	}
}

func TestArrayLowerBoundIsNoticed(t *testing.T) {
	r := must(t, request(shared, `SELECT a FROM (VALUES ('[0:2]={1,2,3}'::int[]), ('[5:5]={9}')) v(a)`))
	if got := format(t, r.batches[0].Column(0), 0); got != "{1,2,3}" {
		t.Errorf("got %s", got)
	}
	if n := r.out.Notices(); len(n) != 1 || !strings.Contains(n[0].GetMessage(), `"a"`) || !strings.Contains(n[0].GetMessage(), "lower bounds") {
		t.Errorf("the notices are %v", n)
	}
}

func TestTextWithoutEncoding(t *testing.T) {
	admin := ownDatabase(t, "bare", "SQL_ASCII")
	exec(t, admin, `CREATE TABLE words (w text); INSERT INTO words VALUES ('kůň')`)
	r := must(t, request(shared, "SELECT w FROM words", "database", "bare"))
	if got := r.batches[0].Column(0).(*array.String).Value(0); got != "kůň" {
		t.Errorf("got %q", got)
	}
	exec(t, admin, `INSERT INTO words VALUES (E'k\xf9')`)
	bad := fetchAll(t.Context(), t, request(shared, "SELECT w FROM words", "database", "bare"), source.Limits{})
	if bad.err == nil || !strings.Contains(bad.err.Error(), "22021") { // the server itself checks
		t.Errorf("got %v", bad.err)
	}
	latin := ownDatabase(t, "latin", "LATIN1")
	exec(t, latin, `CREATE TABLE words (w text); INSERT INTO words VALUES (U&'fa\00E7ade')`)
	r = must(t, request(shared, "SELECT w FROM words", "database", "latin"))
	if got := r.batches[0].Column(0).(*array.String).Value(0); got != "façade" {
		t.Errorf("got %q", got)
	}
	odd := fetchAll(t.Context(), t, request(shared, "SELECT set_config('client_encoding', 'LATIN1', true), w FROM words", "database", "latin"), source.Limits{})
	if odd.err == nil || !strings.Contains(odd.err.Error(), "not UTF-8") {
		t.Errorf("got %v", odd.err)
	}
}

func TestShapesOfResults(t *testing.T) {
	for query, want := range map[string][2]int64{ // rows, columns
		"SELECT 1 WHERE false":                  {0, 1},
		"SELECT":                                {1, 0},
		"SELECT FROM generate_series(1, 40000)": {40000, 0},
		"SELECT 1 AS a, 2 AS a, 3":              {1, 3},
		"SELECT 1;":                             {1, 1},
		"SHOW server_version":                   {1, 1},
		"EXPLAIN SELECT 1":                      {1, 1},
		"WITH x AS (SELECT 1) SELECT * FROM x":  {1, 1},
		"SELECT i, NULL::numeric(70,2) FROM generate_series(1, 100000) i":                                 {100000, 2},
		"SELECT repeat('x', 3000000), i FROM generate_series(1, 3) i -- large rows":                       {3, 2},
		"SELECT " + strings.TrimSuffix(strings.Repeat("1,", 1600), ",") + " FROM generate_series(1, 100)": {100, 1600},
	} {
		r := must(t, request(shared, query))
		if r.rows() != want[0] || int64(r.schema.NumFields()) != want[1] {
			t.Errorf("%.60s: %d rows of %d columns, want %v", query, r.rows(), r.schema.NumFields(), want)
		}
	}
}
