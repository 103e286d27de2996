package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/org-runink/runbus/cp/trace"
)

type timelinesInput struct {
	Limit   int    `query:"limit" default:"50" minimum:"1" maximum:"1000" doc:"Fetches at most"`
	Before  string `query:"before" maxLength:"64" doc:"Where the page before ended: from its Link header"`
	Runner  string `query:"runner" maxLength:"64" doc:"Only those of the runner of this id, or of the dialled one of this name"`
	Outcome string `query:"outcome" enum:"running,completed,refused,failed,cancelled,deadline,runner_lost,outcome_unknown" doc:"Only those that ended so, or run"`
}

type timelinesOutput struct {
	Link string `header:"Link" doc:"The next page, as </api/fetches?…>; rel=\"next\". It may be there though this page has less than limit: go on"`
	Body []trace.Timeline
}

// listTimelines is GET /api/fetches (SPEC D17).
func (s *server) listTimelines(ctx context.Context, in *timelinesInput) (*timelinesOutput, error) {
	p := principal(ctx)
	if err := inTenant(p); err != nil {
		return nil, err
	}
	runner := in.Runner
	if dialled, ok, err := s.Roster.Find(p.Tenant, runner); err == nil && ok { // what was fetched is seen without the registry too
		runner = dialled.ID
	}
	page, err := s.Recorder.List(ctx, p.Tenant, trace.Query{Runner: runner, Outcome: in.Outcome, Limit: in.Limit, Before: in.Before})
	if err != nil {
		return nil, problemOf(err)
	}
	out := &timelinesOutput{Body: page.Timelines}
	if out.Body == nil {
		out.Body = []trace.Timeline{}
	}
	if page.Next != "" {
		next := url.Values{"before": {page.Next}, "limit": {strconv.Itoa(in.Limit)}}
		if in.Runner != "" {
			next.Set("runner", in.Runner)
		}
		if in.Outcome != "" {
			next.Set("outcome", in.Outcome)
		}
		out.Link = fmt.Sprintf(`</api/fetches?%s>; rel="next"`, next.Encode())
	}
	return out, nil
}

type timelineOutput struct{ Body trace.Timeline }

// getTimeline is GET /api/fetches/{dispatchId}.
func (s *server) getTimeline(ctx context.Context, in *dispatchID) (*timelineOutput, error) {
	p := principal(ctx)
	if err := inTenant(p); err != nil {
		return nil, err
	}
	t, err := s.Recorder.Get(ctx, p.Tenant, in.ID)
	if err != nil {
		return nil, problemOf(err)
	}
	return &timelineOutput{t}, nil
}

const mediaSSE = "text/event-stream"

// eventsDocs describes the stream, which huma can't see.
func eventsDocs(op *huma.Operation) {
	op.Responses["200"] = &huma.Response{
		Description: "Server-sent events: `phase` for each step so far and to come, `progress` while rows arrive, and last `end` with the whole timeline",
		Content: map[string]*huma.MediaType{mediaSSE: {Schema: &huma.Schema{
			Type: "string", Description: "`event: phase`, `progress` or `end`; `data:` is one JSON object",
		}}},
	}
}

// fetchEvents is GET /api/fetches/{dispatchId}/events: a running fetch as it goes on, an ended one at once.
func (s *server) fetchEvents(ctx context.Context, in *dispatchID) (*huma.StreamResponse, error) {
	p := principal(ctx)
	if err := inTenant(p); err != nil {
		return nil, err
	}
	// Where it runs: here, or on another replica, whose steps come with a delay.
	next := s.elsewhere(p.Tenant, in.ID)
	if l := s.Recorder.Live(p.Tenant, in.ID); l != nil {
		next = func(context.Context) (trace.Timeline, <-chan struct{}, error) {
			t, changed := l.Snapshot()
			return t, changed, nil
		}
	}
	t, changed, err := next(ctx)
	if err != nil {
		return nil, problemOf(err)
	}
	return &huma.StreamResponse{Body: func(hctx huma.Context) {
		_, w := humago.Unwrap(hctx)
		e := &events{w: w, control: http.NewResponseController(w)}
		if err := e.follow(hctx.Context(), t, changed, next); err != nil {
			s.Log.Debug("the events of a fetch ended", "dispatch", in.ID, "error", err)
		}
	}}, nil
}

