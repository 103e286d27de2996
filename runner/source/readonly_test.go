package source

import (
	"errors"
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

func TestReadOnlyAllows(t *testing.T) {
	for _, query := range []string{
		"SELECT 1", "select 1;", " \t\r\n SeLeCt 1 ; ", "((select 1) union (select 2))", "WITH a AS (SELECT 1) SELECT * FROM a",
		"SHOW server_version", "DESCRIBE t", "DESC t", "EXPLAIN SELECT 1", "EXPLAIN ANALYZE SELECT 1", "EXPLAIN DELETE FROM t",
		"/* a */ -- b\n SELECT 1 -- c", "SELECT ';'", "SELECT 'it''s; DROP TABLE t'", `SELECT ";" FROM t`, "SELECT 1 /* ; */",
		"SELECT 1 -- ; DROP TABLE t", `SELECT 'a\\', 'b'`, `SELECT '\d+;' `, "SELECT replace(a, 'x', 'y') FROM t",
		"SELECT * FROM t WHERE (replace(a,'x','y')) = 'z'", "SELECT x.into, x.insert FROM x", "SELECT 1 AS into",
		"SELECT a::text, b::numeric(10,2) FROM t", "SELECT insert_at, update_count FROM deleted", "SELECT a[1] FROM t",
		"SELECT 'é', \"naïve\" FROM t", "SELECT (1)", "SELECT 1e5, 0x1F, 1.5e-3, .5", "SELECT a - -1 FROM t",
		"SELECT U&'d\\0061t' ", "SELECT updated FROM t FOR UPDATE",
	} {
		if err := ReadOnlySQL(query); err != nil {
			t.Errorf("%s: %v", query, err)
		}
	}
	for query, d := range map[string]Dialect{
		"SELECT $$a;b$$":                           PostgreSQL,
		"SELECT $x$ it's $$ ; $x$, 1":              PostgreSQL,
		"/* a /* b; */ c; */ SELECT 1":             PostgreSQL,
		`SELECT E'it\'s; DROP', 1`:                 PostgreSQL,
		`SELECT a #>> '{x,y}', b ? 'k' FROM t`:     PostgreSQL,
		"SELECT v$session.a$b FROM v$session":      PostgreSQL,
		"SELECT $1::text":                          PostgreSQL,
		`SELECT "a\" FROM t`:                       PostgreSQL,
		"SELECT [a;b], `c;d` FROM t":               SQLite,
		`SELECT 'C:\' || path FROM t`:              SQLite,
		"SELECT a->>'$.x' FROM t":                  SQLite,
		"SELECT `a;b` FROM t # ; '":                MySQL,
		"SELECT 5--1":                              MySQL,
		"SELECT \"it''s\", 'say \"hi;\"' FROM t":   MySQL,
		"SHOW TABLES LIKE 'a%'":                    MySQL,
		"EXPLAIN FORMAT=JSON SELECT * FROM t":      MySQL,
		"EXPLAIN (ANALYZE, BUFFERS) SELECT a.copy": PostgreSQL,
	} {
		if err := d.ReadOnly(query); err != nil {
			t.Errorf("%s: %s: %v", d, query, err)
		}
	}
}

func TestReadOnlyRefuses(t *testing.T) {
	for query, reason := range map[string]string{
		"": "empty", "  \n": "empty", "-- only\n": "no statement", ";": "no statement", "()": "starts with )",
		"DELETE FROM t": "starts with DELETE", "/* SELECT */ DROP TABLE t": "starts with DROP", "-- SELECT\nUPDATE t SET a=1": "starts with UPDATE",
		"PRAGMA query_only=0": "starts with PRAGMA", "ATTACH 'x' AS y": "starts with ATTACH", "VALUES (1)": "starts with VALUES", "TABLE t": "starts with TABLE",
		"SELECTED": "starts with SELECTED", "'SELECT'": "does not start with a word", "\u00a0SELECT 1": "starts with",
		"ſELECT 1": "starts with", "\u212aSELECT": "starts with", "SELECT 1; DROP TABLE t": "more than one", "SELECT 1;;": "more than one",
		"SELECT ';'; DELETE FROM t": "more than one", ";SELECT 1": "more than one",
		"SELECT 1 /* x */; /* y */ DELETE FROM t": "more than one",
		// What hides a second statement from one dialect and not from another.
		`SELECT 'a\', '; DROP TABLE t; --'`:      "backslash before its quote",
		`SELECT 'a\'; DROP TABLE t; --'`:         "backslash before its quote",
		`SELECT "a\"; DROP TABLE t; --"`:         "more than one",
		`SELECT "a\" FROM t`:                     "backslash before its quote",
		"SELECT 1 # '\n; DROP TABLE t -- '":      "more than one",
		"SELECT 1--' \n; DROP TABLE t --'":       "more than one",
		"SELECT 5--'\n+ (DELETE FROM t) -- '":    "",
		"SELECT 1 -- a\rDELETE":                  "carriage return",
		"SELECT `; DROP TABLE t; --`":            "more than one",
		"SELECT [ ' ]; DROP TABLE t; -- ']":      "more than one",
		"SELECT $$;DROP TABLE t;$$":              "more than one",
		"SELECT $a('); DELETE FROM t; --'":       "more than one",
		"SELECT a$$; DROP TABLE t; --$$":         "more than one",
		"SELECT 1$$; DROP TABLE t; --$$":         "not followed by a space",
		`SELECT 1E'\'; DROP TABLE t; --'`:        "not followed by a space",
		`SELECT fooE'\'; DROP TABLE t; --'`:      "backslash before its quote",
		"SELECT E'a'\n'b\\'; DROP TABLE t; --'":  "backslash before its quote",
		"SELECT U&'a\\'; DROP TABLE t; --'":      "backslash before its quote",
		"/* /* */ SELECT 1 */ DELETE FROM t":     "starts with DELETE",
		"/* a /* b */ c */ SELECT 1":             "starts with C",
		"SELECT 1 /* /* */; DROP TABLE t -- */":  "more than one",
		"/*! DELETE FROM t */ SELECT 1":          "run by MySQL",
		"SELECT 1 /*!50000 ; DROP TABLE t */":    "run by MySQL",
		"SELECT 1 /*M! INTO OUTFILE '/tmp/x' */": "run by MySQL",
		"SELECT 1 /* open":                       "not closed",
		"SELECT 'open":                           "not closed",
		"SELECT \"open":                          "not closed",
		"SELECT $x$ open $y$":                    "not closed",
		"SELECT 1\x00; DROP TABLE t":             "NUL",
		"SELECT '\xbf\\'; DROP TABLE t; --'":     "not UTF-8",
		// Reads that write.
		"WITH x AS (DELETE FROM t RETURNING *) SELECT * FROM x":                      "has a DELETE",
		"WITH x AS (SELECT 1) INSERT INTO t SELECT * FROM x":                         "has an INSERT",
		"WITH x AS (SELECT 1) UPDATE t SET a = 1":                                    "has an UPDATE",
		"with x as (select 1) delete from t":                                         "has a DELETE",
		"WITH x AS NOT MATERIALIZED (update \"t\" set a=1 returning a) SELECT 1":     "has an UPDATE",
		"WITH x AS (SELECT 1) MERGE INTO t USING x ON true WHEN MATCHED THEN DELETE": "has a MERGE",
		"WITH x AS (SELECT 1) REPLACE INTO t SELECT 1":                               "has a REPLACE",
		"SELECT * INTO t2 FROM t":                                                    "INTO",
		"SELECT 1 INTO OUTFILE '/tmp/x'":                                             "INTO",
		"EXPLAIN ANALYZE DELETE FROM t":                                              "explains DELETE",
		"explain (costs off, analyze) update t set a = 1":                            "explains UPDATE",
		"EXPLAIN VERBOSE ANALYSE INSERT INTO t VALUES (1)":                           "explains INSERT",
		"EXPLAIN ANALYZE CREATE TABLE x AS SELECT 1":                                 "explains CREATE",
		"EXPLAIN ANALYZE WITH x AS (DELETE FROM t RETURNING 1) SELECT 1":             "has a DELETE",
		"EXPLAIN ANALYZE EXECUTE p":                                                  "explains EXECUTE",
		"DESC ANALYZE DELETE FROM t":                                                 "explains DELETE",
	} {
		err := ReadOnlySQL(query)
		if schemas.CodeOf(err) != schemas.CodeReadOnly || !strings.Contains(err.Error(), reason) {
			t.Errorf("%q: %v, want %q", query, err, reason)
		}
		if !errors.Is(err, &schemas.Error{Code: schemas.CodeReadOnly}) {
			t.Errorf("%q: %T", query, err)
		}
	}
}

func TestReadOnlyOfOneDialectRefuses(t *testing.T) {
	for query, d := range map[string]Dialect{
		"SELECT $$a$$; DELETE FROM t":                PostgreSQL,
		"SELECT $a$ $b$ $a$; DELETE FROM t -- $b$":   PostgreSQL,
		`SELECT E'\\'; DELETE FROM t; --'`:           PostgreSQL,
		`SELECT 'a\'; DELETE FROM t; --'`:            PostgreSQL,
		"SELECT ` '; DELETE FROM t; --` '":           SQLite,
		"SELECT [a]; DELETE FROM t":                  SQLite,
		"SELECT :a('); DELETE FROM t; --'":           SQLite,
		"SELECT 1 /* a /* b */; DELETE FROM t -- */": SQLite,
		"SELECT 1 --\x01'\n; DELETE FROM t --'":      MySQL,
	} {
		if err := d.ReadOnly(query); schemas.CodeOf(err) != schemas.CodeReadOnly {
			t.Errorf("%s: %q: %v", d, query, err)
		}
	}
}

// FuzzReadOnlySQL: whatever passes for any SQL passes for each dialect, and stays one statement when another is put behind it.
// (That SQLite agrees is fuzzed against SQLite itself, in its package.)
func FuzzReadOnlySQL(f *testing.F) {
	for _, seed := range []string{"SELECT 1", "SELECT 'a\\'", "/* /* */ SELECT $a$;$a$ -- x\n;", "WITH x AS (DELETE FROM t) SELECT `a`,[b],\"c\"", "SELECT E'\\''"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, query string) {
		if ReadOnlySQL(query) != nil {
			return
		}
		for _, d := range []Dialect{PostgreSQL, SQLite, MySQL} {
			if err := d.ReadOnly(query); err != nil {
				t.Errorf("any SQL allows %q, %s refuses: %v", query, d, err)
			}
		}
		if err := ReadOnlySQL(query + "\n;DROP TABLE t"); err == nil {
			t.Errorf("a second statement hides behind %q", query)
		}
		if err := ReadOnlySQL("DROP TABLE t;\n" + query); err == nil {
			t.Errorf("a statement hides in front of %q", query)
		}
	})
}
