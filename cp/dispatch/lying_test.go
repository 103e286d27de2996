package dispatch_test

import (
	"math"
	"strconv"
	"testing"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// What a lying runner says of rows and bytes is not shown, recorded or counted beyond what the fetch allows, however its result comes; the
// bytes that came are those that the control plane saw.
func TestALyingRunnersCounts(t *testing.T) {
	const maxRows, maxBytes = 100, 1000
	for name, c := range map[string]struct{ says, rows, bytes int64 }{
		"negative": {math.MinInt64, 0, 0},
		"minus 1":  {-1, 0, 0},
		"huge":     {math.MaxInt64, maxRows, maxBytes},
		"over":     {maxBytes + 1, maxRows, maxBytes},
		"honest":   {7, 7, 7},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t, nil, nil)
			e.able(t)
			response := func() *runbusv1.RunFetchResponse {
				return &runbusv1.RunFetchResponse{Rows: c.says, Bytes: c.says, WireBytes: c.says, RunnerPid: 4711}
			}
			req := request("able-1")
			req.Fetch.MaxRows, req.Fetch.MaxBytes = maxRows, maxBytes
			for _, way := range []string{"chunks", "progress and chunks", "whole"} {
				f := e.start(t, req)
				switch way {
				case "whole":
					m := e.runner.Assignment(t)
					digest := bus.Digest{Scheme: bus.SchemeOf(m)}
					digest.Add([]byte("one"))
					rt.Must(t, e.runner.Conn.Publish(schemas.ResultDataSubject(e.runner.Ref, m.GetReplica(), m.GetDispatchId()), &runbusv1.RunnerWorkWhole{
						DispatchId: m.GetDispatchId(), Session: m.GetSession(), Seq: 1, ArrowIpc: []byte("one"), RestXxh3: digest.XXH3(),
						Response: response(),
					}))
				default:
					w := e.accept(t)
					if way != "chunks" {
						rt.Send(t, w.Sender, &runbusv1.RunnerWorkProgress{Update: &runbusv1.RunFetchUpdate{
							Phase: runbusv1.Phase_PHASE_STREAMING, Rows: c.says, Bytes: c.says,
						}})
					}
					digest := bus.Digest{Scheme: bus.SchemeOf(w.assignment)}
					digest.Add([]byte("one"))
					rt.Send(t, w.Sender, &runbusv1.RunnerWorkChunk{ArrowIpc: []byte("one"), Rows: c.says, Bytes: c.says})
					rt.Send(t, w.Sender, &runbusv1.RunnerWorkResult{
						Started: true, RestXxh3: digest.XXH3(), Outcome: &runbusv1.RunnerWorkResult_Response{Response: response()},
					})
				}
				o := f.wait(t)
				wantOutcome(t, o, dispatch.OutcomeCompleted, "", "")
				if got := o.Response; got.GetRows() != c.rows || got.GetBytes() != c.bytes || got.GetWireBytes() != int64(len("one")) {
					t.Errorf("%s: the caller is told %v", way, got)
				}
				if len(f.sink.progress) != 1 || f.sink.progress[0].GetRows() != c.rows || f.sink.progress[0].GetBytes() != c.bytes {
					t.Errorf("%s: progress = %v", way, f.sink.progress)
				}
			}
			end := e.Events(t, "dispatch.end")
			if len(end) != 3 {
				t.Fatalf("audit = %v", end)
			}
			for _, event := range end {
				if d := event.GetDetails(); d["rows"] != strconv.FormatInt(c.rows, 10) || d["bytes"] != strconv.FormatInt(c.bytes, 10) {
					t.Errorf("audit = %v", d)
				}
			}
			if rows, size := e.Metric(t, "runbus_result_rows_total", nil), e.Metric(t, "runbus_result_bytes_total", nil); rows != float64(3*c.rows) || size != float64(3*c.bytes) {
				t.Errorf("counted %v rows, %v bytes", rows, size)
			}
		})
	}
}
