package bus_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Frames of several dispatches leave in messages of one TLS record, and in larger ones where very many are open; all of them arrive, and
// none is overtaken by one of its dispatch that is too large for a bundle.
func TestBundlesGrowWithManyStreams(t *testing.T) {
	for _, c := range []struct {
		streams, least, most int
		large                int // bytes of a chunk before the last
	}{{60, 14 << 10, 15 << 10, 0}, {300, 118 << 10, 120 << 10, 0}, {300, 1, 120 << 10, 20 << 10}} {
		p := newPair(t, bus.ProbeAfter(time.Hour), bus.KeepaliveEvery(time.Hour))
		w := p.wire(t)
		rows, large := bytes.Repeat([]byte("x"), 1<<10), bytes.Repeat([]byte("y"), c.large)
		var receivers []*bus.Receiver
		ended := make(chan error, c.streams)
		free := p.senders.Busy()
		for range c.streams {
			s, r := p.wholly(schemas.NewID())
			receivers = append(receivers, r)
			send(t, s, &runbusv1.RunnerWorkAccepted{Pid: wholePid})
			if c.large > 0 {
				send(t, s, chunk(large))
			}
			s.Finish(lastChunk(rows), response(), func(err error) { ended <- err })
		}
		free()
		w.wantOrder(t, c.streams)
		for _, r := range receivers {
			next[*runbusv1.RunnerWorkAccepted](t, r)
			want := [][]byte{rows}
			if c.large > 0 {
				want = [][]byte{large, rows}
			}
			for _, b := range want {
				if got := next[*runbusv1.RunnerWorkChunk](t, r); !bytes.Equal(got.GetArrowIpc(), b) {
					t.Fatalf("%d bytes of rows, not %d", len(got.GetArrowIpc()), len(b))
				}
			}
			r.Done(next[*runbusv1.RunnerWorkResult](t, r))
		}
		for range receivers {
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
		}
		if w.largest < c.least || w.largest > c.most {
			t.Errorf("of %d streams the largest bundle has %d bytes, not %d to %d", c.streams, w.largest, c.least, c.most)
		}
		if n := p.receivers.Dropped()[bus.DropGap]; n != 0 {
			t.Errorf("of %d streams %d frames came before those before them", c.streams, n)
		}
	}
}

// Those who come together leave in one message: none of them by itself behind the others, as it was too much for their bundle.
func TestNobodyIsLeftBehind(t *testing.T) {
	p := newPair(t, bus.ProbeAfter(time.Hour), bus.KeepaliveEvery(time.Hour))
	w := p.wire(t)
	for _, size := range []int{100, 1 << 10, 3 << 10, 6 << 10, 14 << 10} {
		rows := bytes.Repeat([]byte("x"), size)
		streams := 0
		for p.senders.GiveWay(); p.senders.StillGivesWay(); streams++ {
			s, r := p.wholly(schemas.NewID())
			defer r.Close()
			send(t, s, &runbusv1.RunnerWorkAccepted{Pid: wholePid})
			s.Finish(lastChunk(rows), response(), func(error) {})
		}
		select {
		case msg := <-w.messages:
			left := map[string]bool{}
			for _, f := range framesOf(t, msg) {
				left[f.GetDispatchId()] = true
			}
			if len(left) != streams {
				t.Errorf("of %d streams with %d bytes each %d left together", streams, size, len(left))
			}
		case <-within(t).Done():
			t.Fatal("nothing leaves")
		}
	}
}
