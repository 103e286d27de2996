package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/sourcetest"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
	"github.com/org-runink/runbus/tests/pgtest"
)

func asError(err error, e **schemas.Error) bool { return errors.As(err, e) }

func dropTable(t testing.TB, name string) {
	t.Helper()
	if err := execCleanup("DROP TABLE IF EXISTS " + name); err != nil {
		t.Error(err)
	}
}

// execCleanup runs SQL when the test's context is over already.
func execCleanup(sql string) error {
	conn, err := shared.Connect(context.Background())
	if err != nil {
		return err
	}
	_, err = conn.PgConn().Exec(context.Background(), sql).ReadAll()
	return errors.Join(err, conn.Close(context.Background()))
}

// No row is lost: count and checksum are the server's (issue 2).
func TestNoRowIsLost(t *testing.T) {
	const rows = 200_000
	shared.MakeLarge(t, "large", rows)
	t.Cleanup(func() { dropTable(t, "large") })
	r := must(t, request(shared, "SELECT "+pgtest.LargeColumns+" FROM large"))
	var sum pgtest.Sum
	for _, b := range r.batches {
		if b.NumRows() > source.BatchRows {
			t.Errorf("a batch of %d rows", b.NumRows())
		}
		if err := sum.Add(b); err != nil {
			t.Fatal(err)
		}
	}
	if want := shared.LargeSum(t, "large"); sum != want || sum.Rows != rows {
		t.Errorf("got %+v, the server has %+v", sum, want)
	}
}

// Whatever the statement is, nothing changes (SPEC F2).
func TestReadOnly(t *testing.T) {
	shared.Exec(t, `CREATE TABLE kept (n int); INSERT INTO kept VALUES (1); CREATE SEQUENCE counted;
		CREATE FUNCTION sneak() RETURNS int LANGUAGE sql AS 'INSERT INTO kept VALUES (2) RETURNING n';
		CREATE FUNCTION sneak_out() RETURNS int LANGUAGE plpgsql AS $$ BEGIN SET LOCAL transaction_read_only = off; INSERT INTO kept VALUES (3); RETURN 1; END $$;
		CREATE FUNCTION sneak_commit() RETURNS int LANGUAGE plpgsql AS $$ BEGIN COMMIT; INSERT INTO kept VALUES (4); RETURN 1; END $$`)
	t.Cleanup(func() {
		if err := execCleanup(`DROP FUNCTION sneak(), sneak_out(), sneak_commit(); DROP TABLE kept; DROP SEQUENCE counted`); err != nil {
			t.Error(err)
		}
	})
	for query, want := range map[string]string{
		"INSERT INTO kept VALUES (5)":                                           "",
		"UPDATE kept SET n = 5":                                                 "",
		"SELECT 1; INSERT INTO kept VALUES (5)":                                 "",
		"SELECT 1; COMMIT; INSERT INTO kept VALUES (5)":                         "",
		"COPY kept TO PROGRAM 'true'":                                           "",
		"WITH w AS (INSERT INTO kept VALUES (5) RETURNING n) SELECT n FROM w":   "refused",
		"WITH w AS (DELETE FROM kept RETURNING n) SELECT n FROM w":              "refused",
		"EXPLAIN ANALYZE INSERT INTO kept VALUES (5)":                           "refused",
		"SELECT 5 AS n INTO made":                                               "refused",
		"SELECT n FROM kept FOR UPDATE":                                         "25006",
		"SELECT nextval('counted')":                                             "25006",
		"SELECT setval('counted', 7)":                                           "25006",
		"SELECT sneak()":                                                        "25006",
		"SELECT sneak_out()":                                                    "25001",
		"SELECT sneak_commit()":                                                 "2D000",
		"SELECT set_config('transaction_read_only', 'off', true), sneak()":      "25001",
		"SELECT set_config('transaction_read_only', 'off', false), n FROM kept": "25001",
		"SELECT $1::int":                                                        "",
	} {
		r := fetchAll(t.Context(), t, request(shared, query), source.Limits{})
		var e *schemas.Error
		if !asError(r.err, &e) || !strings.Contains(e.Message, want) {
			t.Errorf("%s: %v; want an error with %q", query, r.err, want)
			continue
		}
		if want == "25006" && e.Code != schemas.CodeReadOnly {
			t.Errorf("%s: the code is %s", query, e.Code)
		}
	}
	// What the server lets a read-only transaction do (before PostgreSQL 16) is not kept: the transaction is never committed.
	if r := fetchAll(t.Context(), t, request(shared, "SELECT lo_create(4711)"), source.Limits{}); r.err != nil && !strings.Contains(r.err.Error(), "25006") {
		t.Errorf("lo_create: %v", r.err)
	}
	admin := shared.Admin(t)
	if got := textOf(t, admin, "SELECT count(*) FROM pg_largeobject_metadata WHERE oid = 4711"); !slices.Equal(got, []string{"=0"}) {
		t.Errorf("%s large objects were made", got)
	}
	if got := textOf(t, admin, "SELECT string_agg(n::text, ',') || ' ' || (SELECT is_called FROM counted) || ' ' || coalesce(to_regclass('made')::text, 'none') FROM kept"); !slices.Equal(got, []string{"=1 false none"}) {
		t.Errorf("the database has %q", got)
	}
}

