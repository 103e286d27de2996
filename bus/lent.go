package bus

import (
	"github.com/nats-io/nats.go"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// lender is a message that lets a later one have the memory of its data, once nobody reads that any more. Large ones of nats.go are in a
// program that is built as `make build` builds (internal/smallstack); all others are left to the collector.
//
// Only who read a chunk knows that nobody does any more, so Receiver.Return is the one place where memory is given back. A frame that was
// consumed otherwise, dropped, or left over in a stream that ended keeps its memory for as long as somebody has it.
type lender interface{ Recycle() }

// lentBy is a message as a lender, if it is one and holds nothing but a chunk.
func lentBy(msg any, views []view) lender {
	if len(views) != 1 || views[0].field != chunkNumber {
		return nil
	}
	l, _ := msg.(lender)
	return l
}

// LendBy has of name what lends the data of a message, by a method Recycle(), in place of the message itself; production does not. To be
// set before the first Open.
func (r *Receivers) LendBy(of func(*nats.Msg) any) { r.lends = of }

// lender is what may lend the data of a message.
func (r *Receivers) lender(msg *nats.Msg) any {
	if r.lends != nil {
		return r.lends(msg)
	}
	return msg
}

// Return is Done for who alone has the bytes of f, as Try or Next gave it out, and reads them no more: if they were lent, a later message
// has their memory then, and f has no bytes. Nobody else may call Try, Next or Done meanwhile. After Close, or Done of f or a later frame,
// the memory is not given back.
func (r *Receiver) Return(f Frame) {
	lent := r.takeLender(f)
	r.Done(f)
	if c, ok := f.(*runbusv1.RunnerWorkChunk); ok && lent != nil {
		c.ArrowIpc = nil
		lent.Recycle()
	}
}

// takeLender takes what lends the bytes of a large chunk out of the queue.
func (r *Receiver) takeLender(f Frame) lender {
	if chunkBytes(f) < shareWithin {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.in.lender(f.GetSeq())
}

// lender takes what lends the bytes of a frame that was given out and is not consumed; nil if nothing does.
func (in *inbox) lender(seq uint64) lender {
	if seq <= in.consumed || seq > in.handed || len(in.queue) == 0 {
		return nil
	}
	h := &in.queue[seq-in.consumed-1]
	lent := h.lent
	h.lent = nil
	return lent
}
