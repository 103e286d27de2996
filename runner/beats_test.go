package runner

import (
	"sync"
	"testing"
)

// The numbers of heartbeats say in which order they were made, whoever has them sent.
func TestHeartbeatsAreNumbered(t *testing.T) {
	cp := newControlPlane(t)
	p := cp.start(t, nil, nil) // has taken number 1
	var senders sync.WaitGroup
	for range 50 {
		senders.Go(p.report)
	}
	senders.Wait()
	for want := uint64(2); want <= 51; want++ {
		if got := receive(t, cp.beats, "heartbeat").GetNumber(); got != want {
			t.Fatalf("number %d comes where %d was due", got, want)
		}
	}
}
