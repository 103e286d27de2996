package trace

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/org-runink/runbus/jetstream"
)

// drawTimeline is one that is often like others.
func drawTimeline(t *rapid.T, i int) Timeline {
	few := func(what string, of ...string) string { return rapid.SampledFrom(of).Draw(t, what) }
	at := func(what string) time.Time {
		if rapid.IntRange(0, 40).Draw(t, what+" far") == 0 {
			return time.Time{}
		}
		return time.Unix(1_700_000_000, rapid.Int64Range(-1e10, 1e10).Draw(t, what)).UTC()
	}
	v := Timeline{
		DispatchID: fmt.Sprint("d", i), Tenant: "acme", RunnerID: few("runner", "edge-1", "edge-1", "edge-2"), RunnerPID: rapid.Int64Range(1, 2).Draw(t, "pid"),
		Person: few("person", "ada", "ada", "é\""), Source: "file", State: StateEnded, Outcome: few("outcome", "completed", "completed", "failed"),
		Replica: "boot", Session: "s", Link: "outbound", TraceID: few("trace", "", "", "abc"), Message: few("message", "", "", "why"),
		Rows: rapid.Int64Range(0, 3).Draw(t, "rows"), Bytes: rapid.Int64().Draw(t, "bytes"), StartedAt: at("start"), Deadline: at("deadline"),
	}
	if rapid.IntRange(0, 20).Draw(t, "ended") > 0 {
		end := at("end")
		v.EndedAt = &end
	}
	if rapid.IntRange(0, 20).Draw(t, "stopped") == 0 {
		v.Stopped = &Hop{From: "a", To: "b", Why: "c"}
	}
	switch rapid.IntRange(0, 10).Draw(t, "phases") {
	case 0:
	case 1:
		v.Phases = []Step{}
	default:
		for _, phase := range []string{PhaseQueued, PhaseAssigned, PhaseDone}[rapid.IntRange(0, 1).Draw(t, "first"):] {
			v.Phases = append(v.Phases, Step{Phase: phase, At: at(phase), By: few("by", "replica:boot", "replica:boot", "replica:boot", "runner:edge-1"), Note: few("note", "", "", "", "", "again")})
		}
	}
	return v
}

// What is stored reads as it was, in its order, whatever stands beside it.
func TestTimelinesReadAsTheyWere(t *testing.T) {
	likes := 0
	rapid.Check(t, func(t *rapid.T) {
		var list []*Live
		var want []Timeline
		for i := range rapid.IntRange(1, 60).Draw(t, "timelines") {
			v := drawTimeline(t, i)
			list, want = append(list, &Live{final: &v}), append(want, v)
		}
		body, n := encode("boot", list)
		if n != len(list) {
			t.Fatalf("%d of %d fit", n, len(list))
		}
		likes += strings.Count(string(body), `"like":`)
		got := decode(jetstream.TraceMessage{Body: body})
		a, err := json.Marshal(got)
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		if string(a) != string(b) {
			t.Fatalf("%s\nreads as\n%s\nnot\n%s", body, a, b)
		}
	})
	if likes == 0 {
		t.Error("none is like another")
	}
}

// One like another has a fraction of its bytes; what can't be written is left out, and those behind it are like the right one still.
func TestShortTimelines(t *testing.T) {
	s := &scene{now: time.Now()}
	first, bad, like := s.timeline("first", "acme", "edge-1", s.now), s.timeline("bad", "acme", "edge-1", s.now), s.timeline("like", "acme", "edge-2", s.now)
	other, last := s.timeline("other", "acme", "edge-2", s.now), s.timeline("last", "acme", "edge-1", s.now.Add(time.Second))
	bad.StartedAt = time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC)
	var list []*Live
	for _, v := range []*Timeline{&first, &bad, &like, &other, &last} {
		v.EndedAt = &s.now
		list = append(list, &Live{final: v})
	}
	body, n := encode("boot", list)
	got := decode(jetstream.TraceMessage{Body: body})
	if n != len(list) || len(got) != len(list)-1 {
		t.Fatalf("%d timelines of %d in %s", len(got), n, body)
	}
	for i, want := range []Timeline{first, like, other, last} {
		if g := got[i]; g.DispatchID != want.DispatchID || g.RunnerID != want.RunnerID || !g.StartedAt.Equal(want.StartedAt) || !g.Deadline.Equal(want.Deadline) ||
			!g.EndedAt.Equal(s.now) || len(g.Phases) != len(want.Phases) || !g.Phases[2].At.Equal(want.Phases[2].At) || g.Phases[2].By != want.Phases[2].By {
			t.Errorf("timeline %d is %+v, not %+v", i, g, want)
		}
	}
	if strings.Count(string(body), `"like":0`) != 1 || strings.Count(string(body), `"like":1`) != 1 {
		t.Errorf("%s", body)
	}
}

// What stopped somewhere takes no place of those that others are like.
func TestShortTimelinesBesideFailures(t *testing.T) {
	s := &scene{now: time.Now()}
	var list []*Live
	for i := range 3 * maxModels {
		v := s.timeline("d", "acme", "edge-1", s.now)
		v.EndedAt = &s.now
		switch {
		case i < maxModels:
			v.Stopped = &Hop{From: "a", To: "b", Why: "c"}
		case i < 2*maxModels:
			v.EndedAt = nil
		}
		list = append(list, &Live{final: &v})
	}
	body, n := encode("boot", list)
	if short := strings.Count(string(body), `"like":`); n != len(list) || short != maxModels-1 {
		t.Errorf("%d of %d fit, %d are short", n, len(list), short)
	}
}

// A timeline that is like none is nobody's.
func TestDamagedTimelines(t *testing.T) {
	for body, want := range map[string]int{
		`{"dispatchId":"a","phases":[{"phase":"x"}]},{"dispatchId":"b","like":0,"phasesIn":[1]}`: 2,
		`{"dispatchId":"b","like":0}`:                                                0,
		`{"dispatchId":"a"},{"dispatchId":"b","like":-1}`:                            0,
		`{"dispatchId":"a"},{"dispatchId":"b","like":0},{"dispatchId":"c","like":1}`: 0,
		`{"dispatchId":"a"},{"dispatchId":"b","like":0,"phasesIn":[1]}`:              0,
	} {
		if got := decode(jetstream.TraceMessage{Body: []byte(`{"timelines":[` + body + `]}`)}); len(got) != want {
			t.Errorf("%s: %v", body, got)
		}
	}
}
