package trace

import (
	"encoding/json"
	"fmt"
	"strconv"
	"time"
	"unicode/utf8"
)

// appendTimeline appends t as json.Marshal writes it, at a fifth of the cost: it is done for every dispatch.
func appendTimeline(b []byte, t *Timeline) ([]byte, error) {
	o := object{b: append(b, '{')}
	o.text("dispatchId", t.DispatchID, false)
	o.text("tenantId", t.Tenant, false)
	o.text("runnerId", t.RunnerID, false)
	o.number("runnerPid", t.RunnerPID, true)
	o.text("person", t.Person, false)
	o.text("source", t.Source, false)
	o.text("state", t.State, false)
	o.text("outcome", t.Outcome, true)
	o.text("code", t.Code, true)
	o.text("message", t.Message, true)
	o.text("hint", t.Hint, true)
	o.text("replica", t.Replica, false)
	o.text("session", t.Session, true)
	o.text("link", t.Link, true)
	o.text("traceId", t.TraceID, true)
	o.number("rows", t.Rows, false)
	o.number("bytes", t.Bytes, false)
	o.time("startedAt", t.StartedAt)
	if t.EndedAt != nil {
		o.time("endedAt", *t.EndedAt)
	}
	o.time("deadline", t.Deadline)
	o.steps("phases", t.Phases)
	if h := t.Stopped; h != nil {
		o.name("stopped")
		inner := object{b: append(o.b, '{'), err: o.err}
		inner.text("from", h.From, false)
		inner.text("to", h.To, false)
		inner.text("why", h.Why, false)
		inner.b = append(inner.b, '}')
		o.b, o.err = inner.b, inner.err
	}
	return append(o.b, '}'), o.err
}

// object is a JSON object that is being written.
type object struct {
	b   []byte
	err error
}

func (o *object) name(name string) {
	if o.b[len(o.b)-1] != '{' {
		o.b = append(o.b, ',')
	}
	o.b = append(append(append(o.b, '"'), name...), '"', ':')
}

func (o *object) text(name, value string, omitEmpty bool) {
	if value == "" && omitEmpty {
		return
	}
	o.name(name)
	o.b = appendText(o.b, value)
}

func (o *object) number(name string, value int64, omitEmpty bool) {
	if value == 0 && omitEmpty {
		return
	}
	o.name(name)
	o.b = strconv.AppendInt(o.b, value, 10)
}

func (o *object) time(name string, at time.Time) {
	o.name(name)
	if year := at.Year(); year < 0 || year > 9999 {
		o.err = fmt.Errorf("a timeline has a time in the year %d", year)
	}
	o.b = append(at.AppendFormat(append(o.b, '"'), time.RFC3339Nano), '"')
}

func (o *object) steps(name string, steps []Step) {
	o.name(name)
	if steps == nil {
		o.b = append(o.b, "null"...)
		return
	}
	o.b = append(o.b, '[')
	for i, s := range steps {
		if i > 0 {
			o.b = append(o.b, ',')
		}
		inner := object{b: append(o.b, '{'), err: o.err}
		inner.text("phase", s.Phase, false)
		inner.time("at", s.At)
		inner.text("by", s.By, false)
		inner.text("note", s.Note, true)
		inner.b = append(inner.b, '}')
		o.b, o.err = inner.b, inner.err
	}
	o.b = append(o.b, ']')
}

// appendText appends a JSON string. What needs escapes is left to encoding/json.
func appendText(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c >= utf8.RuneSelf-1 || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			quoted, _ := json.Marshal(s) // a string always can be
			return append(b, quoted...)
		}
	}
	return append(append(append(b, '"'), s...), '"')
}
