package bus

import (
	"bytes"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// idleSenders have no writer: the test is it.
func idleSenders() *Senders {
	s := &Senders{
		ref: schemas.RunnerRef{Tenant: "acme", Runner: "edge"}, timing: newTiming(nil), now: time.Now, open: make(map[string]*Sender),
		wake: make(chan struct{}, 1), awake: make(chan struct{}, 1), lingers: time.NewTimer(time.Hour),
	}
	s.lingers.Stop()
	return s
}

func wholeChunk(fill byte) *runbusv1.RunnerWorkChunk {
	return &runbusv1.RunnerWorkChunk{ArrowIpc: bytes.Repeat([]byte{fill}, ChunkBytes)}
}

// A frame that was sent again may be acknowledged, as its first copy arrived, while the second is being published.
func TestMemoryOfAFrameBeingPublishedStays(t *testing.T) {
	s := idleSenders()
	one := s.Open("d", "s", "c", MaxWindow)
	if err := one.Send(t.Context(), wholeChunk('a')); err != nil {
		t.Fatal(err)
	}
	large, seq, _, _ := one.gather(&batch{}, false)
	if large.large == nil || seq != 1 {
		t.Fatalf("the chunk is frame %d, in large memory: %t", seq, large.large != nil)
	}
	want := bytes.Clone(large.entry)
	one.credit(credit{dispatch: "d", session: "s", acknowledged: 1, window: MaxWindow}, time.Now())
	for range 8 { // any of them could have got its memory
		if err := one.Send(t.Context(), wholeChunk('b')); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(large.entry, want) {
		t.Error("another frame was written over one that is being published")
	}
}

func TestMemoryOfALargeFrameIsGivenBackOnce(t *testing.T) {
	s := idleSenders()
	one := s.Open("d", "s", "c", MaxWindow)
	for _, f := range []Frame{wholeChunk('a'), wholeChunk('b'), &runbusv1.RunnerWorkChunk{ArrowIpc: []byte("small")}} {
		if err := one.Send(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	_, seq, _, _ := one.gather(&batch{}, false)
	frames := append([]outFrame(nil), one.out.frames...)
	if one.out.giveBack(frames[0], seq) {
		t.Error("the memory of a frame that is being published is given to others")
	}
	one.published()
	if !one.out.giveBack(frames[0], seq) || !one.out.giveBack(frames[1], seq+1) {
		t.Error("the memory of large frames is not given back")
	}
	if one.out.giveBack(frames[2], seq+2) {
		t.Error("the memory of a small frame is given to large ones")
	}
}

func TestLargeFramesAreWhatTheirChunkIs(t *testing.T) {
	for _, n := range []int{largeFrom - 1, largeFrom, ChunkBytes} {
		for range 3 { // in memory that was another's, too
			f := &runbusv1.RunnerWorkChunk{DispatchId: "d", Session: "s", Seq: 1, ArrowIpc: bytes.Repeat([]byte{'x'}, n)}
			e, used, err := encodeFrame(nil, f)
			if err != nil || used != 0 || (e.large != nil) != (n >= largeFrom) {
				t.Fatalf("%d bytes: %d of the shared memory, large %t, %v", n, used, e.large != nil, err)
			}
			got := &runbusv1.RunnerWorkChunk{}
			if err := unmarshal("RunnerWorkChunk", e.entry[e.body:], got); err != nil || !bytes.Equal(got.GetArrowIpc(), f.GetArrowIpc()) {
				t.Fatalf("%d bytes: %d came, %v", n, len(got.GetArrowIpc()), err)
			}
			(&outbox{}).giveBack(outFrame{encoded: e}, 1)
		}
	}
}
