package trace

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"

	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
)

const (
	// A list reads the stream backwards in windows of sequences, which grow while they hold nothing.
	firstWindow, lastWindow = 32, 1 << 16
	// mostReads is how many messages one call reads; a list that needs more ends there and says where to go on.
	mostReads = 4000
	// slack is how far the clocks of replicas and server may be apart.
	slack = 5 * time.Second
)

// Query says which timelines a list has.
type Query struct {
	Runner  string // id; empty: any
	Outcome string // one of dispatch's, or `running`; empty: any
	Limit   int    // at most; zero means 50
	Before  string // Page.Next of the page before; empty: from the newest
}

// Page is a part of a list.
type Page struct {
	Timelines []Timeline
	// Next is where the next page begins; empty when there is none. There may be one though this page has less than Limit:
	// the search for rare ones was interrupted.
	Next string
}

func (q Query) has(t Timeline) bool {
	outcome := t.Outcome
	if t.State == StateRunning {
		outcome = StateRunning
	}
	return (q.Runner == "" || q.Runner == t.RunnerID) && (q.Outcome == "" || q.Outcome == outcome)
}

func errNoTimeline() *schemas.Error {
	return schemas.Errorf(schemas.CodeNotFound, "there is no fetch of this id").
		WithHint("timelines are kept for a day; `runink fetch list` shows the newest")
}

// Live is the dispatch of this id, if it is tenant's and runs on this replica or ended here just now; else nil.
func (r *Recorder) Live(tenant, id string) *Live {
	r.mu.Lock()
	defer r.mu.Unlock()
	if l := r.live[id]; l != nil && l.tenant == tenant {
		return l
	}
	return nil
}

// Get is the timeline of one dispatch of tenant; CodeNotFound if there is none, or it is another tenant's. One of another
// replica may be a moment behind.
func (r *Recorder) Get(ctx context.Context, tenant, id string) (Timeline, error) {
	parsed, err := ulid.ParseStrict(id)
	if err != nil {
		return Timeline{}, errNoTimeline()
	}
	if l := r.Live(tenant, id); l != nil {
		t, _ := l.Snapshot()
		return t, nil
	}
	running, err := r.running(ctx, tenant)
	if err != nil {
		return Timeline{}, unreadable(err)
	}
	if t, ok := running[id]; ok {
		return t, nil
	}
	t, err := r.find(ctx, tenant, id, ulid.Time(parsed.Time()))
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
		return Timeline{}, errNoTimeline()
	case err != nil:
		return Timeline{}, unreadable(err)
	}
	return t, nil
}

func unreadable(err error) *schemas.Error {
	return schemas.Wrap(schemas.CodeUnavailable, err, "the timelines can't be read now").WithHint("try again when /readyz is ready")
}

// find looks for an ended dispatch in the stream, from its begin for as long as it may have taken; ErrNotFound if it isn't there.
func (r *Recorder) find(ctx context.Context, tenant, id string, began time.Time) (Timeline, error) {
	if age := r.d.Now().Sub(began); age > 25*time.Hour || age < -time.Minute {
		return Timeline{}, jetstream.ErrNotFound
	}
	seq, err := r.d.Store.TraceBefore(ctx, tenant, jetstream.TraceEnded, began.Add(-slack))
	if err != nil {
		return Timeline{}, err
	}
	until := began.Add(r.d.Longest + time.Minute)
	for range mostReads {
		m, err := r.d.Store.NextTrace(ctx, tenant, jetstream.TraceEnded, seq)
		if err != nil {
			return Timeline{}, err
		}
		if m.At.After(until) {
			break
		}
		for _, t := range decode(m) {
			if t.DispatchID == id {
				return t, nil
			}
		}
		seq = m.Seq + 1
	}
	return Timeline{}, jetstream.ErrNotFound
}

// running are the dispatches of tenant that other replicas have said to run, or were left running by one that has gone: not
// those whose end is stored.
func (r *Recorder) running(ctx context.Context, tenant string) (map[string]Timeline, error) {
	messages, err := r.d.Store.RunningTraces(ctx, tenant)
	if err != nil {
		return nil, err
	}
	now := r.d.Now()
	all := make(map[string]Timeline)
	for _, m := range messages {
		var b batch
		if json.Unmarshal(m.Body, &b) != nil || b.Replica == r.d.Replica {
			continue
		}
		ends, err := r.endsBehind(ctx, tenant, m)
		if err != nil {
			return nil, err
		}
		for _, t := range b.Timelines {
			if ends[t.DispatchID] {
				continue
			}
			if now.Sub(m.At) > goneAfter {
				t = cutOff(t, m.At)
			}
			all[t.DispatchID] = t
		}
	}
	return all, nil
}

// endsBehind are the dispatches whose ends were stored since a replica told in m what runs there: it stores ends first, and tells what runs at
// least every refreshEvery.
func (r *Recorder) endsBehind(ctx context.Context, tenant string, m jetstream.TraceMessage) (map[string]bool, error) {
	ends := make(map[string]bool)
	for seq := m.Seq + 1; ; {
		e, err := r.d.Store.NextTrace(ctx, tenant, jetstream.TraceEnded, seq)
		if errors.Is(err, jetstream.ErrNotFound) || err == nil && e.At.Sub(m.At) > goneAfter {
			return ends, nil
		}
		if err != nil {
			return nil, err
		}
		for _, t := range decode(e) {
			ends[t.DispatchID] = true
		}
		seq = e.Seq + 1
	}
}

