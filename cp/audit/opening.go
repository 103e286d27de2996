package audit

import "time"

// Opening is what Log.Begin keeps of the event of a beginning, and memory for that of its end. It belongs to who begins something, so that
// neither makes an object. The zero value, and one that End has ended, is ready for Begin; it may not be copied.
type Opening struct {
	who  who    // of the last end
	text []byte // memory for that of an end

	event         Brief
	details       [4]Detail // memory for event.Details
	waits         bool      // it is among Log.openings
	before, after *Opening
}

// openings are beginnings that may yet be part of their ends, the oldest first. Guarded by Log.mu.
type openings struct {
	first, last *Opening
	count       int
}

func (s *openings) add(o *Opening) {
	o.waits, o.before, o.after = true, s.last, nil
	if s.last == nil {
		s.first = o
	} else {
		s.last.after = o
	}
	s.last = o
	s.count++
}

func (s *openings) remove(o *Opening) {
	if o.before == nil {
		s.first = o.after
	} else {
		o.before.after = o.after
	}
	if o.after == nil {
		s.last = o.before
	} else {
		o.after.before = o.before
	}
	o.waits, o.before, o.after = false, nil, nil
	s.count--
}

// waited is how long the beginning has waited; one that is to come has waited for long, by a clock that isn't ours.
func (o *Opening) waited(now time.Time) time.Duration {
	if d := now.Sub(o.event.At); d >= 0 {
		return d
	}
	return noteWait
}

// Begin notes e, of which there is an end to come, as Jot does; but if that end comes before e is written, e is not. The event given to End
// thus has to tell all that e does. It waits until its time, if it has one, is 50 ms ago, or that of one that was begun before it; its time
// is about now.
func (l *Log) Begin(o *Opening, e *Brief) {
	at := e.At
	if at.IsZero() {
		at = time.Now()
	}
	l.mu.Lock()
	if o.waits {
		l.openings.remove(o)
	}
	o.event = *e
	o.event.Details = append(o.details[:0], e.Details...)
	o.event.At = at
	l.openings.add(o)
	full, err := false, error(nil)
	if l.closed || l.notes+l.openings.count > maxNotes {
		full, err = l.settle(o)
	}
	if l.openings.count == 1 { // what is noted already may be due later
		l.signal()
	}
	l.mu.Unlock()
	l.complain(e.Action, full, err)
}

// End notes e, the end of what Begin began with o, as Jot does. What it is to say is written beforehand, so that the many that end at the same
// time don't wait for one another's. One goroutine at a time calls it with the same o; Begin may have been another's call.
func (l *Log) End(o *Opening, e *Brief) {
	at := e.At
	if at.IsZero() {
		at = time.Now()
	}
	text, err := o.write(e)
	l.mu.Lock()
	if o.waits {
		l.openings.remove(o)
	}
	full, err := l.jotText(e, at, text, err)
	l.mu.Unlock()
	l.complain(e.Action, full, err)
}

// keepText is the longest text of an end whose memory is kept for the next.
const keepText = 4 << 10

// write is the text of an end, from the end of its time on. It is valid until the next.
func (o *Opening) write(e *Brief) ([]byte, error) {
	text, err := o.who.append(o.text[:0], e)
	if err != nil {
		return nil, err
	}
	if text, err = appendWhat(text, e); err == nil && cap(text) <= keepText {
		o.text = text
	}
	return text, err
}

// settle makes a note of a beginning whose end is not waited for any more. The lock is held.
func (l *Log) settle(o *Opening) (full bool, err error) {
	l.openings.remove(o)
	return l.jot(&o.event, o.event.At)
}

// settleBefore settles the beginnings that have waited for so long. The lock is held.
func (l *Log) settleBefore(now time.Time, waited time.Duration) {
	for o := l.openings.first; o != nil && o.waited(now) >= waited; o = l.openings.first {
		if full, err := l.settle(o); full || err != nil {
			l.complain(o.event.Action, full, err)
		}
	}
}