// dials counts connections, and the address of each.
type dials struct {
	mu    sync.Mutex
	addrs []string
}

func (d *dials) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d.mu.Lock()
	d.addrs = append(d.addrs, addr)
	d.mu.Unlock()
	return source.GuardedDial(&net.Dialer{})(ctx, network, addr)
}

// stalled is a reader of the result that stopped reading.
type stalled struct {
	once    sync.Once
	reached chan struct{}
	done    <-chan struct{}
}

func (w *stalled) Write([]byte) (int, error) {
	w.once.Do(func() { close(w.reached) })
	<-w.done
	return 0, context.Canceled
}

// A fetch that is cancelled is gone from the server within a second, whatever it was doing (SPEC D12).
func TestCancel(t *testing.T) {
	shared.Exec(t, "CREATE TABLE locked (n int)")
	t.Cleanup(func() { dropTable(t, "locked") })
	admin := shared.Admin(t)
	exec(t, admin, "BEGIN; LOCK TABLE locked")
	watch := shared.Admin(t)
	const running = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'runbus' AND state = 'active' AND query LIKE '%/* cancelled */%'"
	const alive = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'runbus'"
	await := func(query, want string, ended <-chan error) {
		t.Helper()
		for {
			select {
			case err := <-ended:
				t.Fatalf("the fetch ended by itself: %v", err)
			default:
			}
			if textOf(t, watch, query)[0] == want {
				return
			}
			exec(t, watch, "SELECT pg_stat_clear_snapshot(), pg_sleep(0.002)")
		}
	}
	for name, query := range map[string]string{
		"asleep":      "SELECT pg_sleep(600)",
		"computing":   "SELECT count(*) FROM generate_series(1, 100000000000)",
		"locked out":  "SELECT n FROM locked",
		"streaming":   "SELECT generate_series(1, 100000000000), repeat('x', 100)",
		"not written": "SELECT generate_series(1, 100000000000), repeat('y', 100)",
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			w := io.Discard
			reached := make(chan struct{})
			if name == "not written" {
				stop := &stalled{reached: make(chan struct{}), done: ctx.Done()}
				w, reached = stop, stop.reached
			} else {
				close(reached)
			}
			d := &dials{}
			ended := make(chan error, 1)
			go func() {
				out := source.NewOutput(w, source.Limits{}, nil)
				ended <- New().Fetch(ctx, source.Env{Dial: d.dial}, request(shared, query+" /* cancelled */"), out)
			}()
			await(running, "=1", ended)
			<-reached
			start := time.Now()
			cancel()
			err := <-ended
			took := time.Since(start)
			if !errors.Is(err, context.Canceled) {
				t.Errorf("the fetch ended with %v", err)
			}
			await(alive, "=0", nil)
			if gone, within := time.Since(start), sourcetest.StopWithin(); took > within || gone > within {
				t.Errorf("the fetch ended after %s, the query after %s", took, gone)
			}
			address := net.JoinHostPort(shared.Host, strconv.Itoa(shared.Port))
			d.mu.Lock()
			defer d.mu.Unlock()
			if len(d.addrs) < 2 || slices.ContainsFunc(d.addrs, func(a string) bool { return a != address }) {
				t.Errorf("dialled %v through the hook, want the connection and the cancel requests", d.addrs)
			}
		})
	}
	t.Run("deadline", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		r := fetchAll(ctx, t, request(shared, "SELECT pg_sleep(600)"), source.Limits{})
		if !errors.Is(r.err, context.DeadlineExceeded) {
			t.Errorf("got %v", r.err)
		}
		await(alive, "=0", nil)
	})
	t.Run("before", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if r := fetchAll(ctx, t, request(shared, "SELECT 1"), source.Limits{}); !errors.Is(r.err, context.Canceled) {
			t.Errorf("got %v", r.err)
		}
	})
}

