package sqlite

import (
	"bytes"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/sourcetest"
	"github.com/org-runink/runbus/schemas"
)

// read gives the rows of a stream as text.
func read(t *testing.T, stream *bytes.Buffer) []string {
	t.Helper()
	r, err := ipc.NewReader(stream)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	var rows []string
	for r.Next() {
		rows = append(rows, sourcetest.Text(r.RecordBatch())...)
	}
	if err := r.Err(); err != nil {
		t.Fatal(err)
	}
	return rows
}

// FuzzGate puts the SQL gate against SQLite itself: what the gate lets pass is run on a connection that may write, and whatever
// it is, the database is the same afterwards.
func FuzzGate(f *testing.F) {
	for _, seed := range []string{
		"SELECT * FROM t", "SELECT 'a\\'; DELETE FROM t; --'", "WITH x AS (SELECT 1) DELETE FROM t", "SELECT $a('); DELETE FROM t; --'", "SELECT [ ' ]; DELETE FROM t; -- ']",
		"/* /* */ SELECT 1; */ DELETE FROM t", "SELECT 1 -- \r; DELETE FROM t", "EXPLAIN DELETE FROM t", "SELECT `'`; DELETE FROM t --'", "select 1;", "SELECT x'00', \"a\"\"b\", :p::q(;) FROM t",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, query string) {
		if source.SQLite.ReadOnly(query) != nil {
			return
		}
		db, err := sql.Open("sqlite", ":memory:")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = db.Close() }()
		db.SetMaxOpenConns(1)
		if _, err := db.Exec("CREATE TABLE t (x); INSERT INTO t VALUES (1), (2)"); err != nil {
			t.Fatal(err)
		}
		state := func() string {
			var s string
			if err := db.QueryRow("SELECT total_changes() || (SELECT group_concat(sql) FROM sqlite_schema) || (SELECT count(*) || sum(x) FROM t)").Scan(&s); err != nil {
				return fmt.Sprint(err)
			}
			return s
		}
		before := state()
		_, _ = db.ExecContext(t.Context(), query)
		if after := state(); after != before {
			t.Errorf("%q passes the gate and changes the database: %s → %s", query, before, after)
		}
	})
}

// FuzzDatabase damages a database: whatever comes of it is rows or an error, never a crash or a hang.
func FuzzDatabase(f *testing.F) {
	dir := f.TempDir()
	path := filepath.Join(dir, "good.db")
	db, err := sql.Open("sqlite", path)
	if err != nil {
		f.Fatal(err)
	}
	if _, err := db.Exec("CREATE TABLE t (x INTEGER PRIMARY KEY, y TEXT); CREATE INDEX i ON t (y); CREATE VIEW v AS SELECT y FROM t; INSERT INTO t WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM n WHERE x < 200) SELECT x, hex(zeroblob(x)) FROM n"); err != nil {
		f.Fatal(err)
	}
	if err := db.Close(); err != nil {
		f.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	for _, offset := range []uint{0, 16, 18, 28, 52, 56, 92, 100, 105, 4095, 4096, 8192 + 3} {
		f.Add(offset, []byte{0xff, 0, 0x7f}, uint(len(good)))
	}
	f.Add(uint(0), []byte{}, uint(100))
	f.Fuzz(func(t *testing.T, offset uint, damage []byte, size uint) {
		bad := slices.Clone(good[:min(size, uint(len(good)))])
		if offset < uint(len(bad)) {
			copy(bad[offset:], damage)
		}
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "bad.db"), bad, 0o600); err != nil {
			t.Fatal(err)
		}
		roots, err := source.OpenRoots(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = roots.Close() }()
		for _, query := range []string{"SELECT * FROM t", "SELECT * FROM v ORDER BY y DESC", "SELECT * FROM t WHERE y > 'A'", "SELECT * FROM sqlite_schema"} {
			out := source.NewOutput(&bytes.Buffer{}, source.Limits{MaxRows: 1000}, nil)
			err := New().Fetch(t.Context(), source.Env{Roots: roots}, source.Request{Settings: map[string]string{"path": "bad.db"}, Query: query}, out)
			if code := schemas.CodeOf(err); err != nil && code != schemas.CodeSource {
				t.Errorf("%v (%s)", err, code)
			}
		}
	})
}

// FuzzParseStamp: what is taken for a time reads back equal.
func FuzzParseStamp(f *testing.F) {
	for _, seed := range []string{"2024-02-29 23:59", "2024-02-29T23:59:59.123456Z", "0001-01-01 00:00:00+14:00", "2024-02-30 00:00:00", "2024-02-29 10:00:00,5", "2024-02-29"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		at, zone, ok := parseStamp([]byte(text))
		if !ok {
			return
		}
		layout := "2006-01-02 15:04:05.999999"
		if zone {
			layout += "Z07:00"
		}
		again, zoneAgain, okAgain := parseStamp([]byte(at.ToTime(arrow.Microsecond).Format(layout)))
		if again != at || zoneAgain != zone || !okAgain {
			t.Errorf("%q: %d, then %d", text, at, again)
		}
	})
}
