package bus

import (
	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
)

// batch is a message to one replica that is being put together from the frames of one or several dispatches.
type batch struct {
	replica string
	most    int    // bytes, if more than bundleBytes
	body    []byte // entries of RunnerWorkFrames; its memory is used again
	parts   []part
	frames  int
	rows    bool // among them are some with rows
}

// part is what a batch has of one stream: frames from a number on.
type part struct {
	sender     *Sender
	dispatch   string // of sender, then
	seq, epoch uint64
}

// add copies one frame of a stream, whose lock is held.
func (b *batch) add(one *Sender, f encoded, seq, epoch uint64) {
	b.body = append(b.body, f.entry...)
	b.rows = b.rows || hasRows(f.field)
	b.frames++
	if n := len(b.parts); n == 0 || b.parts[n-1].sender != one || b.parts[n-1].epoch != epoch {
		b.parts = append(b.parts, part{one, one.dispatch, seq, epoch})
	}
}

// single reports whether all frames are of one stream.
func (b *batch) single() bool {
	for _, p := range b.parts[1:] {
		if p.dispatch != b.parts[0].dispatch {
			return false
		}
	}
	return true
}

// message is what is in the batch, for a runner's replica. Its body is valid until the batch is cleared.
func (b *batch) message(ref schemas.RunnerRef) *nats.Msg {
	msg := &nats.Msg{Header: frameHeaders[framesName], Data: b.body}
	switch first := b.parts[0].dispatch; {
	case !b.single():
		msg.Subject = schemas.ResultDataSubject(ref, b.replica, together)
	case b.rows:
		msg.Subject = schemas.ResultDataSubject(ref, b.replica, first)
	default:
		msg.Subject = schemas.ResultCtlSubject(ref, b.replica, first)
	}
	if b.frames == 1 {
		msg.Header, msg.Data = alone(b.body)
	}
	return msg
}

// clear makes the batch empty.
func (b *batch) clear() {
	clear(b.parts)
	b.body, b.parts, b.frames, b.rows = b.body[:0], b.parts[:0], 0, false
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
	s.flush(b, Trace{})
	b.replica = replica
	return b
}

// mostBatches is how many replicas have a batch of their own.
const mostBatches = 16

// publish sends up to most messages of one stream, or puts them into the batch of its replica. It reports whether there is more.
// Only who has the writer's part calls it. The lock is not held while the link is waited for, and what the stream was may be over then and
// its memory another's, of another replica: that one has a turn of its own.
func (s *Senders) publish(one *Sender, most int) (more bool) {
	one.mu.Lock()
	one.settle() // what has waited as long as it may
	trace, replica, began := one.trace, one.replica, one.out.epoch
	shared := one.together && trace.Parent == ""
	several := shared || one.bundles
	one.mu.Unlock()
	b := s.batch(replica)
	b.most = 0
	if shared {
		b.most = s.most
	}
	if !shared {
		s.flush(b, Trace{})
		defer s.flush(b, trace)
	}
	for range most {
		one.mu.Lock()
		if one.out.epoch != began { // another's, or all of it goes out once more
			more = one.out.ready()
			one.mu.Unlock()
			return more
		}
		large, seq, epoch, full := one.gather(b, several)
		var msg *nats.Msg
		if large.size() > 0 {
			msg = one.message(large)
		}
		one.mu.Unlock()
		switch {
		case full:
			s.flush(b, trace)
		case large.size() == 0:
			return false
		default:
			if err := s.conn.publish(trace.onAnswer(msg)); err != nil {
				one.unsent(seq, epoch, err)
				return false
			}
			one.published()
		}
	}
	return true
}

// message has one frame by itself. The lock is held.
func (s *Sender) message(f encoded) *nats.Msg {
	subject := s.ctl
	if hasRows(f.field) {
		subject = s.data
	}
	return &nats.Msg{Subject: subject(), Header: frameHeaders[frameNames[f.field]], Data: f.entry[f.body:]}
}

// flush publishes a batch, with the trace of its one stream if that has one. Frames that the link did not take go out again after resume.
func (s *Senders) flush(b *batch, trace Trace) {
	if len(b.parts) == 0 {
		return
	}
	if err := s.conn.publish(trace.onAnswer(b.message(s.ref))); err != nil {
		for _, p := range b.parts {
			p.sender.unsent(p.seq, p.epoch, err)
		}
	}
	b.clear()
}

// flushAll publishes all batches.
func (s *Senders) flushAll() {
	for i := range s.batches {
		s.flush(&s.batches[i], Trace{})
	}
}
