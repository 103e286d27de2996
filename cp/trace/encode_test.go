package trace

import (
	"encoding/json"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// What is stored is what encoding/json would write.
func TestTimelinesAreEncodedAsJSON(t *testing.T) {
	text := rapid.OneOf(rapid.String(), rapid.StringMatching(`[a-z0-9:-]*`), rapid.SampledFrom([]string{"", "a\"b", "<&>", "é→\u2028", "\xff", "\x7f"}))
	at := rapid.Custom(func(t *rapid.T) time.Time {
		zone := time.FixedZone("z", rapid.IntRange(-12, 14).Draw(t, "zone")*3600)
		return time.Unix(rapid.Int64Range(0, 1<<34).Draw(t, "s"), rapid.Int64Range(0, 1e9-1).Draw(t, "ns")).In(zone)
	})
	step := rapid.Custom(func(t *rapid.T) Step {
		return Step{Phase: text.Draw(t, "phase"), At: at.Draw(t, "at"), By: text.Draw(t, "by"), Note: text.Draw(t, "note")}
	})
	rapid.Check(t, func(t *rapid.T) {
		v := Timeline{
			DispatchID: text.Draw(t, "id"), Tenant: text.Draw(t, "tenant"), RunnerID: text.Draw(t, "runner"), RunnerPID: rapid.Int64().Draw(t, "pid"),
			Person: text.Draw(t, "person"), Source: text.Draw(t, "source"), State: text.Draw(t, "state"), Outcome: text.Draw(t, "outcome"),
			Code: text.Draw(t, "code"), Message: text.Draw(t, "message"), Hint: text.Draw(t, "hint"), Replica: text.Draw(t, "replica"),
			Session: text.Draw(t, "session"), Link: text.Draw(t, "link"), TraceID: text.Draw(t, "trace"), Rows: rapid.Int64().Draw(t, "rows"),
			Bytes: rapid.Int64().Draw(t, "bytes"), StartedAt: at.Draw(t, "start"), Deadline: at.Draw(t, "deadline"), Phases: rapid.SliceOf(step).Draw(t, "steps"),
		}
		if rapid.Bool().Draw(t, "ended") {
			end := at.Draw(t, "end")
			v.EndedAt, v.Stopped = &end, &Hop{From: text.Draw(t, "from"), To: text.Draw(t, "to"), Why: text.Draw(t, "why")}
		}
		want, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		got, err := appendTimeline(nil, &v)
		if err != nil || string(got) != string(want) {
			t.Fatalf("%v\n%s\n%s", err, got, want)
		}
	})
	if _, err := appendTimeline(nil, &Timeline{StartedAt: time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC)}); err == nil {
		t.Error("a year of five digits is written")
	}
	b, err := appendTimeline(nil, &Timeline{})
	if want, _ := json.Marshal(Timeline{}); err != nil || string(b) != string(want) {
		t.Errorf("%s, %v", b, err)
	}
}
