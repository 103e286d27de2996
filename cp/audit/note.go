package audit

import (
	"context"
	"time"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Note records e without waiting. An event that can't be encoded, or that comes while 16,384 notes or 16 MiB of them wait,
// is dropped and counted, and the count becomes an event (`audit.overflow`) when there is room again.
func (l *Log) Note(e *runbusv1.AuditEvent) {
	body, err := encodeEvent(e, time.Now())
	if err != nil {
		body = nil
	}
	l.mu.Lock()
	full, err := l.note(err, func(b []byte) ([]byte, error) { return append(b, body...), nil })
	l.mu.Unlock()
	l.complain(e.GetAction(), full, err)
}

// Jot is Note for an event as values: it is written once, where it waits.
func (l *Log) Jot(e *Brief) {
	at := e.At
	if at.IsZero() {
		at = time.Now()
	}
	l.mu.Lock()
	full, err := l.jot(e, at)
	l.mu.Unlock()
	l.complain(e.Action, full, err)
}

// jot is Jot of an event of this time. The lock is held.
func (l *Log) jot(e *Brief, at time.Time) (full bool, err error) {
	return l.note(nil, func(b []byte) ([]byte, error) {
		begin := len(b)
		b, err := l.who.append(l.stamp(b, at), e)
		if err != nil {
			return nil, err
		}
		if b, err = appendWhat(b, e); err == nil {
			err = checkEvent(e.Actor, e.Action, len(b)-begin)
		}
		return b, err
	})
}

// jotText is jot of an event whose text, from the end of its time on, is known. The lock is held.
func (l *Log) jotText(e *Brief, at time.Time, text []byte, err error) (full bool, _ error) {
	return l.note(err, func(b []byte) ([]byte, error) {
		begin := len(b)
		b = append(l.stamp(b, at), text...)
		return b, checkEvent(e.Actor, e.Action, len(b)-begin)
	})
}

// stamp appends the next id and this time, with which an event begins. The lock is held.
func (l *Log) stamp(b []byte, at time.Time) []byte {
	l.ids.next(at)
	b = append(append(b, `{"id":"`...), l.ids.text[:]...)
	return l.clock.append(append(b, `","at":"`...), at)
}

// note adds what add appends to the notes. If err is not nil, or add fails, or there is no room, the note is dropped and counted;
// full is true for the first of a row for which there is no room. The lock is held.
func (l *Log) note(err error, add func([]byte) ([]byte, error)) (full bool, _ error) {
	first := l.dropped == 0
	full = l.closed || l.notes >= maxNotes || l.noteBytes >= maxNoteBytes
	if err == nil && !full {
		err = l.append(add)
	}
	if err != nil || full {
		l.dropped++
	}
	if l.notes == 1 || l.notes == batchWorth || l.dropped > 0 {
		l.signal()
	}
	return full && first, err
}

func (l *Log) complain(action string, full bool, err error) {
	switch {
	case err != nil:
		l.log.Error("an audit event is dropped", "action", clip(action), "error", err)
	case full:
		l.log.Error("audit events are dropped: too many wait, or the log is closed", "action", clip(action))
	}
}

// append has add append a note to those that wait: to the last of them if it fits there, so that a part always fits into one
// batch. The lock is held.
func (l *Log) append(add func([]byte) ([]byte, error)) error {
	last := len(l.pending) - 1
	if last < 0 || l.pending[last].record != nil || l.pending[last].events == maxBatchEvents {
		l.pending = append(l.pending, part{notes: l.memory()})
		last++
	}
	p := &l.pending[last]
	before := len(p.notes)
	body := p.notes
	if p.events > 0 {
		body = append(body, ',')
	}
	begin := len(body)
	body, err := add(body)
	if err != nil {
		if p.events == 0 {
			l.pending = l.pending[:last]
		}
		return err
	}
	if p.events > 0 && len(body) > maxBatchBytes-tellOverhead {
		one := append(l.memory(), body[begin:]...)
		p.notes = body[:before]
		l.pending = append(l.pending, part{notes: one, events: 1})
	} else {
		p.notes = body
		p.events++
	}
	if l.notes == 0 {
		l.noteSince = time.Now()
	}
	l.notes++
	l.noteBytes += len(body) - begin
	if l.notes >= crowdedAt && l.crowd == nil && l.failing == nil {
		l.crowd = make(chan struct{})
		l.crowded.Store(true)
	}
	return nil
}

// Hold waits while more is noted than is being written, until there is room or ctx ends. Who notes at a high rate calls it first, so
// that no note is dropped because the disk is slow. While nothing can be written, which shows within 10 s, or the log is closed,
// it holds nobody back.
func (l *Log) Hold(ctx context.Context) {
	if !l.crowded.Load() {
		return
	}
	l.mu.Lock()
	crowd := l.crowd
	l.mu.Unlock()
	if crowd == nil {
		return
	}
	select {
	case <-crowd:
	case <-ctx.Done():
	}
}

// release lets those go on whom Hold holds back. The lock is held.
func (l *Log) release() {
	if l.crowd != nil {
		close(l.crowd)
		l.crowd = nil
		l.crowded.Store(false)
	}
}

// memory is room for notes, behind that for the head of their batch. The lock is held.
func (l *Log) memory() []byte {
	if n := len(l.spare) - 1; n >= 0 {
		b := l.spare[n]
		l.spare = l.spare[:n]
		return b[:batchOverhead]
	}
	return make([]byte, batchOverhead, 4<<10)
}

// keepMemory is how much memory of written notes is kept for others.
const keepMemory = 8

// finish tells those who wait for the events of a batch, and takes back its memory.
func (l *Log) finish(batch []part, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range batch {
		switch {
		case p.record != nil:
			p.record.done <- err // has room for the one
		case len(l.spare) < keepMemory:
			l.spare = append(l.spare, p.notes)
		}
	}
}
