package bus

import (
	"time"

	"google.golang.org/protobuf/proto"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Bounds of what one stream holds at the replica, whatever its runner sends. The memory of a frame is at most about twice what it is
// encoded in: that of a message of which it is more than half (own), or the 516 KiB in which the client of `make build` gathers one of 256 KiB
// or more (lender).
const (
	mostHeldBytes  = 2*MaxWindow + 64<<10 // encoded
	mostHeldFrames = 1024
)

// inbox is the receiving half of a result stream without its input and output: order, what is consumed, which credit is
// due. It is not safe for concurrent use.
//
// Window arithmetic is in positions of the stream of chunk bytes: got ≥ used, and the runner may send up to limit.
type inbox struct {
	window   int64       // bytes the runner may have under way
	queue    []heldFrame // frames consumed+1 … last
	few      [4]heldFrame
	consumed uint64
	handed   uint64 // given out by next; consumed ≤ handed ≤ last
	last     uint64 // received in order
	highest  uint64 // seen, in order or not; highest > last is a gap
	acked    uint64 // told to the runner
	final    uint64 // number of the result, 0 until it came
	held     int64  // encoded bytes of the frames in queue, whatever their type
	got      int64  // bytes up to last
	used     int64  // bytes up to consumed
	limit    int64  // told to the runner

	small      int  // consumed frames without bytes since the last credit
	due        bool // a credit is to go out
	resend     bool // …that asks for everything after last
	heldOnly   bool // …that acknowledges all that is held here, not only what is consumed
	askedAt    time.Time
	movedAt    time.Time
	creditedAt time.Time
}

type heldFrame struct {
	frame Frame  // nil once it was given out
	whole *whole // what comes before it, of one that was a RunnerWorkWhole
	bytes int64  // of the window
	size  int64  // encoded
	lent  lender // lends its bytes, for Receiver.Return; nil for most
}

// verdict is what became of a frame that was offered.
type verdict int

const (
	taken     verdict = iota
	duplicate         // it is here already
	gap               // one before it is missing
	overrun           // over what a stream may hold, or after the result
)

// init begins a stream whose assignment says told bytes, and which is to have window. few is the first memory of queue, so in
// stays where it is.
func (in *inbox) init(window, told int64) {
	in.window, in.limit = window, told
	in.queue = in.few[:0]
}

// offer takes the next frame in, or drops it and says why. A gap asks for a resend at once if none was asked lately.
func (in *inbox) offer(f Frame, now time.Time, t timing) verdict {
	return in.offerSized(sizedFrame{frame: f, size: int64(proto.Size(f))}, now, t)
}

// offerSized is offer for a frame whose encoded size is known.
func (in *inbox) offerSized(one sizedFrame, now time.Time, t timing) verdict {
	f, size := one.frame, one.size
	seq, n := f.GetSeq(), one.chunkBytes()
	switch {
	case seq <= in.last:
		return duplicate
	case in.final != 0:
		return overrun
	case seq > in.last+1:
		in.highest = max(in.highest, seq)
		in.ask(now, t)
		return gap
	case in.full(size):
		in.highest = max(in.highest, seq)
		return overrun
	}
	in.last = seq
	in.highest = max(in.highest, seq)
	in.got += n
	in.held += size
	in.queue = append(in.queue, heldFrame{f, one.whole, n, size, one.lent})
	in.movedAt = now
	if _, ok := f.(*runbusv1.RunnerWorkResult); ok {
		in.final, in.highest = seq, seq
	}
	if seq == 1 {
		in.creditedAt = now // keepalives count from here
		in.due = in.due || in.limit > in.used+in.window && in.final == 0
	}
	return taken
}

// full reports whether a frame of size bytes more would be over what a stream may hold. Every frame counts: the window holds
// back chunks only, and a runner may send what it likes.
func (in *inbox) full(size int64) bool {
	return in.held+size > mostHeldBytes || len(in.queue) >= mostHeldFrames
}

// ask makes a credit due that asks for a resend, unless one was asked within t.resend or there is no room for it.
func (in *inbox) ask(now time.Time, t timing) {
	if now.Sub(in.askedAt) >= t.resend && !in.full(ChunkBytes) {
		in.askedAt = now
		in.due, in.resend, in.heldOnly = true, true, true
	}
}

// next gives the next frame out, once, behind the frames that came in one with it. The memory of into is used.
func (in *inbox) next(into []Frame) ([]Frame, bool) {
	if in.handed == in.last {
		return into, false
	}
	h := &in.queue[in.handed-in.consumed]
	if h.whole != nil {
		into = h.whole.appendTo(into)
	}
	into = append(into, h.frame)
	h.frame, h.whole = nil, nil
	in.handed++
	return into, true
}

// done consumes all frames up to seq that were given out; somebody may still read them. A credit becomes due when half a window is free
// again; when the runner may be waiting for room that is there; for half of the progress it may have under way; and for the result.
func (in *inbox) done(seq uint64) {
	seq = min(seq, in.handed)
	if seq <= in.consumed {
		return
	}
	n := seq - in.consumed
	for _, h := range in.queue[:n] {
		in.used += h.bytes
		in.held -= h.size
		if h.bytes == 0 {
			in.small++
		}
	}
	kept := copy(in.queue, in.queue[n:])
	clear(in.queue[kept:])
	in.queue = in.queue[:kept]
	in.consumed = seq
	free := in.used + in.window - in.limit
	idle := len(in.queue) == 0 && free > 0 && in.limit-in.got < ChunkBytes
	if free >= max(in.window/2, 1) || idle || in.small >= mostProgress/2 || seq == in.final {
		in.due = true
	}
}

// urgent reports whether the runner may wait for the credit that is due: for room, or for an answer. Otherwise it only frees what
// the runner keeps.
func (in *inbox) urgent() bool {
	return in.resend || in.heldOnly || in.limit-in.got <= in.window/2 && in.final == 0
}

// resumed answers a runner that has sent frames up to sent and wants to know what is here.
func (in *inbox) resumed(sent uint64) {
	in.due, in.heldOnly = true, true
	if in.final == 0 && sent > in.last {
		in.highest = max(in.highest, sent)
		in.resend = true
	}
}

// look makes due what time brings: a keepalive, another request for a missing frame.
func (in *inbox) look(now time.Time, t timing) {
	if in.last == 0 && in.highest == 0 {
		return
	}
	if in.highest > in.last && now.Sub(in.movedAt) >= t.resend {
		in.ask(now, t)
	}
	if in.final != 0 && in.handed == in.final && in.acked < in.final {
		in.due, in.heldOnly = true, true // nobody has said that the result is consumed, but nothing comes after it
	}
	if now.Sub(in.creditedAt) >= t.keepalive {
		in.due = true
	}
}

// credit is the credit that is due, false if none is.
func (in *inbox) credit(now time.Time) (credit, bool) {
	if !in.due {
		return credit{}, false
	}
	// What was acknowledged once stays so, though it is not consumed: the runner has dropped it.
	ack, position := in.consumed, in.used
	upTo := in.acked
	if in.heldOnly {
		upTo = in.last
	}
	for _, h := range in.queue {
		if ack >= upTo {
			break
		}
		ack++
		position += h.bytes
	}
	c := credit{acknowledged: ack, window: max(in.used+in.window-position, 0), resend: in.resend}
	in.acked, in.limit = ack, in.used+in.window
	in.due, in.resend, in.heldOnly, in.small = false, false, false, 0
	in.creditedAt = now
	return c, true
}

// resize changes the window. A smaller one makes a credit due if the runner may believe in more.
func (in *inbox) resize(window int64) {
	in.window = window
	if in.last > 0 && in.limit > in.used+window {
		in.due = true
	}
}