// At a limit the read stops at the server too, and the caller is told (SPEC D15).
func TestLimits(t *testing.T) {
	watch := shared.Admin(t)
	for _, c := range []struct {
		limits source.Limits
		notice runbusv1.NoticeCode
		rows   func(int64) bool
	}{
		{source.Limits{MaxRows: 7}, runbusv1.NoticeCode_NOTICE_CODE_ROW_LIMIT, func(n int64) bool { return n == 7 }},
		{source.Limits{MaxRows: source.BatchRows}, runbusv1.NoticeCode_NOTICE_CODE_ROW_LIMIT, func(n int64) bool { return n == source.BatchRows }},
		{source.Limits{MaxRows: 3*source.BatchRows + 1}, runbusv1.NoticeCode_NOTICE_CODE_ROW_LIMIT, func(n int64) bool { return n == 3*source.BatchRows+1 }},
		{source.Limits{MaxBytes: 5000}, runbusv1.NoticeCode_NOTICE_CODE_BYTE_LIMIT, func(n int64) bool { return n > 0 && n < 5000 }},
	} {
		r := fetchAll(t.Context(), t, request(shared, "SELECT generate_series(1, 100000000000), repeat('x', 10)"), c.limits)
		if r.err != nil {
			t.Errorf("%+v: %v", c.limits, r.err)
			continue
		}
		if n := r.out.Notices(); !c.rows(r.rows()) || len(n) != 1 || n[0].GetCode() != c.notice {
			t.Errorf("%+v: %d rows, notices %v", c.limits, r.rows(), n)
		}
	}
	for textOf(t, watch, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'runbus'")[0] != "=0" {
		exec(t, watch, "SELECT pg_stat_clear_snapshot(), pg_sleep(0.002)")
	}
	// A result that just fits is not cut.
	r := fetchAll(t.Context(), t, request(shared, "SELECT generate_series(1, 7)"), source.Limits{MaxRows: 7})
	if r.err != nil || r.rows() != 7 || len(r.out.Notices()) != 0 {
		t.Errorf("%v, %d rows, notices %v", r.err, r.rows(), r.out.Notices())
	}
}