// askEvery is how often a fetch of another replica is looked up, aliveEvery how often a silent stream says that it lives, eventsGap the
// least time between two events of progress.
const (
	askEvery   = time.Second
	aliveEvery = 15 * time.Second
	eventsGap  = 200 * time.Millisecond
	eventWrite = 30 * time.Second
)

// watch is a timeline as it stands, and a channel that tells when to ask again.
type watch func(context.Context) (trace.Timeline, <-chan struct{}, error)

func (s *server) elsewhere(tenant, id string) watch {
	return func(ctx context.Context) (trace.Timeline, <-chan struct{}, error) {
		t, err := s.Recorder.Get(ctx, tenant, id)
		later := make(chan struct{})
		time.AfterFunc(askEvery, func() { close(later) })
		return t, later, err
	}
}

// events writes server-sent events.
type events struct {
	w       http.ResponseWriter
	control *http.ResponseController
	steps   int // of the timeline, told already
	rows    int64
	bytes   int64
}

// progressEvent tells how far a running fetch has come.
type progressEvent struct {
	Phase string    `json:"phase"`
	Rows  int64     `json:"rows"`
	Bytes int64     `json:"bytes"`
	At    time.Time `json:"at"`
}

// follow writes t and what comes after it, until the fetch has ended or the caller has gone.
func (e *events) follow(ctx context.Context, t trace.Timeline, changed <-chan struct{}, next watch) error {
	_ = e.control.SetReadDeadline(time.Time{}) // the stream may last as long as the fetch
	e.w.Header().Set("Content-Type", mediaSSE)
	e.w.Header().Set("X-Accel-Buffering", "no") // proxies pass each event on
	e.w.WriteHeader(http.StatusOK)
	alive := time.NewTicker(aliveEvery)
	defer alive.Stop()
	gap := time.NewTimer(eventsGap)
	defer gap.Stop()
	for {
		if err := e.tell(t); err != nil || t.State == trace.StateEnded {
			return err
		}
		gap.Reset(eventsGap)
		select {
		case <-gap.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		for waiting := true; waiting; {
			select {
			case <-changed:
				waiting = false
			case <-alive.C:
				if err := e.write([]byte(": alive\n\n")); err != nil {
					return err
				}
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		var err error
		if t, changed, err = next(ctx); err != nil {
			return err
		}
	}
}

// tell writes what is new in t.
func (e *events) tell(t trace.Timeline) error {
	var out bytes.Buffer
	if e.steps > len(t.Phases) { // another account of the same fetch
		e.steps = 0
	}
	for _, step := range t.Phases[e.steps:] {
		if err := event(&out, "phase", step); err != nil {
			return err
		}
	}
	e.steps = len(t.Phases)
	if t.Rows != e.rows || t.Bytes != e.bytes {
		e.rows, e.bytes = t.Rows, t.Bytes
		p := progressEvent{Rows: t.Rows, Bytes: t.Bytes, At: time.Now()}
		if e.steps > 0 {
			p.Phase = t.Phases[e.steps-1].Phase
		}
		if err := event(&out, "progress", p); err != nil {
			return err
		}
	}
	if t.State == trace.StateEnded {
		if err := event(&out, "end", t); err != nil {
			return err
		}
	}
	if out.Len() == 0 {
		return nil
	}
	return e.write(out.Bytes())
}

func event(out *bytes.Buffer, name string, data any) error {
	b, err := json.Marshal(data) // no line feed in it
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "event: %s\ndata: %s\n\n", name, b)
	return err
}

func (e *events) write(b []byte) error {
	_ = e.control.SetWriteDeadline(time.Now().Add(eventWrite)) // both servers of net/http can
	if _, err := e.w.Write(b); err != nil {
		return err
	}
	return e.control.Flush()
}
