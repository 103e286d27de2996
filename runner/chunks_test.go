package runner

import (
	"testing"
	"time"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// What was found late, and is then held back for the result, is counted once and leaves with it.
func TestLateRowsThatAreHeldLeaveOnce(t *testing.T) {
	cp := newControlPlane(t)
	conn := bus.NewConn(cp.RunnerConn(t, edge))
	senders, err := bus.NewSenders(conn, edge)
	must(t, err)
	t.Cleanup(func() { must(t, senders.Close()) })
	rows := []byte("rows")
	once := bus.Digest{Scheme: bus.SchemeXXH3}
	once.Add(rows)
	for give := time.Now().Add(patience); ; {
		if time.Now().After(give) {
			t.Fatal("no rows were held back")
		}
		sender := &bus.Sender{}
		senders.OpenIn(sender, bus.Opening{
			Dispatch: schemas.NewID(), Session: "session", Replica: cp.receivers.Replica(), WindowBytes: bus.MaxWindow, Bundle: true, Whole: true,
		}, time.Now())
		must(t, sender.Send(t.Context(), &runbusv1.RunnerWorkAccepted{Pid: 4711}))
		c := &chunks{ctx: t.Context(), sender: sender, alarm: func(time.Duration) {}, written: written{space: &workspace{}}}
		c.space.digest.Scheme = bus.SchemeXXH3
		c.counts = source.NewOutput(c, source.Limits{}, nil)
		if n, err := c.Write(rows); n != len(rows) || err != nil {
			t.Fatalf("written: %d, %v", n, err)
		}
		if late, _ := c.isLate(uptime() + time.Hour); !late {
			t.Fatal("the rows are not late")
		}
		must(t, c.finish())
		if !c.whole { // a process that pauses for 4 ms sends what it has
			sender.Close()
			continue
		}
		c.flushLate()
		if c.total() != int64(len(rows)) || string(c.space.digest.XXH3()) != string(once.XXH3()) {
			t.Errorf("%d bytes with the checksum %x are counted, want %d with %x", c.total(), c.space.digest.XXH3(), len(rows), once.XXH3())
		}
		last := c.last(&runbusv1.RunnerWorkResult{Outcome: &runbusv1.RunnerWorkResult_Response{Response: &runbusv1.RunFetchResponse{Rows: 1}}})
		if string(last.GetArrowIpc()) != string(rows) {
			t.Errorf("%q leaves with the result", last.GetArrowIpc())
		}
		c.end()
		c.forget()
		sender.Close()
		return
	}
}
