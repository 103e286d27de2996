package bus

import (
	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
)

// batch is a message to one replica that is being put together from the frames of one or several dispatches.
type batch struct {
	replica string
	body    []byte // entries of RunnerWorkFrames; its memory is used again
	parts   []part
	frames  int
	chunks  bool // among them
}

// part is what a batch has of one stream: frames from a number on.
type part struct {
	sender     *Sender
	seq, epoch uint64
}

// add appends frames of one stream.
func (b *batch) add(one *Sender, frames []encoded, seq, epoch uint64) {
	for _, f := range frames {
		b.body = append(b.body, f.entry...)
		b.chunks = b.chunks || f.field == chunkNumber
	}
	b.frames += len(frames)
	b.parts = append(b.parts, part{one, seq, epoch})
}

// single reports whether all frames are of one stream.
func (b *batch) single() bool {
	for _, p := range b.parts[1:] {
		if p.sender != b.parts[0].sender {
			return false
		}
	}
	return true
}

// clear makes the batch empty.
func (b *batch) clear() {
	clear(b.parts)
	b.body, b.parts, b.frames, b.chunks = b.body[:0], b.parts[:0], 0, false
}

// batch is that of a replica.
func (s *Senders) batch(replica string) *batch {
	for i := range s.batches {
		if s.batches[i].replica == replica {
			return &s.batches[i]
		}
	}
	if n := len(s.batches); n < mostBatches {
		s.batches = append(s.batches, batch{replica: replica})
		return &s.batches[n]
	}
	// A replica that was not heard of for long makes room.
	b := &s.batches[0]
	s.flush(b)
	b.replica = replica
	return b
}

// mostBatches is how many replicas have a batch of their own.
const mostBatches = 16

// publish sends up to most messages of one stream, or puts them into the batch of its replica. It reports whether there is more.
// Only who has the writer's part calls it.
func (s *Senders) publish(one *Sender, most int) (more bool) {
	for range most {
		var few [8]encoded
		one.mu.Lock()
		frames, seq, epoch := one.next(few[:0])
		trace, shared := one.trace, one.together && one.trace.Parent == ""
		one.mu.Unlock()
		if len(frames) == 0 {
			return false
		}
		size := 0
		for _, f := range frames {
			size += f.size()
		}
		b := s.batch(one.replica)
		if !shared || len(b.body)+size > bundleBytes {
			s.flush(b)
		}
		if shared && size <= bundleBytes {
			b.add(one, frames, seq, epoch)
			continue
		}
		msg := message(one, frames, b.body)
		if len(frames) > 1 {
			b.body = msg.Data[:0] // publishing copies it
		}
		if err := s.conn.publish(trace.onAnswer(msg)); err != nil {
			one.unsent(seq, epoch, err)
			return false
		}
	}
	return true
}

// flush publishes a batch. Frames that the link did not take go out again after resume.
func (s *Senders) flush(b *batch) {
	if len(b.parts) == 0 {
		return
	}
	msg := &nats.Msg{Header: frameHeaders[framesName], Data: b.body}
	first := b.parts[0].sender
	switch one := b.single(); {
	case !one:
		msg.Subject = schemas.ResultDataSubject(s.ref, b.replica, together)
	case b.chunks:
		msg.Subject = first.data()
	default:
		msg.Subject = first.ctl()
	}
	if b.frames == 1 {
		msg.Header, msg.Data = alone(b.body)
	}
	if err := s.conn.publish(msg); err != nil {
		for _, p := range b.parts {
			p.sender.unsent(p.seq, p.epoch, err)
		}
	}
	b.clear()
}

// flushAll publishes all batches.
func (s *Senders) flushAll() {
	for i := range s.batches {
		s.flush(&s.batches[i])
	}
}
