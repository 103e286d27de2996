package trace

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
)

func TestMain(m *testing.M) { leak.Main(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// scene is a store with recorders on it, whose flush is called by the test: nothing here waits for time.
type scene struct {
	*bustest.Bus
	store *jetstream.Store
	now   time.Time
}

func newScene(t *testing.T) *scene {
	t.Helper()
	s := &scene{Bus: bustest.Start(t), now: time.Now()}
	var err error
	s.store, err = jetstream.Open(t.Context(), s.Conn(t, embedded.UserSec), jetstream.Options{Fresh: true, Log: s.Log})
	must(t, err)
	t.Cleanup(s.store.Close)
	return s
}

func (s *scene) recorder(t *testing.T, replica string) *Recorder {
	t.Helper()
	r, err := New(Deps{Store: s.store, Replica: replica, Log: s.Log, Now: func() time.Time { return s.now }, Metrics: prometheus.NewRegistry()})
	must(t, err)
	r.flushIn = 3 * time.Minute // on whatever machine
	t.Cleanup(r.Close)
	return r
}

// begin is a dispatch that is accepted and has begun before ago.
func (s *scene) begin(r *Recorder, tenant, runner string, ago time.Duration) (id string, l *Live) {
	began := s.now.Add(-ago)
	id = ulid.MustNew(ulid.Timestamp(began), ulid.DefaultEntropy()).String()
	return id, r.Begin(tenant, id, began, func() Timeline { return s.timeline(id, tenant, runner, began) })
}

func (s *scene) timeline(id, tenant, runner string, began time.Time) Timeline {
	return Timeline{
		DispatchID: id, Tenant: tenant, RunnerID: runner, Person: "ada", Source: "file", Replica: "boot", StartedAt: began, Deadline: began.Add(time.Minute),
		Phases: []Step{{Phase: PhaseQueued, At: began, By: "replica:boot"}, {Phase: PhaseAssigned, At: began, By: "replica:boot"}, {Phase: PhaseAccepted, At: began, By: "runner:" + runner}},
	}
}

func (s *scene) end(l *Live, outcome string) {
	t, _ := l.Snapshot()
	t.State, t.Outcome, t.EndedAt = StateEnded, outcome, &s.now
	t.Phases = append(t.Phases, Step{Phase: EndPhase(outcome), At: s.now, By: "replica:boot"})
	l.End(t)
}

func ids(list []Timeline) []string {
	out := make([]string, len(list))
	for i, t := range list {
		out[i] = t.DispatchID
	}
	return out
}

// all reads every page.
func all(t *testing.T, r *Recorder, tenant string, q Query) (list []Timeline, pages int) {
	t.Helper()
	for {
		p, err := r.List(t.Context(), tenant, q)
		must(t, err)
		list, pages = append(list, p.Timelines...), pages+1
		if q.Before = p.Next; q.Before == "" {
			return list, pages
		}
		if pages > 1000 {
			t.Fatal("the pages never end")
		}
	}
}

// What ended is found and listed, the newest first, page by page, by its own tenant alone; from the memory of its replica at
// once, and by every replica once it is stored.
func TestEndedDispatches(t *testing.T) {
	s := newScene(t)
	r, other := s.recorder(t, "a"), s.recorder(t, "b")
	var want []string
	for i := range 25 {
		id, l := s.begin(r, "acme", fmt.Sprintf("edge-%d", i%5), time.Duration(25-i)*time.Millisecond)
		s.end(l, []string{"completed", "refused"}[i%2])
		want = append(want, id)
		_, foreign := s.begin(r, "umbrella", "theirs", 0)
		s.end(foreign, "completed")
		if i%4 == 3 {
			r.flush(t.Context())
		}
		if got, err := r.Get(t.Context(), "acme", id); err != nil || got.Outcome == "" || got.State != StateEnded {
			t.Fatalf("%d: %+v, %v", i, got, err)
		}
	}
	slices.Reverse(want)
	if list, _ := all(t, r, "acme", Query{Limit: 4}); !slices.Equal(ids(list), want) {
		t.Errorf("before all are stored:\n%v\n%v", ids(list), want)
	}
	r.flush(t.Context())
	if len(r.live) != 0 {
		t.Errorf("%d are still in memory", len(r.live))
	}
	for _, limit := range []int{1, 3, 7, 25, 100} {
		list, pages := all(t, other, "acme", Query{Limit: limit})
		if !slices.Equal(ids(list), want) || pages > 25/limit+2 {
			t.Errorf("limit %d: %d pages\n%v\n%v", limit, pages, ids(list), want)
		}
	}
	list, _ := all(t, other, "acme", Query{Limit: 2, Runner: "edge-3", Outcome: "refused"})
	for _, got := range list {
		if got.RunnerID != "edge-3" || got.Outcome != "refused" {
			t.Errorf("%+v", got)
		}
	}
	if len(list) != 3 && len(list) != 2 {
		t.Errorf("%d of edge-3 were refused", len(list))
	}
	for _, id := range want {
		got, err := other.Get(t.Context(), "acme", id)
		if err != nil || got.DispatchID != id || got.Person != "ada" || len(got.Phases) != 4 {
			t.Errorf("%s: %+v, %v", id, got, err)
		}
		for _, r := range []*Recorder{r, other} {
			if _, err := r.Get(t.Context(), "umbrella", id); schemas.CodeOf(err) != schemas.CodeNotFound {
				t.Errorf("another tenant gets %s: %v", id, err)
			}
		}
	}
	for _, id := range []string{"", "x", ulid.Make().String(), ulid.MustNew(ulid.Timestamp(s.now.Add(-48*time.Hour)), ulid.DefaultEntropy()).String()} {
		if _, err := other.Get(t.Context(), "acme", id); schemas.CodeOf(err) != schemas.CodeNotFound {
			t.Errorf("%q: %v", id, err)
		}
	}
	for _, before := range []string{"x", "-", "0-0", "1-x", "1--1", "99999999999999999999-1"} {
		if _, err := other.List(t.Context(), "acme", Query{Before: before}); schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("before %q: %v", before, err)
		}
	}
}

// A long dispatch is seen by other replicas while it runs; when its replica is gone without a word, they say so, and never
// when it had stored the end.
func TestRunningDispatches(t *testing.T) {
	s := newScene(t)
	r, other := s.recorder(t, "a"), s.recorder(t, "b")
	long, l := s.begin(r, "acme", "edge", 2*time.Second)
	quick, q := s.begin(r, "acme", "edge", 10*time.Millisecond)
	if got := r.Live("acme", long); got != l || r.Live("umbrella", long) != nil {
		t.Errorf("live is %v", got)
	}
	r.flush(t.Context())
	list, _ := all(t, other, "acme", Query{})
	if !slices.Equal(ids(list), []string{long}) || list[0].State != StateRunning || list[0].Outcome != "" {
		t.Errorf("elsewhere: %+v", list)
	}
	if list, _ := all(t, r, "acme", Query{Outcome: "running"}); !slices.Equal(ids(list), []string{quick, long}) {
		t.Errorf("here: %v", ids(list))
	}
	if list, _ := all(t, other, "umbrella", Query{}); len(list) != 0 {
		t.Errorf("another tenant sees %v", list)
	}

	// It ends: the end is stored, and its replica dies before it says what still runs.
	s.end(q, "completed")
	s.end(l, "completed")
	left := r.writeEnded(t.Context(), "acme", r.ended)
	if len(left) != 0 {
		t.Fatalf("%d are not stored", len(left))
	}
	for _, later := range []time.Duration{0, time.Minute} {
		s.now = s.now.Add(later)
		got, err := other.Get(t.Context(), "acme", long)
		if err != nil || got.Outcome != "completed" {
			t.Errorf("after %s: %+v, %v", later, got, err)
		}
		if list, _ := all(t, other, "acme", Query{Limit: 1}); !slices.Equal(ids(list), []string{long, quick}) {
			t.Errorf("after %s: %v", later, ids(list))
		}
	}

	// One whose end nobody stored.
	third := s.recorder(t, "c")
	s.now = time.Now()
	lost, _ := s.begin(third, "acme", "edge", 2*time.Second)
	third.flush(t.Context())
	if got, err := other.Get(t.Context(), "acme", lost); err != nil || got.State != StateRunning {
		t.Errorf("while it runs: %+v, %v", got, err)
	}
	s.now = s.now.Add(time.Minute)
	got, err := other.Get(t.Context(), "acme", lost)
	must(t, err)
	if got.State != StateEnded || got.Outcome != "outcome_unknown" || got.Stopped == nil || got.Stopped.From != PhaseAccepted || got.Stopped.To != PhaseConnecting ||
		!strings.Contains(got.Stopped.Why, "replica") || got.Phases[len(got.Phases)-1].Phase != PhaseUnknown {
		t.Errorf("%+v, %+v", got, got.Stopped)
	}
	if list, _ := all(t, other, "acme", Query{Outcome: "outcome_unknown"}); !slices.Equal(ids(list), []string{lost}) {
		t.Errorf("%v", ids(list))
	}
}

// A long dispatch is not written again and again while nothing changes, and disappears from what runs when it has ended.
func TestLongDispatchesAreRefreshed(t *testing.T) {
	s := newScene(t)
	r := s.recorder(t, "a")
	_, l := s.begin(r, "acme", "edge", 2*time.Second)
	stored := func() (n int, last batch) {
		for seq := uint64(1); ; {
			m, err := s.store.NextTrace(t.Context(), "acme", jetstream.TraceRunning, seq)
			if err != nil {
				return n, last
			}
			must(t, json.Unmarshal(m.Body, &last))
			n, seq = n+1, m.Seq+1
		}
	}
	for range 3 {
		r.flush(t.Context())
	}
	if n, last := stored(); n != 1 || len(last.Timelines) != 1 {
		t.Errorf("%d messages: %+v", n, last)
	}
	s.now = s.now.Add(refreshEvery)
	r.flush(t.Context())
	if n, _ := stored(); n != 2 {
		t.Errorf("%d messages", n)
	}
	s.end(l, "completed")
	r.flush(t.Context())
	r.flush(t.Context())
	if n, last := stored(); n != 3 || len(last.Timelines) != 0 {
		t.Errorf("%d messages: %+v", n, last)
	}
}

// While the store is away, dispatches end as ever; timelines wait, within bounds, and are stored afterwards.
func TestStoreIsAway(t *testing.T) {
	s := newScene(t)
	r := s.recorder(t, "a")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, l := s.begin(r, "acme", "edge", 0)
	s.end(l, "completed")
	r.flush(ended)
	if len(r.ended) != 1 || len(r.live) != 1 {
		t.Fatalf("%d wait, %d in memory", len(r.ended), len(r.live))
	}
	for range maxPending + 9 {
		_, l := s.begin(r, "acme", "edge", 0)
		l.End(Timeline{DispatchID: "x", State: StateEnded})
	}
	if len(r.ended) != maxPending || len(r.live) != maxPending {
		t.Errorf("%d wait, %d in memory", len(r.ended), len(r.live))
	}
	r.flush(t.Context())
	if len(r.ended) != 0 || len(r.live) != 0 {
		t.Errorf("%d wait, %d in memory", len(r.ended), len(r.live))
	}
	if list, _ := all(t, r, "acme", Query{Limit: 1000}); len(list) != 1+1 { // all but the first have one id here
		t.Errorf("%d are listed", len(list))
	}
}

// Run stores what is there when it is told to end. Whoever follows sees each change and the end.
func TestRunAndFollow(t *testing.T) {
	s := newScene(t)
	r := s.recorder(t, "a")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	id, l := s.begin(r, "acme", "edge", 0)
	_, changed := l.Snapshot()
	l.Changed()
	<-changed
	_, changed = l.Snapshot()
	s.end(l, "failed")
	<-changed
	if got, _ := l.Snapshot(); got.Outcome != "failed" {
		t.Errorf("%+v", got)
	}
	cancel()
	must(t, <-done)
	if got, err := s.recorder(t, "b").Get(t.Context(), "acme", id); err != nil || got.Outcome != "failed" {
		t.Errorf("%+v, %v", got, err)
	}
	_, late := s.begin(r, "acme", "edge", 0)
	s.end(late, "completed") // nobody writes any more
	if len(r.live) != 0 {
		t.Error("it is kept for ever")
	}
}

// Without a recorder, without a tenant, and under an id that runs already, nothing is recorded and nothing breaks.
func TestNothingToRecord(t *testing.T) {
	var none *Recorder
	l := none.Begin("acme", "x", time.Now(), nil)
	l.Changed()
	l.End(Timeline{})
	s := newScene(t)
	r := s.recorder(t, "a")
	if l := r.Begin("", "x", s.now, nil); l != nil {
		t.Error("a dispatch of no tenant is recorded")
	}
	_, first := s.begin(r, "acme", "edge", 0)
	if again := r.Begin("acme", first.id, s.now, nil); again != nil || r.Live("acme", first.id) != first {
		t.Error("a second dispatch of the same id takes the first one's place")
	}
	s.end(first, "completed")
}

func TestStoppedAt(t *testing.T) {
	for want, phases := range map[string][]string{
		"queued → assigned":        {PhaseQueued},
		"assigned → accepted":      {PhaseQueued, PhaseAssigned, PhaseCancelling},
		"accepted → connecting":    {PhaseQueued, PhaseAssigned, PhaseAccepted},
		"credentials → connecting": {PhaseQueued, PhaseAssigned, PhaseAccepted, PhaseCredentials},
		"querying → first row":     {PhaseQueued, PhaseAssigned, PhaseAccepted, PhaseConnecting, PhaseQuerying},
		"first row → last row":     {PhaseQueued, PhaseAssigned, PhaseAccepted, PhaseConnecting, PhaseQuerying, PhaseFirstRow, PhaseCancelling},
	} {
		var steps []Step
		for _, p := range phases {
			steps = append(steps, Step{Phase: p})
		}
		if h := StoppedAt(steps, "why"); h.From+" → "+h.To != want || h.Why != "why" {
			t.Errorf("%v: %+v, want %s", phases, h, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"replica":"a","timelines":[{"dispatchId":"x"}]}`))
	f.Add([]byte(`{"timelines":[{"dispatchId":"x","phases":[{"phase":"done"}]},{"dispatchId":"y","like":0,"took":1,"within":2,"phasesIn":[3]}]}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, tl := range decode(jetstream.TraceMessage{Body: body}) {
			if got := cutOff(tl, time.Unix(0, 0)); got.State != StateEnded || got.Stopped == nil {
				t.Errorf("%+v", got)
			}
		}
	})
}

func FuzzCursor(f *testing.F) {
	f.Add("1-2")
	f.Add("18446744073709551615-9223372036854775807")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := parseCursor(text)
		if err != nil || text == "" {
			return
		}
		if again, err := parseCursor(c.String()); err != nil || again != c {
			t.Errorf("%q: %v, %v, %v", text, c, again, err)
		}
	})
}

// What one short dispatch costs beside its way: its begin, its end, and its part of a message.
func BenchmarkTimeline(b *testing.B) {
	r := &Recorder{d: Deps{Replica: "a", Now: time.Now}, wake: make(chan struct{}, 1), live: make(map[string]*Live), shown: make(map[string]bool)}
	r.metrics, _ = newMetrics(nil)
	s := &scene{now: time.Now()}
	began := s.now
	t := s.timeline("01J00000000000000000000000", "acme", "edge", began)
	for range 5 {
		t.Phases = append(t.Phases, Step{Phase: PhaseDone, At: began, By: "runner:edge"})
	}
	t.State, t.Outcome, t.EndedAt = StateEnded, "completed", &s.now
	b.ReportAllocs()
	for i := range b.N {
		l := r.Begin("acme", strconv.Itoa(i), began, func() Timeline { return t })
		l.Changed()
		l.End(t)
		if len(r.ended) == 256 {
			for list := r.ended; len(list) > 0; {
				_, n := encode("a", list)
				for _, l := range list[:n] {
					r.forget(l)
				}
				list = list[n:]
			}
			r.ended = r.ended[:0]
		}
	}
}
