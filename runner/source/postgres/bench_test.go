package postgres

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/tests/pgtest"
)

func benchTable(b *testing.B) {
	b.Helper()
	shared.Exec(b, "DROP TABLE IF EXISTS bench")
	shared.MakeLarge(b, "bench", pgtest.LargeRows)
}

const benchQuery = "SELECT " + pgtest.LargeColumns + " FROM bench"

// readBatches is PostgreSQL → Arrow record batches alone: no stream is encoded.
func readBatches(b *testing.B) (rows int64) {
	b.Helper()
	values, err := spec.Read(request(shared, benchQuery))
	if err != nil {
		b.Fatal(err)
	}
	config, err := newConfig(values, source.GuardedDial(&net.Dialer{}))
	if err != nil {
		b.Fatal(err)
	}
	s, err := open(b.Context(), config, func(string) {})
	if err != nil {
		b.Fatal(err)
	}
	defer s.close()
	fields, err := s.describe(benchQuery)
	if err != nil {
		b.Fatal(err)
	}
	r := newReader(memory.DefaultAllocator, fields, s.note)
	defer r.release()
	if err := s.execute(benchQuery, r.formats()); err != nil {
		b.Fatal(err)
	}
	if err := r.read(s, source.DefaultMaxRows, func(batch arrow.RecordBatch) error {
		rows += batch.NumRows()
		return nil
	}); err != nil {
		b.Fatal(err)
	}
	return rows
}

// fetchRows is a whole fetch: PostgreSQL → record batches → Arrow IPC with zstd.
func fetchRows(b *testing.B) int64 {
	b.Helper()
	out := source.NewOutput(io.Discard, source.Limits{}, nil)
	if err := New().Fetch(b.Context(), source.Env{Dial: source.GuardedDial(&net.Dialer{})}, request(shared, benchQuery), out); err != nil {
		b.Fatal(err)
	}
	if err := out.Close(); err != nil {
		b.Fatal(err)
	}
	return out.Rows()
}

// BenchmarkFetch reads 1,000,000 rows of 6 columns, in turns to record batches alone and to the encoded stream, and reports the
// rows a second of both and their ratio.
func BenchmarkFetch(b *testing.B) {
	benchTable(b)
	var alone, whole time.Duration
	var rows int64
	for b.Loop() {
		start := time.Now()
		rows += readBatches(b)
		alone += time.Since(start)
		start = time.Now()
		if n := fetchRows(b); n != pgtest.LargeRows {
			b.Fatalf("%d rows", n)
		}
		whole += time.Since(start)
	}
	b.ReportMetric(float64(rows)/alone.Seconds(), "batches-rows/s")
	b.ReportMetric(float64(rows)/whole.Seconds(), "stream-rows/s")
	b.ReportMetric(alone.Seconds()/whole.Seconds(), "ratio")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkBatches is the first half of BenchmarkFetch, for a profile.
func BenchmarkBatches(b *testing.B) {
	benchTable(b)
	var rows int64
	for b.Loop() {
		rows += readBatches(b)
	}
	b.ReportMetric(float64(rows)/b.Elapsed().Seconds(), "rows/s")
}

// BenchmarkStream is the second half of BenchmarkFetch, for a profile.
func BenchmarkStream(b *testing.B) {
	benchTable(b)
	var rows int64
	for b.Loop() {
		rows += fetchRows(b)
	}
	b.ReportMetric(float64(rows)/b.Elapsed().Seconds(), "rows/s")
}
