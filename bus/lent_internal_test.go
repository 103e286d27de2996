package bus

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// counted is a lender that counts.
type counted int

func (c *counted) Recycle() { *c++ }

func TestMemoryOfChunksComesBackOnceConsumed(t *testing.T) {
	var in inbox
	in.init(DefaultWindow, DefaultWindow)
	timing, now := newTiming(nil), time.Now()
	var of [4]counted
	offer := func(seq uint64, lent *counted) verdict {
		return in.offerSized(sizedFrame{frame: &runbusv1.RunnerWorkChunk{Seq: seq, ArrowIpc: []byte("rows")}, size: 16, lent: lent}, now, timing)
	}
	want := func(when string, back ...counted) {
		t.Helper()
		for i, n := range back {
			if of[i] != n {
				t.Errorf("%s the memory of chunk %d came back %d times, not %d", when, i+1, of[i], n)
			}
		}
	}
	for i := range of[:3] {
		if v := offer(uint64(i+1), &of[i]); v != taken {
			t.Fatalf("chunk %d: %d", i+1, v)
		}
	}
	var again counted
	if v := offer(1, &again); v != duplicate {
		t.Fatalf("the first again: %d", v)
	}
	in.done(1)
	want("before it was given out", 0, 0, 0)
	var given []Frame
	for range 2 {
		given, _ = in.next(given)
	}
	want("when it was given out", 0, 0, 0)
	in.done(1)
	want("once consumed", 1, 0, 0)
	in.done(3) // which was not given out
	want("once those before were consumed", 1, 1, 0)
	in.done(3)
	want("the second time", 1, 1, 0)
	if again != 0 {
		t.Error("the memory of a duplicate, of which nobody says that it was consumed, came back")
	}
}

// TestOnlyChunksAreLent: whatever else comes may be kept by whoever reads it.
func TestOnlyChunksAreLent(t *testing.T) {
	msg := &nats.Msg{}
	for name, views := range map[string][]view{"nothing": nil, "a result": {{field: resultNum}}, "several": {{field: chunkNumber}, {field: chunkNumber}}} {
		if lentBy(msg, views) != nil {
			t.Errorf("the message of %s is lent", name)
		}
	}
}
