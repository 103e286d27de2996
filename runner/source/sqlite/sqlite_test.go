package sqlite

import (
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	sqlite3 "modernc.org/sqlite/lib"

	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/sourcetest"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

func TestMain(m *testing.M) { leak.Main(m) }

const manyRows = sourcetest.MinManyRows + 1000

// database makes a file with the statements run on it, and roots above it.
func database(t *testing.T, statements ...string) (path string, roots *source.Roots) {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(dir, "test.db")
	execute(t, path, statements...)
	roots, err = source.OpenRoots(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = roots.Close() })
	return path, roots
}

func execute(t *testing.T, path string, statements ...string) {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	for _, s := range statements {
		if _, err := db.ExecContext(t.Context(), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

var content = []string{
	`CREATE TABLE t (i INTEGER, r REAL, s TEXT, b BLOB, f BOOLEAN, d DATE, ts DATETIME, tz TIMESTAMP, j JSON, dec DECIMAL(10,2), v)`,
	`INSERT INTO t VALUES
		(-9223372036854775808, 1.5, 'plain', x'00FF', 1, '2024-02-29', '2024-02-29 23:59:59', '2024-02-29T23:59:59.123456Z', '{"a": [1, null]}', 12.25, 'x'),
		(9223372036854775807, 9e999, '', x'', 0, '1969-12-31', '1969-12-31 00:00', '2024-03-01 01:59:59+02:00', 'null', 3, NULL),
		(0, -9e999, 'é🎈''"', NULL, NULL, NULL, NULL, NULL, NULL, -0.1, NULL),
		(NULL, NULL, NULL, x'41', NULL, '0001-01-01', '9999-12-31 23:59:59.999999', '2024-02-29 12:00:00-00:30', '"s"', NULL, NULL)`,
	`CREATE TABLE mixed (i INTEGER, n NUMERIC, bt, nil, when_ DATE, stamp DATETIME, flag BOOL)`,
	`INSERT INTO mixed VALUES
		(1, 9007199254740993, 'text', NULL, '2024-02-30', '2024-02-29 10:00:00', 2),
		('one', 0.1, x'FF', NULL, '2024-02-29', '2024-02-29 10:00:00Z', 1),
		(x'0AFF', 1e300, '', NULL, 'never', NULL, 0),
		(2.5, NULL, NULL, NULL, NULL, '2024-02-29 10:00:00.1234567', NULL)`,
	fmt.Sprintf(`CREATE TABLE many AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM n WHERE x < %d) SELECT x, 'row ' || x AS s FROM n`, manyRows),
	// A value of another type, far behind the first batch.
	fmt.Sprintf(`CREATE TABLE late AS SELECT x, CASE WHEN x = %d THEN 'late' ELSE x END AS v FROM many`, manyRows-1),
}

func TestConformance(t *testing.T) {
	path, roots := database(t, content...)
	query := func(q string) source.Request {
		return source.Request{Settings: map[string]string{"path": path}, Query: q}
	}
	sum := digest(t, path)
	long := query("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM n) SELECT x FROM n WHERE x < 0")
	sourcetest.Exercise(t, New(), sourcetest.Fixture{
		Env: source.Env{Roots: roots},
		Cases: []sourcetest.Case{
			{
				Name: "declared types", Request: query("SELECT * FROM t"),
				Schema: []string{"i: int64", "r: float64", "s: utf8", "b: binary", "f: bool", "d: date32", "ts: timestamp[us]", "tz: timestamp[us, tz=UTC]", "j: utf8", "dec: float64", "v: utf8"},
				Rows: []string{
					`-9223372036854775808 | 1.5 | plain | x00FF | true | 2024-02-29 | 2024-02-29T23:59:59 | 2024-02-29T23:59:59.123456Z | {"a": [1, null]} | 12.25 | x`,
					`9223372036854775807 | +Inf |  | x | false | 1969-12-31 | 1969-12-31T00:00:00 | 2024-02-29T23:59:59Z | null | 3 | NULL`,
					`0 | -Inf | é🎈'" | NULL | NULL | NULL | NULL | NULL | NULL | -0.1 | NULL`,
					`NULL | NULL | NULL | x41 | NULL | 0001-01-01 | 9999-12-31T23:59:59.999999 | 2024-02-29T12:30:00Z | "s" | NULL | NULL`,
				},
			},
			{
				Name: "mixed types", Request: query("SELECT * FROM mixed"),
				Schema: []string{"i: utf8", "n: utf8", "bt: binary", "nil: utf8", "when_: utf8", "stamp: utf8", "flag: int64"},
				Rows: []string{
					"1 | 9007199254740993 | x74657874 | NULL | 2024-02-30 | 2024-02-29 10:00:00 | 2",
					"one | 0.1 | xFF | NULL | 2024-02-29 | 2024-02-29 10:00:00Z | 1",
					"X'0AFF' | 1e+300 | x | NULL | never | NULL | 0",
					"2.5 | NULL | NULL | NULL | NULL | 2024-02-29 10:00:00.1234567 | NULL",
				},
				Notices: []string{`"i" holds values of the types INTEGER, REAL, TEXT, BLOB: it is given as text`, `"n" holds values of the types INTEGER, REAL`, `"bt" holds values of the types TEXT, BLOB: it is given as bytes`},
			},
			{
				Name: "expressions", Request: query("SELECT count(*) AS n, avg(x) a, max(s) AS m, NULL AS z, 1 AS \"x\", 2 AS \"x\", CAST(x'C3' AS TEXT) bad, -0.0 AS neg, 'C:\\' AS back FROM many"),
				Schema:  []string{"n: int64", "a: float64", "m: utf8", "z: utf8", "x: int64", "x: int64", "bad: binary", "neg: float64", "back: utf8"},
				Rows:    []string{fmt.Sprintf(`%d | %g | row 9999 | NULL | 1 | 2 | xC3 | -0 | C:\`, manyRows, float64(manyRows+1)/2)},
				Notices: []string{`"bad" holds text that is not UTF-8`},
			},
		},
		Empty: sourcetest.Case{
			Request: query("SELECT *, i+1 AS e FROM t WHERE 0"),
			Schema:  []string{"i: int64", "r: float64", "s: utf8", "b: binary", "f: bool", "d: date32", "ts: timestamp[us]", "tz: timestamp[us]", "j: utf8", "dec: float64", "v: utf8", "e: utf8"},
		},
		Many: query("SELECT * FROM many"), ManyRows: manyRows,
		Broken: query("SELECT nope FROM t"), BrokenText: "no such column: nope",
		Long: &long, SQL: true,
		Writes: []source.Request{query("SELECT load_extension('x')"), query("SELECT fts3_tokenizer('simple', x'00')"), query("SELECT * FROM t WHERE i = ?")},
		Unchanged: func(t *testing.T) {
			if now := digest(t, path); !bytes.Equal(now, sum) {
				t.Error("the database has changed")
			}
		},
		Idle: func(context.Context) error { return openFiles(path) },
	})
}

func digest(t *testing.T, path string) []byte {
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b)
	return sum[:]
}

// openFiles is an error if this process has the file open.
func openFiles(path string) error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(target, path) {
			return fmt.Errorf("%s is open", target)
		}
	}
	return nil
}

// collect fetches and gives the rows as text.
func collect(t *testing.T, roots *source.Roots, path, query string) ([]string, []string, error) {
	t.Helper()
	var w bytes.Buffer
	out := source.NewOutput(&w, source.Limits{}, nil)
	if err := New().Fetch(t.Context(), source.Env{Roots: roots}, source.Request{Settings: map[string]string{"path": path}, Query: query}, out); err != nil {
		return nil, nil, err
	}
	if err := out.Close(); err != nil {
		return nil, nil, err
	}
	var notices []string
	for _, n := range out.Notices() {
		notices = append(notices, n.GetMessage())
	}
	return read(t, &w), notices, nil
}

// TestLateType: a value that does not fit what all before it were is not lost, however late it comes.
func TestLateType(t *testing.T) {
	path, roots := database(t, content...)
	rows, notices, err := collect(t, roots, path, "SELECT v FROM late ORDER BY x")
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != manyRows || rows[0] != "1" || rows[manyRows-2] != "late" || rows[manyRows-1] != strconv.Itoa(manyRows) {
		t.Errorf("%d rows, %q … %q", len(rows), rows[0], rows[len(rows)-2:])
	}
	if len(notices) != 1 || !strings.Contains(notices[0], "INTEGER, TEXT") {
		t.Errorf("%q", notices)
	}
}

// TestExplain: an EXPLAIN of a write is a read.
func TestExplain(t *testing.T) {
	path, roots := database(t, "CREATE TABLE t (x)", "INSERT INTO t VALUES (1)")
	rows, _, err := collect(t, roots, path, "EXPLAIN QUERY PLAN DELETE FROM t WHERE x = 1")
	if err != nil || len(rows) != 1 || !strings.HasSuffix(rows[0], "SCAN t") {
		t.Errorf("%q %v", rows, err)
	}
	if rows, _, err := collect(t, roots, path, "SELECT x FROM t"); err != nil || len(rows) != 1 {
		t.Errorf("%q %v", rows, err)
	}
}

// TestUnsteadyQuery: a query that gives other types the second time fails; it does not lose values.
func TestUnsteadyQuery(t *testing.T) {
	path, roots := database(t, content...)
	_, _, err := collect(t, roots, path, "SELECT CASE WHEN abs(random()) % 20000 = 0 THEN 'rare' ELSE 1 END FROM many")
	if err != nil && !strings.Contains(err.Error(), "does not give the same result twice") {
		t.Error(err)
	}
}

func TestPaths(t *testing.T) {
	path, roots := database(t, "CREATE TABLE t (x)", "INSERT INTO t VALUES (1)")
	dir := filepath.Dir(path)
	outside, _ := database(t, "CREATE TABLE t (x)")
	for link, target := range map[string]string{"in.db": "test.db", "out.db": outside} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "text.db"), []byte(strings.Repeat("no database ", 100)), 0o644); err != nil {
		t.Fatal(err)
	}
	if rows, _, err := collect(t, roots, filepath.Join(dir, "in.db"), "SELECT x FROM t"); err != nil || len(rows) != 1 {
		t.Errorf("a link inside: %v %v", rows, err)
	}
	if rows, _, err := collect(t, roots, "test.db", "SELECT x FROM t"); err != nil || len(rows) != 1 {
		t.Errorf("relative: %v %v", rows, err)
	}
	for name, want := range map[string]struct {
		code schemas.Code
		text string
	}{
		filepath.Join(dir, "out.db"):   {schemas.CodeForbidden, "symbolic link"},
		outside:                        {schemas.CodeForbidden, "not below"},
		"../" + filepath.Base(outside): {schemas.CodeForbidden, "`..`"},
		"gone.db":                      {schemas.CodeSource, "no such file"},
		"text.db":                      {schemas.CodeSource, "not a database"},
		".":                            {schemas.CodeForbidden, "folder"},
		":memory:":                     {schemas.CodeSource, "no such file"},
		"file:test.db?mode=rwc":        {schemas.CodeSource, "no such file"},
	} {
		_, _, err := collect(t, roots, name, "SELECT x FROM t")
		if schemas.CodeOf(err) != want.code || !strings.Contains(fmt.Sprint(err), want.text) {
			t.Errorf("%s: %v (%s)", name, err, schemas.CodeOf(err))
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "gone.db")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("a database was made")
	}
}

// TestSwappedFile: a name that leads elsewhere by the time SQLite opens it is noticed, by the open file's identity.
func TestSwappedFile(t *testing.T) {
	path, roots := database(t, "CREATE TABLE t (x)")
	other, _ := database(t, "CREATE TABLE secret (x)")
	resolved, identity, err := roots.Resolve(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other, path); err != nil {
		t.Fatal(err)
	}
	if d, err := open(resolved, identity); schemas.CodeOf(err) != schemas.CodeForbidden {
		t.Errorf("%v %v", d, err)
	}
	// Nor does SQLite itself follow a link that took the name's place.
	third, _ := database(t, "CREATE TABLE secret (x)")
	if err := errors.Join(os.Remove(path), os.Symlink(third, path)); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(third)
	if err != nil {
		t.Fatal(err)
	}
	if d, err := open(path, info); err == nil {
		d.close()
		t.Error("SQLite follows a symbolic link")
	}
}

// TestLockedDatabase: one that another program writes is waited for, and the wait can be cancelled.
func TestLockedDatabase(t *testing.T) {
	path, roots := database(t, "CREATE TABLE t (x)", "INSERT INTO t VALUES (1)")
	writer, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = writer.Close() }()
	writer.SetMaxOpenConns(1)
	lock := func() {
		if _, err := writer.ExecContext(t.Context(), "BEGIN EXCLUSIVE; INSERT INTO t VALUES (2)"); err != nil {
			t.Fatal(err)
		}
	}
	// fetch does something once the connector is at its query.
	fetch := func(ctx context.Context, then func()) (*source.Output, error) {
		out := source.NewOutput(&bytes.Buffer{}, source.Limits{}, func(p runbusv1.Phase, _ string, _, _ int64) {
			if p == runbusv1.Phase_PHASE_QUERYING {
				then()
			}
		})
		return out, New().Fetch(ctx, source.Env{Roots: roots}, source.Request{Settings: map[string]string{"path": path}, Query: "SELECT x FROM t"}, out)
	}
	lock()
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := fetch(ctx, cancel); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	released := make(chan error, 1)
	out, err := fetch(t.Context(), func() {
		go func() {
			_, err := writer.ExecContext(context.WithoutCancel(t.Context()), "COMMIT")
			released <- err
		}()
	})
	if err != nil || out.Rows() != 2 {
		t.Errorf("%d rows, %v", out.Rows(), err)
	}
	if err := <-released; err != nil {
		t.Error(err)
	}

	tries := 0
	err = whenUnlocked(t.Context(), func() error {
		if tries++; tries < 3 {
			return &failed{rc: sqlite3.SQLITE_BUSY_RECOVERY, error: errors.New("busy")}
		}
		return nil
	})
	if err != nil || tries != 3 {
		t.Errorf("%d tries: %v", tries, err)
	}
}

// TestWAL: what is in the write-ahead log only is read too, while the writer is at work.
func TestWAL(t *testing.T) {
	path, roots := database(t, "PRAGMA journal_mode=WAL", "CREATE TABLE t (x)")
	writer, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = writer.Close() }()
	writer.SetMaxOpenConns(1)
	for _, s := range []string{"PRAGMA wal_autocheckpoint=0", "INSERT INTO t VALUES (1), (2)", "BEGIN IMMEDIATE", "INSERT INTO t VALUES (3)"} {
		if _, err := writer.ExecContext(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	rows, _, err := collect(t, roots, path, "SELECT x FROM t")
	if err != nil || strings.Join(rows, ",") != "1,2" {
		t.Errorf("%v %v", rows, err)
	}
	if _, err := writer.ExecContext(t.Context(), "ROLLBACK"); err != nil {
		t.Error(err)
	}
}