// A source that fails says why in its own words, with its SQLSTATE and without the secret (issue 2).
func TestErrorsOfTheSource(t *testing.T) {
	shared.Exec(t, `CREATE ROLE reader LOGIN PASSWORD 'r3ader-s3cret'; CREATE TABLE hidden (n int)`)
	t.Cleanup(func() {
		if err := execCleanup(`DROP TABLE hidden; DROP ROLE reader`); err != nil {
			t.Error(err)
		}
	})
	as := func(more ...string) []string {
		return append([]string{"username", "reader", "password", "r3ader-s3cret"}, more...)
	}
	for _, c := range []struct {
		name, query string
		settings    []string
		want        []string
	}{
		{"wrong password", "SELECT 1", as("password", "wrong-s3cret"), []string{`FATAL: password authentication failed for user "reader"`, "28P01"}},
		{"no password", "SELECT 1", as("password", "-"), []string{"28P01"}},
		{"no such user", "SELECT 1", as("username", "nobody"), []string{"28P01"}},
		{"no such database", "SELECT 1", as("database", "nothing"), []string{`database "nothing" does not exist`, "3D000"}},
		{"no such host", "SELECT 1", as("host", "no-such-host.invalid"), []string{"no-such-host.invalid"}},
		{"nothing listens", "SELECT 1", as("port", "1"), []string{"connection refused"}},
		{"TLS refused", "SELECT 1", as("sslMode", "verify-full"), []string{"server refused TLS connection"}},
		{"permission denied", "SELECT n FROM hidden", as(), []string{"permission denied for table hidden", "42501"}},
		{"no such table", "SELECT n FROM missing", as(), []string{`relation "missing" does not exist`, "at character 15", "42P01"}},
		{"syntax", "SELECT FROM FROM", as(), []string{"syntax error", "42601"}},
		{"mid-stream", "SELECT 1 / (100000 - i) FROM generate_series(1, 200000) i", as(), []string{"division by zero", "22012"}},
		{"the secret in it", "SELECT 'r3ader-s3cret'::int", as(), []string{"invalid input syntax", "***", "22P02"}},
		{"the server's hint", "SELECT lengthen('x')", as(), []string{"function lengthen(unknown) does not exist", "42883"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := fetchAll(t.Context(), t, request(shared, c.query, c.settings...), source.Limits{})
			var e *schemas.Error
			if !asError(r.err, &e) || e.Code != schemas.CodeSource {
				t.Fatalf("got %v, want an error of %s", r.err, schemas.CodeSource)
			}
			for _, want := range c.want {
				if !strings.Contains(e.Message, want) {
					t.Errorf("%q has no %q", e.Message, want)
				}
			}
			if text := e.Message + e.Hint + fmt.Sprint(e.Cause); strings.Contains(text, "s3cret") {
				t.Errorf("the secret is in %q", text)
			}
			if e.Hint == "" && c.name != "mid-stream" && c.name != "syntax" && c.name != "the secret in it" {
				t.Errorf("%q has no hint", e.Message)
			}
		})
	}
}

// A session that somebody ends at the server, and the server's own notices.
func TestWhatTheServerSays(t *testing.T) {
	shared.Exec(t, `CREATE FUNCTION warned() RETURNS int LANGUAGE plpgsql AS $$ BEGIN RAISE WARNING 'old data'; RETURN 1; END $$;
		CREATE FUNCTION noisy(i int) RETURNS int LANGUAGE plpgsql AS $$ BEGIN RAISE NOTICE 'row %', i; RETURN i; END $$;
		CREATE ROLE hasty LOGIN PASSWORD 'hasty'; ALTER ROLE hasty SET statement_timeout = '50ms'`)
	t.Cleanup(func() {
		if err := execCleanup("DROP FUNCTION warned(), noisy(int); DROP ROLE hasty"); err != nil {
			t.Error(err)
		}
	})
	r := must(t, request(shared, "SELECT warned() FROM generate_series(1, 3)"))
	if n := r.out.Notices(); len(n) != 1 || n[0].GetCode() != runbusv1.NoticeCode_NOTICE_CODE_SOURCE || n[0].GetMessage() != "PostgreSQL: WARNING: old data" {
		t.Errorf("the notices are %v", n)
	}
	cut := fetchAll(t.Context(), t, request(shared, "SELECT pg_terminate_backend(pg_backend_pid())"), source.Limits{})
	if cut.err == nil || !strings.Contains(cut.err.Error(), "57P01") {
		t.Errorf("got %v", cut.err)
	}
	many := must(t, request(shared, "SELECT noisy(i) FROM generate_series(1, 20000) i"))
	if n := many.out.Notices(); many.rows() != 20000 || len(n) != maxNotes+1 || !strings.Contains(n[maxNotes].GetMessage(), strconv.Itoa(20000-maxNotes)) {
		t.Errorf("%d rows and %d notices, the last is %v", many.rows(), len(n), n[len(n)-1])
	}
	// What ends a query at the server is no cancel of ours.
	slow := fetchAll(t.Context(), t, request(shared, "SELECT pg_sleep(60)", "username", "hasty", "password", "hasty"), source.Limits{})
	var e *schemas.Error
	if !asError(slow.err, &e) || e.Code != schemas.CodeSource || !strings.Contains(e.Message, "57014") || !strings.Contains(e.Hint, "statement_timeout") || errors.Is(slow.err, context.Canceled) {
		t.Errorf("got %v", slow.err)
	}
}

