package audit

import (
	"errors"
	"strings"
	"time"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	// saysAll is how many events of a part say all themselves. What stands behind them leaves out what the event before it says: most of
	// what an event costs are its bytes, which are copied a dozen times on their way to two disks.
	saysAll = 32
	// maxSameDetails bounds the details that an event may leave out.
	maxSameDetails = 16
)

// said is what the last event said that was written as values, for the next one behind it. The zero value: nothing. Not safe for
// concurrent use.
type said struct {
	ok      bool
	event   Brief // its time is not kept
	details [8]Detail
}

// forget has the next event say all itself.
func (s *said) forget() { s.ok = false }

// note notes an event that was written.
func (s *said) note(e *Brief) {
	if s.ok = len(e.Details) <= len(s.details); !s.ok {
		return
	}
	s.event = *e
	s.event.Details = s.details[:copy(s.details[:], e.Details)]
}

// covers reports whether e may leave out what the last event said: those who read it must see in what is left out, or is empty, what e
// says.
func (s *said) covers(e *Brief) bool {
	last := &s.event
	if !s.ok || e.Action != last.Action || len(e.Details) != len(last.Details) || e.Tenant == "" && last.Tenant != "" ||
		e.Actor == "" && last.Actor != "" || e.Subject == "" && last.Subject != "" || e.Outcome == "" && last.Outcome != "" {
		return false
	}
	for i := range e.Details {
		if e.Details[i].Name != last.Details[i].Name {
			return false
		}
	}
	return true
}

// append appends what e says otherwise than the last event, which covers it, from the end of its time on, and notes e. Its id has to be
// the next one.
func (s *said) append(b []byte, e *Brief) ([]byte, error) {
	last := &s.event
	s.ok = false // until all is written
	b, err := appendChange(append(b, '"'), `,"tenant":`, &last.Tenant, e.Tenant, nil)
	b, err = appendChange(b, `,"actor":`, &last.Actor, e.Actor, err)
	b, err = appendChange(b, `,"subject":`, &last.Subject, e.Subject, err)
	b, err = appendChange(b, `,"outcome":`, &last.Outcome, e.Outcome, err)
	before := `,"details":{`
	for i := range e.Details {
		d, was := &e.Details[i], &last.Details[i]
		if *d == *was || err != nil {
			continue
		}
		b, err = d.append(append(b, before...))
		before = `,`
		if d.form == asText || was.form == asText {
			*was = *d
		} else {
			was.number, was.form = d.number, d.form
		}
	}
	if err != nil {
		return nil, err
	}
	if before == `,` {
		b = append(b, '}')
	}
	s.ok = true
	return append(b, '}'), nil
}

// appendChange appends a field if it is not what it was, and notes it.
func appendChange(b []byte, name string, was *string, is string, err error) ([]byte, error) {
	if is == *was || err != nil {
		return b, err
	}
	*was = is
	return appendText(append(b, name...), is)
}

var errSame = errors.New("an event says that it is as one before it, which it can't be")

// restore puts into the events of a batch what they left out.
func restore(batch *runbusv1.AuditBatch) error {
	var last *runbusv1.AuditEvent
	same := 0
	for _, e := range batch.GetEvents() {
		if e.GetSame() {
			if same++; last == nil || same > maxBatchEvents || len(last.GetDetails()) > maxSameDetails {
				return errSame
			}
			if err := complete(e, last); err != nil {
				return err
			}
		}
		last = e
	}
	return nil
}

// complete puts into e what it left out since last says it.
func complete(e, last *runbusv1.AuditEvent) error {
	if e.GetId() == "" {
		id, ok := nextID(last.GetId(), e.GetAt().AsTime())
		if !ok {
			return errSame
		}
		e.Id = id
	}
	for _, f := range [...]struct{ is, last *string }{
		{&e.Tenant, &last.Tenant}, {&e.Actor, &last.Actor}, {&e.Action, &last.Action}, {&e.Subject, &last.Subject}, {&e.Outcome, &last.Outcome},
	} {
		if *f.is == "" {
			*f.is = *f.last
		}
	}
	if e.Details == nil && len(last.GetDetails()) > 0 {
		e.Details = make(map[string]string, len(last.GetDetails()))
	}
	for name, value := range last.GetDetails() {
		if _, said := e.Details[name]; !said {
			e.Details[name] = value
		}
	}
	e.Same = false
	return nil
}

// nextID is the id that counter gives after this one, at that time.
func nextID(id string, at time.Time) (string, bool) {
	var c counter
	if len(id) != len(c.text) {
		return "", false
	}
	copy(c.text[:], schemas.NewULID(at)[:ulidTime])
	copy(c.text[ulidTime:], id[ulidTime:])
	for i := len(c.text) - 1; i >= len(c.text)-ulidCount; i-- {
		n := strings.IndexByte(digits32, c.text[i])
		if n < 0 {
			return "", false
		}
		c.text[i] = digits32[(n+1)%len(digits32)]
		if n+1 < len(digits32) {
			return string(c.text[:]), true
		}
	}
	return "", false
}
