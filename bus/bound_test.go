package bus_test

import (
	"bytes"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Frames of several dispatches leave in messages of one TLS record, and in larger ones where very many are open; all of them arrive.
func TestBundlesGrowWithManyStreams(t *testing.T) {
	for _, c := range []struct{ streams, least, most int }{{60, 14 << 10, 15 << 10}, {300, 58 << 10, 60 << 10}} {
		p := newPair(t)
		watcher := p.bus.Conn(t, embedded.UserDispatch)
		messages := make(chan *nats.Msg, 4*c.streams)
		if _, err := watcher.ChanSubscribe(schemas.ResultsOf(p.receivers.Replica()), messages); err != nil {
			t.Fatal(err)
		}
		if err := watcher.Flush(); err != nil {
			t.Fatal(err)
		}
		rows := bytes.Repeat([]byte("x"), 1<<10)
		var receivers []*bus.Receiver
		ended := make(chan error, c.streams)
		free := p.senders.Busy()
		for range c.streams {
			s, r := p.wholly(schemas.NewID())
			receivers = append(receivers, r)
			send(t, s, &runbusv1.RunnerWorkAccepted{Pid: wholePid})
			s.Finish(lastChunk(rows), response(), func(err error) { ended <- err })
		}
		free()
		for _, r := range receivers {
			next[*runbusv1.RunnerWorkAccepted](t, r)
			if got := next[*runbusv1.RunnerWorkChunk](t, r); !bytes.Equal(got.GetArrowIpc(), rows) {
				t.Fatalf("%d bytes of rows", len(got.GetArrowIpc()))
			}
			r.Done(next[*runbusv1.RunnerWorkResult](t, r))
		}
		for range receivers {
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
		}
		if err := watcher.Flush(); err != nil {
			t.Fatal(err)
		}
		largest := 0
		for len(messages) > 0 {
			largest = max(largest, len((<-messages).Data))
		}
		if largest < c.least || largest > c.most {
			t.Errorf("of %d streams the largest message has %d bytes, not %d to %d", c.streams, largest, c.least, c.most)
		}
	}
}