// List is a page of tenant's timelines: first those that run, then the ended ones, the newest end first.
func (r *Recorder) List(ctx context.Context, tenant string, q Query) (Page, error) {
	limit := cmp.Or(max(q.Limit, 0), 50)
	at, err := parseCursor(q.Before)
	if err != nil {
		return Page{}, err
	}
	var page Page
	seen := make(map[string]bool)
	add := func(t Timeline) {
		if !seen[t.DispatchID] && q.has(t) {
			page.Timelines = append(page.Timelines, t)
		}
		seen[t.DispatchID] = true
	}
	if q.Before == "" {
		tops, err := r.tops(ctx, tenant)
		if err != nil {
			return Page{}, unreadable(err)
		}
		for _, t := range tops {
			add(t)
		}
		if len(page.Timelines) > limit {
			page.Timelines = page.Timelines[:limit]
		}
	}
	if q.Outcome == StateRunning {
		return page, nil
	}
	page.Next, err = r.back(ctx, tenant, at, func(t Timeline) bool {
		if len(page.Timelines) >= limit {
			return false
		}
		add(t)
		return true
	})
	if err != nil {
		return Page{}, unreadable(err)
	}
	return page, nil
}

// tops are the dispatches that are not in the stream as ended: those of this replica, those of others, and those that were left.
// Running ones come first, the newest first.
func (r *Recorder) tops(ctx context.Context, tenant string) ([]Timeline, error) {
	others, err := r.running(ctx, tenant)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	mine := make([]*Live, 0, 16)
	for _, l := range r.live {
		if l.tenant == tenant {
			mine = append(mine, l)
		}
	}
	r.mu.Unlock()
	for _, l := range mine {
		others[l.id], _ = l.Snapshot()
	}
	tops := make([]Timeline, 0, len(others))
	for _, t := range others {
		tops = append(tops, t)
	}
	slices.SortFunc(tops, func(a, b Timeline) int {
		if a.State != b.State {
			return -cmp.Compare(a.State, b.State) // `running` is behind `ended` in the alphabet
		}
		return -strings.Compare(a.DispatchID, b.DispatchID)
	})
	return tops, nil
}

// cursor is a place in the stream: everything before timeline index of message seq. Seq 0 is the end of the stream.
type cursor struct {
	seq   uint64
	index int
}

func (c cursor) String() string { return fmt.Sprintf("%d-%d", c.seq, c.index) }

func parseCursor(s string) (c cursor, err error) {
	if s == "" {
		return c, nil
	}
	seq, index, ok := strings.Cut(s, "-")
	if ok {
		if c.seq, err = strconv.ParseUint(seq, 10, 64); err == nil {
			c.index, err = strconv.Atoi(index)
		}
	}
	if !ok || err != nil || c.seq == 0 || c.index < 0 {
		return c, schemas.Errorf(schemas.CodeInvalid, "before is not the beginning of a next page")
	}
	return c, nil
}

// back calls fn for each ended timeline before at, the newest first, until it returns false. It returns where to go on, "" at the
// end of what is kept.
func (r *Recorder) back(ctx context.Context, tenant string, at cursor, fn func(Timeline) bool) (next string, err error) {
	first, last, err := r.d.Store.TraceBounds(ctx)
	if err != nil {
		return "", err
	}
	high := last
	if at.seq != 0 {
		high = min(high, at.seq)
	}
	window, reads := uint64(firstWindow), 0
	for high >= max(first, 1) {
		low := max(first, 1)
		if high-low >= window {
			low = high - window + 1
		}
		messages, err := r.between(ctx, tenant, low, high)
		if err != nil {
			return "", err
		}
		for _, m := range slices.Backward(messages) {
			timelines := decode(m)
			end := len(timelines)
			if m.Seq == at.seq {
				end = min(end, at.index)
			}
			for i := end - 1; i >= 0; i-- {
				if !fn(timelines[i]) {
					return cursor{m.Seq, i + 1}.String(), nil
				}
			}
		}
		reads += len(messages) + 1
		if len(messages) == 0 {
			window = min(2*window, lastWindow)
		} else {
			window = firstWindow
		}
		if low == max(first, 1) {
			break
		}
		high = low - 1
		if reads > mostReads {
			return cursor{high, maxPending}.String(), nil
		}
	}
	return "", nil
}

// between are the messages of ended dispatches of tenant from low to high.
func (r *Recorder) between(ctx context.Context, tenant string, low, high uint64) ([]jetstream.TraceMessage, error) {
	var all []jetstream.TraceMessage
	for seq := low; seq <= high; {
		m, err := r.d.Store.NextTrace(ctx, tenant, jetstream.TraceEnded, seq)
		if errors.Is(err, jetstream.ErrNotFound) || err == nil && m.Seq > high {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		all = append(all, m)
		seq = m.Seq + 1
	}
	return all, nil
}
