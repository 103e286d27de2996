package registry_test

import (
	"runtime"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/org-runink/runbus/cp/registry"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// beating is a runner whose heartbeats are counted by what became of them.
type beating struct {
	*rt.Runner
	stack    *rt.Stack
	replicas []*rt.Stack // by their metrics
}

// beatingOn is one whose process has said hello, and sent no heartbeat yet.
func beatingOn(t *testing.T, key rt.Credential, replicas ...*rt.Stack) *beating {
	t.Helper()
	b := &beating{replicas[0].Connect(t, key, "edge-1"), replicas[0], replicas}
	if a := b.Hello(t, nil); a.GetError() != nil {
		t.Fatal(a)
	}
	return b
}

// counted is how many heartbeats were handled, and how many of them, for want of the store or of room, had no effect that they should have.
func (b *beating) counted(t *testing.T) (handled, lost float64) {
	t.Helper()
	for _, s := range b.replicas {
		result := func(labels map[string]string) float64 { return s.Metric(t, "runbus_registry_heartbeats_total", labels) }
		all, dropped := result(nil), 0.0
		for _, reason := range []string{"flood", "overload"} {
			dropped += s.Metric(t, "runbus_registry_dropped_total", map[string]string{"reason": reason})
		}
		handled += all + dropped
		lost += all + dropped - result(map[string]string{"result": "ok"}) - result(map[string]string{"result": "overtaken"})
	}
	return handled, lost
}

// send sends heartbeats at once and waits until they are handled; if any is lost, the first of them is sent again.
func (b *beating) send(t *testing.T, list ...*runbusv1.RunnerHeartbeat) {
	t.Helper()
	before, lostBefore := b.counted(t)
	for _, beat := range list {
		rt.Must(t, b.Conn.Publish(schemas.HeartbeatSubject(b.Ref), beat))
	}
	rt.Must(t, b.Conn.NATS().Flush())
	for give := time.Now().Add(rt.Patience); ; runtime.Gosched() {
		handled, lost := b.counted(t)
		switch {
		case handled >= before+float64(len(list)) && lost == lostBefore:
			return
		case handled >= before+float64(len(list)):
			b.send(t, list[0])
			return
		case time.Now().After(give):
			t.Fatalf("%v of %d heartbeats are handled", handled-before, len(list))
		}
	}
}

// record is what the leader has of the runner.
func (b *beating) record(t *testing.T) registry.Record {
	t.Helper()
	row, err := jetstream.TableOf[registry.Record](b.stack.Store, jetstream.Heartbeats).Get(t.Context(), schemas.RunnerKey(b.Ref))
	rt.Must(t, err)
	return row.Value
}

// numbered is the heartbeat of that number, which tells what no other does.
func (b *beating) numbered(n uint64) *runbusv1.RunnerHeartbeat {
	return &runbusv1.RunnerHeartbeat{Session: b.Session, ProcessNonce: b.Nonce, Number: n, InFlight: int32(n), Limit: 4, Draining: n%2 == 0}
}

// Heartbeats of one process are handled at once, by two replicas: whichever is the last, the newest counts. Another hello does not bring an
// older one back; another process begins at 1.
func TestTheNewestHeartbeatCounts(t *testing.T) {
	s := rt.Start(t, nil)
	second := *s
	second.Metrics = prometheus.NewRegistry()
	s.Replica(t, func(d *registry.Deps) { d.Metrics = second.Metrics })
	key := s.Mint(t, s.Admin, "edge")
	b := beatingOn(t, key, s, &second)
	counts := func(n uint64) {
		t.Helper()
		want := b.numbered(n)
		if rec := b.record(t); rec.Session != b.Session || !rec.Ready || rec.Beat != n || rec.InFlight != int(want.GetInFlight()) || rec.Draining != want.GetDraining() {
			t.Fatalf("it should be number %d that counts: %+v", n, rec)
		}
	}
	for newest := uint64(4); newest <= 40; newest += 4 {
		b.send(t, b.numbered(newest), b.numbered(newest-1), b.numbered(newest-2), b.numbered(newest-3))
		counts(newest)
	}
	b.Hello(t, nil)
	b.send(t, b.numbered(3))
	if rec := b.record(t); rec.Beat != 40 || rec.InFlight != 40 {
		t.Errorf("after another hello, and a heartbeat of long ago: %+v", rec)
	}
	b.send(t, b.numbered(41))
	counts(41)
	b = beatingOn(t, key, s, &second)
	b.send(t, b.numbered(1))
	counts(1)
}

// Who does not number its heartbeats is believed in the order in which they are handled.
func TestHeartbeatsWithoutNumbers(t *testing.T) {
	s := rt.Start(t, nil)
	b := beatingOn(t, s.Mint(t, s.Admin, "edge"), s)
	for _, n := range []int32{3, 2, 4} {
		b.send(t, &runbusv1.RunnerHeartbeat{Session: b.Session, ProcessNonce: b.Nonce, InFlight: n})
		if got := b.record(t).InFlight; got != int(n) {
			t.Errorf("%d are in flight, %d are recorded", n, got)
		}
	}
}
