package bus

import (
	"bytes"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// result runs in the subscription's callback: it publishes nothing.
func (r *Receivers) result(msg *nats.Msg) {
	subject, err := r.parse(msg.Subject)
	if err != nil {
		r.drop(DropInvalid)
		return
	}
	if rest, ok := strings.CutPrefix(subject.Dispatch, together); ok {
		r.several(msg, subject, rest)
		return
	}
	r.mu.Lock()
	one := r.open[subject.Dispatch]
	r.mu.Unlock()
	reason := DropLate
	if one != nil {
		reason = one.receive(msg, subject)
	}
	if reason == DropLate {
		reason = r.late(msg, subject)
	}
	if reason != "" {
		r.drop(reason)
	}
}

// parse takes apart the subject of a result. What is of several dispatches comes on the same subject again and again.
func (r *Receivers) parse(subject string) (schemas.Subject, error) {
	if subject == r.subject && subject != "" {
		return r.parsed, nil
	}
	parsed, err := schemas.Parse(subject)
	if err == nil {
		r.subject, r.parsed = subject, parsed
	}
	return parsed, err
}

// several takes in what came on a subject of several dispatches: their frames, or that a message with their assignments reached
// nobody.
func (r *Receivers) several(msg *nats.Msg, subject schemas.Subject, batch string) {
	if isNoResponders(msg) {
		number, err := strconv.ParseUint(batch, batchBase, 64)
		if err == nil {
			r.nobodyHeard(subject.Ref, number)
		}
		return
	}
	if batch != "" || TypeOf(msg) != framesName {
		r.drop(DropInvalid)
		return
	}
	views, err := viewFrames(msg, subject.Kind, r.views[:0])
	if err != nil {
		r.drop(DropInvalid)
		return
	}
	a := arrival{ref: subject.Ref, bytes: len(msg.Data), at: time.Now(), bundled: true, hidden: subject.Kind == schemas.KindResultData && r.tells()}
	groups := r.group(views)
	for _, g := range groups {
		if reason := r.some(g, a); reason != "" {
			r.drop(reason)
		}
	}
	clear(views)
	clear(groups)
	r.views, r.groups = views, groups
}

// group is frames of one dispatch out of several.
type group struct {
	of       *Receiver // nil: it is not open
	dispatch string    // that of the stream, if it is open
	views    []view
}

// group parts frames by their dispatches, and finds the streams.
func (r *Receivers) group(views []view) []group {
	groups := r.groups[:0]
	r.mu.Lock()
	defer r.mu.Unlock()
	for rest := views; len(rest) > 0; {
		n := 1
		for n < len(rest) && bytes.Equal(rest[n].dispatch, rest[0].dispatch) {
			n++
		}
		g := group{of: r.open[string(rest[0].dispatch)], views: rest[:n]}
		if g.of != nil {
			g.dispatch = g.of.dispatch // which nobody changes while it is open
		}
		groups, rest = append(groups, g), rest[n:]
	}
	return groups
}

// some takes in frames of one dispatch out of several.
func (r *Receivers) some(g group, a arrival) DropReason {
	if g.of != nil {
		a.dispatch = g.dispatch
		if reason := g.of.take(g.views, a); reason != DropLate {
			return reason
		}
	}
	dispatch := string(g.views[0].dispatch)
	stone, reason := r.stone(a.ref, dispatch)
	if reason != "" {
		return reason
	}
	return r.lateFrames(stone, dispatch, g.views)
}

// late looks at a message of a dispatch that is not open. What its runner keeps until it is acknowledged is acknowledged: the
// result, and whatever a resume speaks of. The window stays shut, so that a work that still runs ends as orphaned.
func (r *Receivers) late(msg *nats.Msg, subject schemas.Subject) DropReason {
	if isNoResponders(msg) {
		return ""
	}
	stone, reason := r.stone(subject.Ref, subject.Dispatch)
	if reason != "" {
		return reason
	}
	switch TypeOf(msg) {
	case "RunnerWorkResume":
		m := &runbusv1.RunnerWorkResume{}
		if Decode(msg, m) != nil {
			return DropInvalid
		}
		return r.acknowledge(stone, subject.Dispatch, m.GetSession(), m.GetSent(), "")
	case "RunnerWorkResult", "RunnerWorkWhole", framesName:
		views, err := viewFrames(msg, subject.Kind, nil)
		if err != nil {
			return DropInvalid
		}
		return r.lateFrames(stone, subject.Dispatch, views)
	}
	return DropLate
}

// stone is what is remembered of a dispatch that is not open, or why a message of ref for it is dropped.
func (r *Receivers) stone(ref schemas.RunnerRef, dispatch string) (stone owner, reason DropReason) {
	r.mu.Lock()
	stone, known := r.buried.get(dispatch, time.Since(r.began)-r.timing.tombstone)
	r.mu.Unlock()
	switch {
	case !known:
		return stone, DropUnknown
	case stone.ref != ref:
		return stone, DropForeign
	}
	return stone, ""
}

// lateFrames drops frames of a closed dispatch, and acknowledges its result if that is among them.
func (r *Receivers) lateFrames(stone owner, dispatch string, views []view) DropReason {
	if len(views) == 0 {
		return DropLate
	}
	last := views[len(views)-1]
	if last.field != resultNum && last.field != wholeNumber {
		return DropLate
	}
	return r.acknowledge(stone, dispatch, string(last.session), last.seq, DropLate)
}

// acknowledge owes a runner the acknowledgement of a closed dispatch, and returns reason.
func (r *Receivers) acknowledge(stone owner, dispatch, session string, acknowledged uint64, reason DropReason) DropReason {
	if session != stone.session {
		return DropSession
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.owed = append(r.owed, owedCredit{ref: stone.ref, credit: credit{dispatch: dispatch, session: session, acknowledged: acknowledged}})
	r.schedule(true)
	return reason
}

// nobodyHeard tells the streams whose assignments left in one message that it reached nobody.
func (r *Receivers) nobodyHeard(ref schemas.RunnerRef, batch uint64) {
	for _, one := range r.streams() {
		one.nobodyHeard(func() bool { return one.batch.Load() == batch && one.ref == ref })
	}
}
