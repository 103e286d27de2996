package bus_test

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// wire is what leaves for a replica, as one who watches it sees it.
type wire struct {
	messages chan *nats.Msg
	last     map[string]uint64 // number of the frame that came last, by dispatch
	largest  int               // bytes of a bundle
}

func (p *pair) wire(t *testing.T) *wire {
	t.Helper()
	w := &wire{messages: make(chan *nats.Msg, 1<<14), last: make(map[string]uint64)}
	watcher := p.bus.Conn(t, embedded.UserDispatch)
	if _, err := watcher.ChanSubscribe(schemas.ResultsOf(p.receivers.Replica()), w.messages); err != nil {
		t.Fatal(err)
	}
	if err := watcher.Flush(); err != nil {
		t.Fatal(err)
	}
	return w
}

// wantOrder waits for the results of so many dispatches. Each frame is the next one of its dispatch.
func (w *wire) wantOrder(t *testing.T, results int) {
	t.Helper()
	for ctx := within(t); results > 0; {
		select {
		case msg := <-w.messages:
			for _, f := range framesOf(t, msg) {
				if d := f.GetDispatchId(); f.GetSeq() != w.last[d]+1 {
					t.Fatalf("with %d dispatches to end, frame %d of %s, a %T, came after frame %d", results, f.GetSeq(), d, f, w.last[d])
				}
				w.last[f.GetDispatchId()] = f.GetSeq()
				switch f.(type) {
				case *runbusv1.RunnerWorkResult, *runbusv1.RunnerWorkWhole:
					results--
				}
			}
			if bus.TypeOf(msg) == "RunnerWorkFrames" {
				w.largest = max(w.largest, len(msg.Data))
			}
		case <-ctx.Done():
			t.Fatalf("%d dispatches did not end", results)
		}
	}
}

// framesOf is what is in one message.
func framesOf(t *testing.T, msg *nats.Msg) (frames []bus.Frame) {
	t.Helper()
	m, err := bus.DecodeAny(bus.TypeOf(msg), msg.Data)
	if err != nil {
		t.Fatal(err)
	}
	if f, ok := m.(bus.Frame); ok {
		return []bus.Frame{f}
	}
	bundle, ok := m.(*runbusv1.RunnerWorkFrames)
	if !ok {
		t.Fatalf("a %T among frames", m)
	}
	for _, f := range bundle.GetFrames() {
		switch f := f.GetFrame().(type) {
		case *runbusv1.RunnerWorkFrame_Accepted:
			frames = append(frames, f.Accepted)
		case *runbusv1.RunnerWorkFrame_Progress:
			frames = append(frames, f.Progress)
		case *runbusv1.RunnerWorkFrame_Chunk:
			frames = append(frames, f.Chunk)
		case *runbusv1.RunnerWorkFrame_Whole:
			frames = append(frames, f.Whole)
		case *runbusv1.RunnerWorkFrame_Result:
			frames = append(frames, f.Result)
		default:
			t.Fatalf("a %T in a bundle", f)
		}
	}
	return frames
}

// The bounds of a bundle: of one that anybody makes, and of one that is made where very many streams are open.
const (
	oneBound  = 15 << 10
	manyBound = 60 << 10
)

// anyChunk is the size of a chunk that is small, about as large as a bundle may be, or between, or larger than that.
func anyChunk(random *rand.Rand) int {
	between := func(from, to int) int { return from + random.IntN(to-from) }
	switch random.IntN(7) {
	case 0, 1:
		return between(1, 300)
	case 2:
		return between(1, oneBound)
	case 3:
		return between(oneBound-120, oneBound+20)
	case 4:
		return between(oneBound, manyBound)
	case 5:
		return between(manyBound-120, manyBound+20)
	}
	return between(manyBound, manyBound+(20<<10))
}

// Whatever the frames of a stream are, however many streams there are, and whatever their replicas read: the frames of each leave in
// order, and once.
func TestFramesLeaveInOrder(t *testing.T) {
	const never = time.Hour // so that nothing is sent again but what the replica misses
	p := newPair(t, bus.ProbeAfter(never), bus.KeepaliveEvery(never), bus.ResendEvery(never), bus.OrphanAfter(never))
	w := p.wire(t)
	fill := bytes.Repeat([]byte("x"), bus.ChunkBytes)
	for seed, streams := range []int{1, 2, 40, 128, 129, 200, 200} {
		random := rand.New(rand.NewPCG(uint64(seed), 7)) // the same in each run
		receivers := make([]*bus.Receiver, streams)
		ended := make(chan error, streams)
		free := p.senders.Busy()
		for i := range receivers {
			id := schemas.NewID()
			receivers[i] = p.receivers.Open(edge, session, id, 0)
			o := bus.Opening{Dispatch: id, Session: session, Replica: p.receivers.Replica(), WindowBytes: receivers[i].Window(), Bundle: true, Together: true}
			switch random.IntN(8) {
			case 0:
				o.Bundle, o.Together = false, false
			case 1:
				o.Together = false
			case 2:
				o.Trace.Parent = "trace of " + id
			case 3:
				o.Whole = true
			}
			one := &bus.Sender{}
			p.senders.OpenIn(one, o, time.Now())
			send(t, one, &runbusv1.RunnerWorkAccepted{Pid: wholePid})
			for left := random.IntN(100 << 10); left > 0; { // within the window of one of 200
				if random.IntN(4) == 0 {
					send(t, one, progress("p"))
				}
				n := min(anyChunk(random), left)
				left -= n
				send(t, one, chunk(fill[:n]))
			}
			one.Finish(chunk(fill[:1+random.IntN(300)]), response(), func(err error) { ended <- err })
		}
		free()
		w.wantOrder(t, streams)
		for _, r := range receivers {
			for over := false; !over; {
				f, err := r.Next(within(t))
				if err != nil {
					t.Fatal(err)
				}
				_, over = f.(*runbusv1.RunnerWorkResult)
				r.Done(f)
			}
			r.Close()
		}
		for range receivers {
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
		}
	}
	if dropped := p.receivers.Dropped(); len(dropped) > 0 {
		t.Errorf("dropped: %v", dropped)
	}
}
