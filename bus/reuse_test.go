package bus_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Dispatches that have the same memory one after the other each arrive once, whenever all streams are resumed meanwhile.
func TestDispatchesTakeTurnsWithMemory(t *testing.T) {
	p := newPair(t, bus.ResumeEvery(5*time.Millisecond))
	resume := make(chan struct{}, 1) // beside a dispatch, at whatever moment that is
	var resuming sync.WaitGroup
	resuming.Go(func() {
		for range resume {
			p.senders.Resume()
		}
	})
	defer resuming.Wait()
	defer close(resume)
	one, again := &bus.Sender{}, 0
	for n := range 200 {
		dispatch := fmt.Sprintf("d%d", n)
		r := p.receivers.Open(edge, session, dispatch, 0)
		p.senders.OpenIn(one, bus.Opening{
			Dispatch: dispatch, Session: session, Replica: p.receivers.Replica(), Bundle: true, Together: true, Whole: true,
		}, time.Now())
		send(t, one, &runbusv1.RunnerWorkAccepted{Pid: wholePid})
		ended := make(chan error, 1)
		resume <- struct{}{}
		one.Finish(lastChunk([]byte(dispatch)), response(), func(err error) { ended <- err })
		next[*runbusv1.RunnerWorkAccepted](t, r)
		c := next[*runbusv1.RunnerWorkChunk](t, r)
		if string(c.GetArrowIpc()) != dispatch || c.GetDispatchId() != dispatch {
			t.Fatalf("%s got %v", dispatch, c)
		}
		r.Done(c)
		r.Done(next[*runbusv1.RunnerWorkResult](t, r))
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		if f, err := r.Try(); f != nil || err != nil {
			t.Fatalf("%s: after the end: %v, %v", dispatch, f, err)
		}
		r.Close()
		if one.Spent() { // else it left in several frames
			again++
		} else {
			one = &bus.Sender{}
		}
	}
	t.Logf("%d dispatches had memory of another one", again)
}
