package dispatch_test

import (
	"crypto/sha256"
	"testing"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// nobody takes a result and forgets it.
type nobody struct{}

func (nobody) Accepted(dispatch.Accepted) error        { return nil }
func (nobody) Progress(*runbusv1.RunFetchUpdate) error { return nil }
func (nobody) Chunk([]byte) error                      { return nil }
func (nobody) Abandon()                                {}

// One dispatch with 1 KiB of result, 64 at a time for each processor; the runner, the bus and the audit are in this process and counted.
func BenchmarkFetch(b *testing.B) {
	e := newEnv(b, func(d *dispatch.Deps) { d.Watched = func(string) bool { return false } }, nil)
	streams, err := bus.NewSenders(e.runner.Conn, e.runner.Ref)
	rt.Must(b, err)
	piece := make([]byte, 1<<10)
	sum := sha256.Sum256(piece)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		answer := func(a *runbusv1.RunnerWorkAssignment, _ bus.Trace) {
			s := streams.Open(a.GetDispatchId(), a.GetSession(), a.GetReplica(), a.GetWindowBytes())
			s.Bundle()
			for _, f := range []bus.Frame{
				&runbusv1.RunnerWorkAccepted{Pid: 1},
				&runbusv1.RunnerWorkChunk{ArrowIpc: piece, Rows: 1, Bytes: 1 << 10},
				&runbusv1.RunnerWorkResult{Started: true, StreamSha256: sum[:], Outcome: &runbusv1.RunnerWorkResult_Response{
					Response: &runbusv1.RunFetchResponse{Rows: 1, Bytes: 1 << 10},
				}},
			} {
				if err := s.Send(b.Context(), f); err != nil {
					b.Error(err)
				}
			}
		}
		for {
			select {
			case msg := <-e.runner.Work:
				if err := bus.Assignments(msg, answer); err != nil {
					b.Error(err)
				}
			case <-stop:
				return
			}
		}
	}()
	req := request("edge-1")
	req.Phases = false
	b.ReportAllocs()
	b.SetParallelism(64)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if o := e.d.Fetch(b.Context(), req, "", nobody{}); o.Code != dispatch.OutcomeCompleted {
				b.Errorf("%s: %v", o.Code, o.Err)
			}
		}
	})
	b.StopTimer()
	close(stop)
	<-stopped
	rt.Must(b, streams.Close())
}
