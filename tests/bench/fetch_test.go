package bench

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/postgres"
	"github.com/org-runink/runbus/tests/pgtest"
	"github.com/org-runink/runbus/tests/stack"
)

const query = "SELECT " + pgtest.LargeColumns + " FROM large"

// BenchmarkFetch reads 1,000,000 rows of 6 columns from PostgreSQL in turns
//   - alone: into Arrow record batches, in this process, by the runner's own reader, encoding and sending nothing;
//   - whole: into an Arrow stream at the caller of the HTTP API, through a control plane and a runner that are processes of
//     their own.
//
// It reports the median rows a second of both and the whole's as a part of the alone's. One iteration is one pair; use
// -benchtime=9x or so. What arrived is checked behind the clock.
func BenchmarkFetch(b *testing.B) {
	cluster := pgtest.Start(b)
	cluster.MakeLarge(b, "large", pgtest.LargeRows)
	want := cluster.LargeSum(b, "large")
	plane := stack.StartPlane(b, false, nil)
	plane.StartRunner(b, "bench", nil)
	settings := map[string]string{"host": cluster.Host, "port": strconv.Itoa(cluster.Port), "database": cluster.Database, "username": cluster.User}
	secrets := map[string]string{"password": cluster.Password}

	alone := func() time.Duration {
		began := time.Now()
		var rows int64
		out := source.NewBatchOutput(func(batch arrow.RecordBatch) error {
			rows += batch.NumRows()
			return nil
		}, source.Limits{}, nil)
		err := postgres.New().Fetch(b.Context(), source.Env{Dial: source.GuardedDial(&net.Dialer{})},
			source.Request{Settings: settings, Secrets: secrets, Query: query}, out)
		took := time.Since(began)
		if err != nil || rows != want.Rows {
			b.Fatalf("%d rows of %d: %v", rows, want.Rows, err)
		}
		return took
	}
	var stream bytes.Buffer
	whole := func() time.Duration {
		began := time.Now()
		resp := plane.Admin.Send(b, b.Context(), http.MethodPost, "/api/fetches", map[string]any{
			"runnerId": "bench", "source": map[string]any{"kind": "postgres", "settings": settings}, "secrets": secrets, "query": query,
		}, "application/vnd.apache.arrow.stream")
		defer resp.Body.Close()
		stream.Reset()
		_, err := io.Copy(&stream, resp.Body)
		took := time.Since(began)
		if outcome := resp.Trailer.Get("Runbus-Outcome"); err != nil || outcome != "completed" {
			b.Fatalf("%s %q %s: %v", resp.Status, outcome, resp.Trailer.Get("Runbus-Error"), err)
		}
		return took
	}

	// Both once before the clock: files cached, connections open, heaps grown.
	alone()
	whole()
	if got, err := sumOf(&stream); err != nil || got != want {
		b.Fatalf("the caller has %+v, the source %+v: %v", got, want, err)
	}

	var alones, wholes []time.Duration
	var ratios []float64
	for i := 0; b.Loop(); i++ {
		var a, w time.Duration
		if i%2 == 0 { // who goes first changes, so that a machine that gets slower favours neither
			a, w = alone(), whole()
		} else {
			w, a = whole(), alone()
		}
		alones, wholes, ratios = append(alones, a), append(wholes, w), append(ratios, a.Seconds()/w.Seconds())
		b.Logf("pair %d: alone %.3f s, whole %.3f s, ratio %.2f", i+1, a.Seconds(), w.Seconds(), a.Seconds()/w.Seconds())
	}
	b.StopTimer()
	slices.Sort(ratios)
	perSecond := func(d []time.Duration) float64 { return float64(want.Rows) / median(d).Seconds() }
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(perSecond(alones), "alone-rows/s")
	b.ReportMetric(perSecond(wholes), "whole-rows/s")
	b.ReportMetric(median(alones).Seconds()/median(wholes).Seconds(), "ratio")
	b.ReportMetric(ratios[len(ratios)/2], "median-pair-ratio")
	b.ReportMetric(float64(stream.Len())/float64(want.Rows), "wire-bytes/row")
}

func sumOf(r io.Reader) (pgtest.Sum, error) {
	var sum pgtest.Sum
	reader, err := ipc.NewReader(r)
	if err != nil {
		return sum, err
	}
	defer reader.Release()
	for reader.Next() {
		if err := sum.Add(reader.RecordBatch()); err != nil {
			return sum, fmt.Errorf("row %d: %w", sum.Rows, err)
		}
	}
	return sum, nil
}