func TestSettings(t *testing.T) {
	var dialled atomic.Bool
	dial := func(context.Context, string, string) (net.Conn, error) {
		dialled.Store(true)
		return nil, errors.New("dialled")
	}
	for _, c := range [][]string{
		{"host", "-"}, {"database", "-"}, {"username", "-"},
		{"host", "/var/run/postgresql"}, {"host", "a,b"}, {"host", "a:1"}, {"host", "a b"}, {"host", "[a]"}, {"host", "@abstract"},
		{"port", "0"}, {"port", "65536"}, {"port", "1,2"}, {"sslMode", "prefer"}, {"options", "-c x=y"}, {"sslmode", "disable"},
		{"database", "a\x00b"}, {"password", "a\x00b"}, {"sslMode", "verify-full", "sslRootCert", "no PEM"}, {"sslCert", "x"}, {"sslKey", "x"},
		{"sslCert", "x", "sslKey", "y"},
	} {
		err := New().Fetch(t.Context(), source.Env{Dial: dial}, request(shared, "SELECT 1", c...), source.NewOutput(io.Discard, source.Limits{}, nil))
		if schemas.CodeOf(err) != schemas.CodeBadSource {
			t.Errorf("%q: %v; want %s", c, err, schemas.CodeBadSource)
		}
	}
	if dialled.Load() {
		t.Error("a request with wrong settings was dialled")
	}
	// Names go to the hook as they are: it resolves and judges them.
	for host, want := range map[string]string{"db.example": "db.example:5432", "::1": "[::1]:5432", "[::1]": "[::1]:5432", "10.0.0.1": "10.0.0.1:5432"} {
		var got string
		refuse := func(_ context.Context, network, addr string) (net.Conn, error) {
			got = network + " " + addr
			return nil, schemas.Errorf(schemas.CodeForbiddenHop, "not there")
		}
		err := New().Fetch(t.Context(), source.Env{Dial: refuse}, request(shared, "SELECT 1", "host", host, "port", "-"), source.NewOutput(io.Discard, source.Limits{}, nil))
		if got != "tcp "+want || schemas.CodeOf(err) != schemas.CodeForbiddenHop {
			t.Errorf("%s: dialled %q, %v", host, got, err)
		}
	}
	if err := New().Fetch(t.Context(), source.Env{}, request(shared, "SELECT 1"), source.NewOutput(io.Discard, source.Limits{}, nil)); err == nil {
		t.Error("a runner that makes no connections made one")
	}
}

// Nothing of libpq's environment reaches a connection.
func TestEnvironmentIsIgnored(t *testing.T) {
	service := t.TempDir() + "/service"
	for name, value := range map[string]string{
		"PGHOST": "elsewhere.invalid", "PGPORT": "1", "PGDATABASE": "nothing", "PGUSER": "nobody", "PGPASSWORD": "none", "PGPASSFILE": service,
		"PGSERVICE": "missing", "PGSERVICEFILE": service, "PGSSLMODE": "verify-full", "PGSSLROOTCERT": service, "PGSSLCERT": service, "PGSSLKEY": service,
		"PGSSLCERTMODE": "require", "PGAPPNAME": "leaked", "PGOPTIONS": "-c search_path=leaked", "PGTZ": "Asia/Tokyo", "PGCONNECT_TIMEOUT": "bad",
		"PGTARGETSESSIONATTRS": "standby", "PGREQUIREAUTH": "none", "PGCHANNELBINDING": "require", "PGMINPROTOCOLVERSION": "3.2", "PGSSLNEGOTIATION": "direct",
		"HOME": t.TempDir(),
	} {
		t.Setenv(name, value)
	}
	fresh, err := parseBase()
	if err != nil {
		t.Fatal(err)
	}
	kept := base
	base = func() (*pgconn.Config, error) { return fresh, nil }
	defer func() { base = kept }()
	r := must(t, request(shared, "SELECT current_setting('application_name') || ' ' || current_setting('TimeZone') || ' ' || current_setting('search_path')"))
	if got := format(t, r.batches[0].Column(0), 0); got != `runbus UTC "$user", public` {
		t.Errorf("the session has %s", got)
	}
}
