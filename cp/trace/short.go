package trace

import (
	"encoding/json"
	"strconv"
	"time"

	"github.com/org-runink/runbus/jetstream"
)

// maxModels is how many timelines of a message others may be like.
const maxModels = 16

// short is a timeline of a message of ended dispatches. Most are like one before them in all but their times and their numbers, and say
// only those, and which one that is: a quarter of the bytes, which are most of what it costs to store a timeline.
type short struct {
	Timeline
	Like     *int    `json:"like"` // index of the timeline that it is like, which says all itself; nil: it says all itself, too
	Took     int64   `json:"took"` // nanoseconds from its start to its end
	Within   int64   `json:"within"`
	PhasesIn []int64 `json:"phasesIn"` // nanoseconds from its start to each of its phases
}

// model is a timeline that others may be like: one that canLead.
type model struct {
	of    *Timeline
	index int // in the message
}

// encode puts as many timelines as fit into one message.
func encode(replica string, list []*Live) (body []byte, n int) {
	head, err := json.Marshal(replica)
	if err != nil {
		return nil, 0
	}
	body = append(append(make([]byte, 0, min(1<<10*len(list), maxBatch)+2<<10), `{"replica":`...), head...)
	body = append(body, `,"timelines":[`...)
	begin, index := len(body), 0
	var models []model
	for _, l := range list {
		before := len(body)
		if before > begin {
			body = append(body, ',')
		}
		t := l.ended()
		if like := find(models, t); like >= 0 {
			body, err = appendShort(body, t, like)
		} else {
			body, err = appendTimeline(body, t)
			if len(models) < maxModels && err == nil && t.canLead() {
				models = append(models, model{t, index})
			}
		}
		if err == nil && before > begin && len(body) > maxBatch {
			body = body[:before]
			break
		}
		if err != nil { // it can't be written, now or later
			body = body[:before]
		} else {
			index++
		}
		n++
	}
	return append(body, `]}`...), n
}

// find is the index of the timeline that t is like; less than 0 if there is none.
func find(models []model, t *Timeline) int {
	if !t.canLead() || !near(t.StartedAt, *t.EndedAt) || !near(t.StartedAt, t.Deadline) {
		return -1
	}
	for _, m := range models {
		if t.like(m.of) {
			return m.index
		}
	}
	return -1
}

// canLead reports whether any may be like t: of one that did not end, or that says where it stopped, each says all itself.
func (t *Timeline) canLead() bool { return t.EndedAt != nil && t.Stopped == nil }

// like reports whether t is as o, which canLead, in all that a short one does not say.
func (t *Timeline) like(o *Timeline) bool {
	if t.RunnerID != o.RunnerID || t.Person != o.Person || t.Source != o.Source || t.RunnerPID != o.RunnerPID ||
		t.Session != o.Session || t.Tenant != o.Tenant || t.State != o.State || t.Outcome != o.Outcome || t.Replica != o.Replica || t.Link != o.Link ||
		t.Code != o.Code || t.Message != o.Message || t.Hint != o.Hint || len(t.Phases) != len(o.Phases) || (t.Phases == nil) != (o.Phases == nil) {
		return false
	}
	for i := range t.Phases {
		a, b := &t.Phases[i], &o.Phases[i]
		if a.Phase != b.Phase || a.By != b.By || a.Note != b.Note || !near(t.StartedAt, a.At) {
			return false
		}
	}
	return true
}

// near reports whether the time between the two is one in nanoseconds.
func near(a, b time.Time) bool {
	const most = 1 << 32 // seconds
	d := b.Unix() - a.Unix()
	return -most < d && d < most
}

// between is the time from a to b as their clocks show it.
func between(a, b time.Time) int64 { return int64(b.Round(0).Sub(a.Round(0))) }

// appendShort appends t as one that is like the timeline of that index.
func appendShort(b []byte, t *Timeline, like int) ([]byte, error) {
	o := object{b: append(b, '{')}
	o.text("dispatchId", t.DispatchID, false)
	o.number("like", int64(like), false)
	o.text("traceId", t.TraceID, true)
	o.number("rows", t.Rows, false)
	o.number("bytes", t.Bytes, false)
	o.time("startedAt", t.StartedAt)
	o.number("took", between(t.StartedAt, *t.EndedAt), false)
	o.number("within", between(t.StartedAt, t.Deadline), false)
	o.name("phasesIn")
	o.b = append(o.b, '[')
	for i := range t.Phases {
		if i > 0 {
			o.b = append(o.b, ',')
		}
		o.b = strconv.AppendInt(o.b, between(t.StartedAt, t.Phases[i].At), 10)
	}
	return append(o.b, "]}"...), o.err
}

// decode reads a message of ended dispatches; what is damaged is nobody's timeline.
func decode(m jetstream.TraceMessage) []Timeline {
	var b struct {
		Timelines []short `json:"timelines"`
	}
	if json.Unmarshal(m.Body, &b) != nil {
		return nil
	}
	all := make([]Timeline, 0, len(b.Timelines))
	for i := range b.Timelines {
		s := &b.Timelines[i]
		if s.Like == nil {
			all = append(all, s.Timeline)
			continue
		}
		if *s.Like < 0 || *s.Like >= i || b.Timelines[*s.Like].Like != nil || len(b.Timelines[*s.Like].Phases) != len(s.PhasesIn) {
			return nil
		}
		all = append(all, s.whole(&b.Timelines[*s.Like].Timeline))
	}
	return all
}

// whole is s, which is like o, with all that o says.
func (s *short) whole(o *Timeline) Timeline {
	t, end := *o, s.StartedAt.Add(time.Duration(s.Took))
	t.DispatchID, t.TraceID, t.Rows, t.Bytes = s.DispatchID, s.TraceID, s.Rows, s.Bytes
	t.StartedAt, t.EndedAt, t.Deadline = s.StartedAt, &end, s.StartedAt.Add(time.Duration(s.Within))
	if o.Phases != nil {
		t.Phases = make([]Step, len(o.Phases))
	}
	for i, step := range o.Phases {
		step.At = s.StartedAt.Add(time.Duration(s.PhasesIn[i]))
		t.Phases[i] = step
	}
	return t
}
