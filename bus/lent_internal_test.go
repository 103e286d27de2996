package bus

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// counted is a lender that counts.
type counted int

func (c *counted) Recycle() { *c++ }

// TestMemoryComesBackByReturnOnly: whatever else becomes of a frame, somebody may still read it.
func TestMemoryComesBackByReturnOnly(t *testing.T) {
	all := &Receivers{timing: newTiming(nil), wake: make(chan struct{}, 1), lingers: time.NewTimer(time.Hour)}
	all.lingers.Stop()
	r := &Receiver{}
	r.begin(all, schemas.RunnerRef{Tenant: "acme", Runner: "edge"}, "s", "d", MaxWindow, MaxWindow)
	var of [7]counted
	offer := func(seq uint64, lent *counted, size int) verdict {
		t.Helper()
		f := &runbusv1.RunnerWorkChunk{Seq: seq, ArrowIpc: make([]byte, size)}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.news.Store(true)
		return r.in.offerSized(sizedFrame{frame: f, size: int64(size), lent: lent}, time.Now(), all.timing)
	}
	want := func(when string, back ...counted) {
		t.Helper()
		for i, n := range back {
			if of[i] != n {
				t.Errorf("%s the memory of chunk %d came back %d times, not %d", when, i+1, of[i], n)
			}
		}
	}
	take := func() *runbusv1.RunnerWorkChunk {
		t.Helper()
		f, err := r.Try()
		c, ok := f.(*runbusv1.RunnerWorkChunk)
		if err != nil || !ok {
			t.Fatalf("took %v, %v", f, err)
		}
		return c
	}
	for i := range of {
		size := 256 << 10
		if i == 5 {
			size = 100
		}
		if v := offer(uint64(i+1), &of[i], size); v != taken {
			t.Fatalf("chunk %d: %d", i+1, v)
		}
	}
	var again counted
	if v := offer(1, &again, 256<<10); v != duplicate {
		t.Fatalf("the first again: %d", v)
	}

	r.Return(&runbusv1.RunnerWorkChunk{Seq: 1, ArrowIpc: make([]byte, 256<<10)})
	want("before it was given out", 0)
	first, second := take(), take()
	want("when they were given out", 0, 0)
	r.Done(first)
	want("when it was consumed", 0, 0)
	r.Return(first)
	want("when it was consumed before", 0, 0)
	r.Return(second)
	want("returned", 0, 1, 0)
	if second.ArrowIpc != nil || r.in.used != 512<<10 || r.in.consumed != 2 {
		t.Errorf("the second has %d bytes; %d frames with %d bytes are consumed", len(second.ArrowIpc), r.in.consumed, r.in.used)
	}
	r.Return(second)
	want("returned twice", 0, 1, 0)

	third, fourth := take(), take()
	r.Done(fourth)
	r.Return(third)
	want("returned when a later one was consumed", 0, 1, 0, 0)

	r.Return(take())
	want("returned", 0, 1, 0, 0, 1)
	small := take()
	r.Return(small)
	want("returned, small,", 0, 1, 0, 0, 1, 0)
	if len(small.ArrowIpc) != 100 {
		t.Errorf("a chunk that was not lent has %d bytes", len(small.ArrowIpc))
	}

	last := take()
	r.fail(ErrClosed)
	r.Return(last)
	want("after the end", 0, 1, 0, 0, 1, 0, 0)
	if again != 0 {
		t.Error("the memory of a duplicate came back")
	}
}

// TestOnlyChunksAreLent: whatever else comes may be kept by whoever reads it.
func TestOnlyChunksAreLent(t *testing.T) {
	for name, c := range map[string]struct {
		msg   any
		views []view
		lent  bool
	}{
		"nothing":                     {new(counted), nil, false},
		"a result":                    {new(counted), []view{{field: resultNum}}, false},
		"a whole dispatch":            {new(counted), []view{{field: wholeNumber}}, false},
		"several":                     {new(counted), []view{{field: chunkNumber}, {field: chunkNumber}}, false},
		"a chunk and a result":        {new(counted), []view{{field: chunkNumber}, {field: resultNum}}, false},
		"a chunk":                     {new(counted), []view{{field: chunkNumber}}, true},
		"a chunk, by what lends none": {struct{}{}, []view{{field: chunkNumber}}, false},
	} {
		if got := lentBy(c.msg, c.views) != nil; got != c.lent {
			t.Errorf("the message of %s is lent: %t", name, got)
		}
	}
	_, lends := any(&nats.Msg{}).(lender)
	if got := lentBy((&Receivers{}).lender(&nats.Msg{}), []view{{field: chunkNumber}}) != nil; got != lends {
		t.Errorf("a message of a chunk is lent: %t; messages lend: %t", got, lends)
	}
}
