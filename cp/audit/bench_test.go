package audit

import (
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
)

// BenchmarkDispatch is what one dispatch costs in the audit, from its beginning to the mirror: cpu-ns/op are all processors' time. A
// batch holds as many events as it does under full load.
func BenchmarkDispatch(b *testing.B) {
	bus := bustest.Start(b)
	s := openStore(b, bus, bus.Conn(b, embedded.UserSec))
	if err := s.OpenMirrors(ctxOf(b), bus.Conn(b, embedded.UserMirror)); err != nil {
		b.Fatal(err)
	}
	l := newLog(b, bus, s, "one")
	run(b, l)
	begin := Brief{
		Tenant: "acme", Actor: "person:wanda", Action: "dispatch.start", Subject: "dispatch:01ARZ3NDEKTSV4RRFFQ69G5FAV", Outcome: "ok",
		Details: []Detail{{Name: "chosen", Value: "for this action"}, {Name: "runner", Value: "edge-1"}, {Name: "source", Value: "file"}},
	}
	end := Brief{
		Tenant: "acme", Actor: "person:wanda", Action: "dispatch.end", Subject: "dispatch:01ARZ3NDEKTSV4RRFFQ69G5FAV", Outcome: "ok",
		Details: []Detail{
			Int("bytes", 1024), {Name: "chosen", Value: "for this action"}, {Name: "outcome", Value: "completed"}, Took("ran", 812345*time.Nanosecond), Int("rows", 1), {Name: "runner", Value: "edge-1"}, {Name: "source", Value: "file"},
		},
	}
	var open [64]Opening
	b.ReportAllocs()
	before := processorTime(b)
	for i := 0; b.Loop(); i++ {
		begin.At = time.Now()
		l.Begin(&open[i%len(open)], &begin)
		end.At = begin.At.Add(time.Millisecond)
		l.End(&open[i%len(open)], &end)
		if i%batchWorth == batchWorth-1 {
			if err := l.Record(b.Context(), Event("person:wanda", "bench.batch", "batch", "ok")); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(float64(processorTime(b)-before)/float64(b.N), "cpu-ns/op")
}

// processorTime is what this process has used.
func processorTime(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
