package postgres

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/sourcetest"
)

func TestConformance(t *testing.T) {
	shared.Exec(t, `CREATE TABLE conform (n int, amount numeric(8,2), at timestamptz, label text, raw bytea, tags text[]);
		INSERT INTO conform VALUES (1, 10.50, '2024-02-29 12:00:00.5+01', 'a', '\x00ff', '{x,NULL}'), (2, -0.01, NULL, NULL, NULL, NULL);
		CREATE FUNCTION conform_write() RETURNS int LANGUAGE sql AS 'INSERT INTO conform (n) VALUES (3) RETURNING n'`)
	t.Cleanup(func() {
		if err := execCleanup("DROP FUNCTION conform_write(); DROP TABLE conform"); err != nil {
			t.Error(err)
		}
	})
	broken := request(shared, "SELECT 1", "password", "wrong-password-for-it")
	long := request(shared, "SELECT pg_sleep(60) /* conform */")
	sourcetest.Exercise(t, New(), sourcetest.Fixture{
		Cases: []sourcetest.Case{{
			Name: "table", Request: request(shared, "SELECT * FROM conform ORDER BY n"),
			Schema: []string{"n: int32", "amount: decimal(8, 2)", "at: timestamp[us, tz=UTC]", "label: utf8", "raw: binary", "tags: list<item: utf8, nullable>"},
			Rows:   []string{`1 | 10.5 | 2024-02-29T11:00:00.5Z | a | x00FF | ["x",null]`, `2 | -0.01 | NULL | NULL | NULL | NULL`},
		}},
		Empty:      sourcetest.Case{Request: request(shared, "SELECT n, label FROM conform WHERE false"), Schema: []string{"n: int32", "label: utf8"}},
		Many:       request(shared, "SELECT i, 'row ' || i FROM generate_series(1, 40000) i"),
		ManyRows:   40000,
		Broken:     broken,
		BrokenText: "28P01",
		Long:       &long,
		Running: func(ctx context.Context) error {
			return poll(ctx, "SELECT count(*) > 0 FROM pg_stat_activity WHERE application_name = 'runbus' AND wait_event = 'PgSleep' AND query LIKE '%conform%'")
		},
		Idle: func(ctx context.Context) error {
			return poll(ctx, "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'runbus'")
		},
		Dials:  func(host string) source.Request { return request(shared, "SELECT 1", "host", host) },
		Writes: []source.Request{request(shared, "SELECT conform_write()"), request(shared, "SELECT n FROM conform FOR UPDATE")},
		Unchanged: func(t *testing.T) {
			if got := textOf(t, shared.Admin(t), "SELECT count(*) FROM conform"); got[0] != "=2" {
				t.Errorf("the table has %s rows", got[0])
			}
		},
		SQL: true,
	})
}

// poll asks the server until a condition holds.
func poll(ctx context.Context, condition string) (err error) {
	conn, err := pgx.Connect(ctx, shared.ConnString())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(context.Background())) }()
	for {
		var holds bool
		if err := conn.QueryRow(ctx, condition).Scan(&holds); err != nil || holds {
			return err
		}
		if _, err := conn.Exec(ctx, "SELECT pg_sleep(0.002)"); err != nil {
			return err
		}
	}
}
