package pgtest

import (
	"context"
	"crypto/md5" //nolint:gosec // a checksum that the server computes too
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// LargeRows is the number of rows of the large table that the requirements ask for.
const LargeRows = 1_000_000

// LargeColumns are the columns of a large table.
const LargeColumns = "id, n, x, amount, at, label"

// MakeLarge makes a table of the columns id bigint, n integer, x double precision, amount numeric(12,2), at timestamptz,
// label text. Its rows depend on nothing but their number; every column but id has NULLs.
func (c *Cluster) MakeLarge(t testing.TB, table string, rows int) {
	t.Helper()
	if err := c.MakeLargeTable(t.Context(), table, rows); err != nil {
		t.Fatalf("make the table %s: %v", table, err)
	}
}

// MakeLargeTable is MakeLarge for a TestMain.
func (c *Cluster) MakeLargeTable(ctx context.Context, table string, rows int) error {
	if err := c.exec(ctx, fmt.Sprintf(`
		CREATE TABLE %[1]s (id bigint, n integer, x double precision, amount numeric(12,2), at timestamptz, label text);
		INSERT INTO %[1]s SELECT i,
			CASE WHEN i %% 101 <> 0 THEN (i * 7919) %% 2000003 - 1000001 END,
			CASE WHEN i %% 103 <> 0 THEN ((i * 104729) %% 4000037 - 2000018) * 0.125::double precision END,
			CASE WHEN i %% 107 <> 0 THEN (((i * 1299709) %% 20000000003 - 10000000001)::numeric / 100)::numeric(12,2) END,
			CASE WHEN i %% 109 <> 0 THEN timestamptz '1995-01-01 00:00:00+00' + i * interval '1017.000001 seconds' END,
			CASE WHEN i %% 113 <> 0 THEN 'row ' || i || repeat(' · ' || (i %% 997), (i %% 4)::integer) END
		FROM generate_series(1, %[2]d::bigint) AS i`, table, rows)); err != nil {
		return err
	}
	return c.exec(ctx, "VACUUM ANALYZE "+table)
}

// Sum is a checksum over whole rows that does not depend on their order: both a cluster and whoever received the rows can
// compute it.
type Sum struct {
	Rows int64
	Hash uint64
}

// LargeSum is the checksum of a large table, computed by the server.
func (c *Cluster) LargeSum(t testing.TB, table string) Sum {
	t.Helper()
	var s Sum
	var hash string
	err := c.Admin(t).QueryRow(t.Context(), `
		SELECT count(*), mod(sum(('x' || substr(md5(concat_ws('|', id, coalesce(n::text, '~'), coalesce(x::text, '~'), coalesce(amount::text, '~'),
			coalesce((extract(epoch FROM at) * 1000000)::bigint::text, '~'), coalesce(label, '~'))), 1, 15))::bit(60)::bigint), 18446744073709551616)::text
		FROM `+table).Scan(&s.Rows, &hash)
	if err != nil {
		t.Fatalf("checksum of %s: %v", table, err)
	}
	if s.Hash, err = strconv.ParseUint(hash, 10, 64); err != nil {
		t.Fatalf("checksum of %s: %v", table, err)
	}
	return s
}

// Add adds the rows of a batch with the columns of a large table.
func (s *Sum) Add(batch arrow.RecordBatch) error {
	if batch.NumCols() != 6 {
		return fmt.Errorf("pgtest: %d columns, not %s", batch.NumCols(), LargeColumns)
	}
	id, ok0 := batch.Column(0).(*array.Int64)
	n, ok1 := batch.Column(1).(*array.Int32)
	x, ok2 := batch.Column(2).(*array.Float64)
	amount, ok3 := batch.Column(3).(*array.Decimal128)
	at, ok4 := batch.Column(4).(*array.Timestamp)
	label, ok5 := batch.Column(5).(*array.String)
	if !ok0 || !ok1 || !ok2 || !ok3 || !ok4 || !ok5 {
		return fmt.Errorf("pgtest: not the types of a large table: %s", batch.Schema())
	}
	var row []byte
	cell := func(column arrow.Array, i int, format func()) {
		row = append(row, '|')
		if column.IsNull(i) {
			row = append(row, '~')
			return
		}
		format()
	}
	for i := range int(batch.NumRows()) {
		row = strconv.AppendInt(row[:0], id.Value(i), 10)
		cell(n, i, func() { row = strconv.AppendInt(row, int64(n.Value(i)), 10) })
		cell(x, i, func() { row = append(row, strings.TrimSuffix(strconv.FormatFloat(x.Value(i), 'f', -1, 64), ".0")...) })
		cell(amount, i, func() { row = append(row, amount.Value(i).ToString(2)...) })
		cell(at, i, func() { row = strconv.AppendInt(row, int64(at.Value(i)), 10) })
		cell(label, i, func() { row = append(row, label.Value(i)...) })
		s.AddText(row)
	}
	return nil
}

// AddText adds a row that is given as text: its values in the order of the columns with `|` in between, `~` for NULL, x without
// exponent and trailing zeros, at in microseconds since 1970.
func (s *Sum) AddText(row []byte) {
	sum := md5.Sum(row) //nolint:gosec // a checksum
	s.Hash += binary.BigEndian.Uint64(sum[:8]) >> 4
	s.Rows++
}
