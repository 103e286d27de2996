package bus_test

import (
	"sync/atomic"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// What ops can't see is told from the message on behind which somebody watches, of one dispatch or of several together, and while nobody
// does no subject is asked about.
func TestToldWhileSomebodyWatches(t *testing.T) {
	p := newPair(t)
	var watches atomic.Bool
	told := make(chan string, 16)
	p.receivers.OnBundled(func(subject string, _ proto.Message) { told <- subject })
	p.receivers.TellIf(watches.Load, func(string) bool {
		if !watches.Load() {
			t.Error("a subject is asked about while nobody watches")
		}
		return true
	})
	for _, on := range []bool{false, true, false} {
		watches.Store(on)
		for _, together := range []bool{false, true} {
			id := schemas.NewID()
			r := p.receivers.Open(edge, session, id, 0)
			at := id
			if together {
				at = "all"
			}
			msg, err := bus.NewMsg(schemas.ResultDataSubject(edge, p.receivers.Replica(), at), &runbusv1.RunnerWorkFrames{Frames: []*runbusv1.RunnerWorkFrame{
				{Frame: &runbusv1.RunnerWorkFrame_Accepted{Accepted: &runbusv1.RunnerWorkAccepted{DispatchId: id, Session: session, Seq: 1}}},
				{Frame: &runbusv1.RunnerWorkFrame_Chunk{Chunk: &runbusv1.RunnerWorkChunk{DispatchId: id, Session: session, Seq: 2, ArrowIpc: []byte("x")}}},
			}})
			if err == nil {
				err = p.runner.NATS().PublishMsg(msg)
			}
			if err != nil {
				t.Fatal(err)
			}
			next[*runbusv1.RunnerWorkAccepted](t, r)
			next[*runbusv1.RunnerWorkChunk](t, r)
			want := 0
			if on {
				want = 1
			}
			if n := len(told); n != want {
				t.Fatalf("watched %t, together %t: %d frames were told", on, together, n)
			}
			if on && <-told != schemas.ResultCtlSubject(edge, p.receivers.Replica(), id) {
				t.Error("a frame was told of another subject")
			}
			r.Close()
		}
	}
}
