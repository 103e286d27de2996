package runner

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/runner/source"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	flushAfter  = 200 * time.Millisecond // rows wait at most so long for a chunk to fill
	smallResult = 32 << 10               // bytes for which no whole chunk is set aside
)

// chunks cuts the Arrow stream into frames. It is written by the connector and flushed by an alarm, so it locks.
type chunks struct {
	ctx    context.Context //nolint:containedctx // an io.Writer has no other way to be cancelled
	sender *bus.Sender
	alarm  func(at time.Duration) // asks isLate at that uptime
	fit    *processors
	counts *source.Output // of what is written here; set before the first Write

	due atomic.Int64 // uptime at which what is buffered is to be sent; 0: nothing is

	mu sync.Mutex
	written
}

// written is what has become of a stream, with mu held.
type written struct {
	space *workspace // set before the first Write; not used when ended
	buf   []byte
	ended bool // the alarm does nothing any more
	whole bool // all of the stream is in buf, and leaves with the result
	sent  int64
	err   error
}

// begin makes it the stream of another work. Nobody else has it.
func (c *chunks) begin(ctx context.Context, sender *bus.Sender, alarm func(at time.Duration), fit *processors) {
	c.drop()
	c.ctx, c.sender, c.alarm, c.fit = ctx, sender, alarm, fit
}

// drop lets go of all that a work has left.
func (c *chunks) drop() {
	c.ctx, c.sender, c.alarm, c.fit, c.counts = nil, nil, nil, nil, nil
	c.due.Store(0)
	c.written = written{}
}

// smallBuffers keeps the buffers of small results.
var smallBuffers = sync.Pool{New: func() any { return new([smallResult]byte) }}

// Write blocks while the window is full: that is how a slow caller slows the source down (SPEC D15).
func (c *chunks) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := len(p)
	for len(p) > 0 {
		switch {
		case c.err != nil:
			return n - len(p), c.err
		case c.whole: // of a connector that goes on
			return n - len(p), bus.ErrClosed
		}
		take := min(len(p), bus.ChunkBytes-len(c.buf))
		if len(c.buf) == 0 {
			c.arm()
		}
		c.grow(len(c.buf) + take)
		c.buf, p = append(c.buf, p[:take]...), p[take:]
		if len(c.buf) == bus.ChunkBytes {
			c.fit.sendsLarge()
			c.send()
		}
	}
	return n, c.err
}

// grow makes room for n bytes; mu is held.
func (c *chunks) grow(n int) {
	switch {
	case n <= cap(c.buf):
	case n > smallResult: // more is to be expected
		whole := append(make([]byte, 0, bus.ChunkBytes), c.buf...)
		c.release()
		c.buf = whole
	default:
		small, _ := smallBuffers.Get().(*[smallResult]byte)
		c.buf = small[:0]
	}
}

// release gives a small buffer back, and forgets it; mu is held.
func (c *chunks) release() {
	if cap(c.buf) == smallResult {
		smallBuffers.Put((*[smallResult]byte)(c.buf[:smallResult]))
	}
	c.buf = nil
}

// finish sends what is buffered, or keeps it for last, if it is all of the stream and may leave with the result.
func (c *chunks) finish() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := len(c.buf); n > 0 && c.sent == 0 && c.err == nil && c.sender.Holds(n) {
		c.due.Store(0)
		c.count()
		c.whole = true
		return nil
	}
	c.send()
	return c.err
}

// last is the chunk that leaves with the result, nil for none: of a work that has failed nothing is left to be sent. It comes after end,
// and is valid until forget.
func (c *chunks) last(r *runbusv1.RunnerWorkResult) *runbusv1.RunnerWorkChunk {
	if !c.whole || r.GetResponse() == nil {
		return nil
	}
	chunk := &c.space.chunk
	chunk.ArrowIpc, chunk.Rows, chunk.Bytes = c.buf, r.GetResponse().GetRows(), r.GetResponse().GetBytes()
	return chunk
}

// kept is how many bytes last has. It comes after end.
func (c *chunks) kept() int64 { return int64(len(c.buf)) }

// forget gives the memory of last back.
func (c *chunks) forget() {
	if c.whole {
		c.space.chunk.ArrowIpc = nil
		c.mu.Lock()
		c.release()
		c.mu.Unlock()
	}
}

// count takes what is buffered for sent; mu is held.
func (c *chunks) count() {
	c.space.digest.Add(c.buf)
	c.sent += int64(len(c.buf))
}

// send sends what is buffered; mu is held.
func (c *chunks) send() {
	if len(c.buf) == 0 || c.err != nil {
		return
	}
	c.due.Store(0)
	c.count()
	chunk := &c.space.chunk
	chunk.ArrowIpc, chunk.Rows, chunk.Bytes = c.buf, c.counts.Rows(), c.counts.Bytes()
	c.err = c.sender.Send(c.ctx, chunk)
	chunk.ArrowIpc = nil
	c.buf = c.buf[:0]
}

// arm makes sure that what is buffered from now on is sent in time; mu is held.
func (c *chunks) arm() {
	if c.ended {
		return
	}
	at := uptime() + flushAfter
	c.due.Store(int64(at))
	c.alarm(at)
}

// isLate reports whether flushLate is to be called; else next is the uptime at which to ask again, 0 for when an alarm comes. It
// never blocks.
func (c *chunks) isLate(now time.Duration) (late bool, next time.Duration) {
	due := c.due.Load()
	if due == 0 || now < time.Duration(due) {
		return false, time.Duration(due)
	}
	return c.due.CompareAndSwap(due, 0), 0
}

// flushLate sends what has waited long enough, unless that leaves with the result by now. It blocks as Write does.
func (c *chunks) flushLate() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ended && !c.whole {
		c.send()
	}
}

// end has nothing sent any more, and gives memory back that last does not need.
func (c *chunks) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	c.due.Store(0)
	if !c.whole {
		c.release()
	}
}

// sumInto puts the checksum of what was sent into a result. It comes after end, if anything was written; the result is valid as long as
// the memory.
func (c *chunks) sumInto(r *runbusv1.RunnerWorkResult) {
	r.StreamSha256, r.RestXxh3 = c.space.digest.SHA256(), c.space.digest.XXH3()
}

// tells reports whether the first chunk is yet to be sent, and will be within flushAfter: the control plane takes it for the progress
// that rows come.
func (c *chunks) tells() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sent == 0 && len(c.buf) > 0
}

func (c *chunks) total() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sent
}
