package bench

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// BenchmarkDemo runs the built `runink demo --json` and reports the median time from its start to its result on standard output: two
// processes started, a key minted, a runner enrolled, a fetch run. One iteration is one run; use -benchtime=5x.
func BenchmarkDemo(b *testing.B) {
	bin, err := stack.Build(false)
	if err != nil {
		b.Fatal(err)
	}
	var runs []time.Duration
	for i := 0; b.Loop(); i++ {
		began := time.Now()
		p := stack.Start(b, "runink demo", bin.Runink, nil, "demo", "--json")
		last, _, err := p.Stdout.Await(`"durationMs"`, 0)
		took := time.Since(began)
		if err != nil {
			b.Fatalf("no result: %v\n%s", err, p.Stderr)
		}
		if code := p.Exit(b); code != 0 {
			b.Fatalf("ended with status %d: %s", code, p.Stderr)
		}
		var result struct {
			PID, ControlPlanePID, RunnerPID int
			Rows                            int64
			DurationMs                      int64
		}
		if err := json.Unmarshal([]byte(p.Stdout.String()), &result); err != nil {
			b.Fatalf("%v in %s", err, last)
		}
		if result.Rows == 0 || result.PID == result.RunnerPID || result.PID == result.ControlPlanePID || result.RunnerPID == result.ControlPlanePID {
			b.Fatalf("not a whole demo: %+v", result)
		}
		runs = append(runs, took)
		b.Logf("run %d: %.3f s to the result, %.3f s to the end", i+1, took.Seconds(), time.Since(began).Seconds())
	}
	b.StopTimer()
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(runs).Seconds(), "median-s")
}
