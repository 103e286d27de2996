package chaos

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/tests/stack"
)

// A control plane that is killed leaves its callers, whatever the links of their runners are, with an unknown outcome: over HTTP an answer without an end, from runink the status
// 4 and a text that says so, in whatever format it was to print. Nothing is run a second time when it is back; the runner stops the
// source, and journals that the outcome is unknown; the timeline says it too.
func TestKilledControlPlaneLeavesTheOutcomeUnknown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, sealed, stack.Links, few, nil)
	w.eavesdrop(w.runners[0])
	// All sources go on for longer than a runner waits for a replica that is silent; the last has sent nothing yet.
	long := job{rows: 200, last: 600_000, timeout: 9 * time.Minute}
	mute := long
	mute.first = 600_000
	formats := []struct {
		args []string
		job  job
	}{
		{[]string{"--json"}, long}, {[]string{"--format", "json"}, long}, {[]string{"--format", "csv"}, long}, {[]string{"--format", "arrow"}, long},
		{[]string{"--format", "csv"}, mute}, {nil, mute},
	}
	of := func(i int) *member { return w.runners[i%len(w.runners)] }
	var caller []*job
	for _, m := range w.runners {
		over := long
		over.runner, over.bereft, over.mustStart = m.id, true, true
		caller = append(caller, &over)
	}
	var asked []*job
	var clis []*stack.Process
	var dispatches []string
	w.run(caller, func() {
		for i, f := range formats {
			j := f.job
			j.marker, j.runner = "cli"+string(rune('a'+i)), of(i).id
			asked = append(asked, &j)
			clis = append(clis, w.begin(&j, f.args))
		}
		asked = append(asked, caller...)
		w.running(asked)
		w.underWay(caller)
		dispatches = w.timelined(len(asked))
		w.plane.Signal(t, syscall.SIGKILL)
		for i, c := range clis {
			code := c.Exit(t)
			say("chaos: control plane killed: runink fetch run %s ends with status %d: %s\n", strings.Join(formats[i].args, " "), code, lastLine(c.Stderr.String()))
			if code != 4 || !strings.Contains(c.Stderr.String(), "outcome unknown") {
				w.broken("right-outcome", "runink %q ended with status %d: %s", formats[i].args, code, c.Stderr)
			}
		}
		w.revive()
	})
	for _, j := range caller {
		if !j.accepted || j.finals != 0 || j.hungUp {
			w.broken("right-outcome", "a caller whose control plane was killed was told an end: %s", j)
		}
	}
	began := time.Now()
	w.idle(stack.Patience)
	say("chaos: the runners had stopped all sources %s after the control plane was back\n", time.Since(began).Round(100*time.Millisecond))
	for _, m := range w.runners {
		n := 0
		for _, j := range asked {
			if j.runner == m.id {
				n++
			}
		}
		w.journalled(m, n, dispatches)
	}
	for _, j := range caller {
		w.shown(j.dispatch)
	}
	w.free()
	for _, j := range asked {
		if n := w.executed(j); n != 1 {
			w.broken("at-most-once", "executed %d times: %s", n, j)
		}
		w.neverRan(j)
	}
	w.watched()
}

// begin has runink ask for a job, again if its runner was not heard in time, and waits until it is accepted.
func (w *world) begin(j *job, format []string) *stack.Process {
	w.t.Helper()
	for ; ; j.attempt++ {
		began := time.Now()
		args := []string{"fetch", "run", "--runner", j.runner, "--source", "http", "--timeout", j.timeout.String(), "--out", w.t.TempDir() + "/out"}
		for k, v := range w.settings(j) {
			args = append(args, "--set", k+"="+v)
		}
		c := stack.Start(w.t, "runink "+j.marker, w.plane.Bin.Runink, w.plane.RuninkEnv(), append(args, format...)...)
		ended := func() bool { return hasEnded(c) }
		accepted := false
		eventually(stack.Patience, func() bool {
			accepted = slices.Contains(w.origin.busy(), j.marker) && !slices.ContainsFunc(w.underWayThere(), func(r runningFetch) bool { return r.Phase == "assigned" || r.Phase == "cancelling" })
			return accepted || ended()
		})
		if accepted && !ended() {
			return c
		}
		c.Exit(w.t)
		said := c.Stdout.String() + c.Stderr.String()
		told := unheard.MatchString(said)
		if j.attempt == mostAgain || !told && !stack.Late(said) || told && !stack.Excused(w.t, said, began, time.Now(), 0) {
			w.t.Fatalf("runink %q did not begin: %s", format, said)
		}
		if !told { // it never started
			j.refused = append(j.refused, j.attempt)
		}
	}
}

type runningFetch struct{ DispatchID, Phase string }

// underWayThere is the fetches that the control plane runs.
func (w *world) underWayThere() (running []runningFetch) {
	w.t.Helper()
	w.plane.Admin.Must(w.t, http.MethodGet, "/api/fetches/running", nil, &running)
	return running
}

// journalled waits until the runner's journal has the ends of n of these dispatches, all unknown.
func (w *world) journalled(m *member, n int, dispatches []string) {
	w.t.Helper()
	type record struct{ Event, Dispatch, Outcome string }
	var ends []record
	eventually(stack.Patience, func() bool {
		ends = nil
		list := stack.Start(w.t, "core-runner journal", w.plane.Bin.CoreRunner, map[string]string{"CORE_RUNNER_STATE_DIR": m.state}, "journal", "list", "--json")
		if code := list.Exit(w.t); code != 0 {
			w.t.Fatalf("core-runner journal list ended with status %d: %s", code, list.Stderr)
		}
		var all []record
		if err := json.Unmarshal([]byte(list.Stdout.String()), &all); err != nil {
			w.t.Fatal(err)
		}
		for _, r := range all {
			if r.Event == "end" && slices.Contains(dispatches, r.Dispatch) { // not one before, which was asked for again
				ends = append(ends, r)
			}
		}
		return len(ends) >= n
	})
	if len(ends) != n {
		w.broken("journal", "the journal has %d ends, not %d: %+v", len(ends), n, ends)
	}
	unknown := 0
	for _, r := range ends {
		if strings.EqualFold(r.Outcome, "outcome_unknown") {
			unknown++
		} else {
			w.broken("journal", "the journal says %q of a fetch whose control plane was killed", r.Outcome)
		}
	}
	say("chaos: the journal of a runner (%s) has %d fetches with an unknown outcome\n", m.link, unknown)
}

// shown waits until the timeline of a dispatch that the killed control plane left says that its outcome is unknown.
func (w *world) shown(dispatch string) {
	w.t.Helper()
	var line struct{ Outcome string }
	if !eventually(stack.Patience, func() bool {
		status, body := w.plane.Admin.Call(w.t, http.MethodGet, "/api/fetches/"+dispatch, nil)
		return status == http.StatusOK && json.Unmarshal(body, &line) == nil && line.Outcome == "outcome_unknown"
	}) {
		w.broken("right-outcome", "the timeline of %s says %q", dispatch, line.Outcome)
	}
}

// timelined waits until the stream of timelines has those of n fetches that run, and returns their ids: what is not stored is not known
// after a kill.
func (w *world) timelined(n int) (dispatches []string) {
	w.t.Helper()
	js, err := natsjs.New(w.connect("sec"), natsjs.WithDefaultTimeout(stack.Patience))
	if err != nil {
		w.t.Fatal(err)
	}
	stream, err := js.Stream(w.t.Context(), "RUNBUS_TRACE")
	if err != nil {
		w.t.Fatal(err)
	}
	running := w.underWayThere()
	if len(running) != n {
		w.t.Fatalf("%d fetches run, not %d", len(running), n)
	}
	for _, r := range running {
		dispatches = append(dispatches, r.DispatchID)
	}
	if !eventually(stack.Patience, func() bool {
		m, err := stream.GetLastMsgForSubject(w.t.Context(), "runbus.trace.*.running.*")
		if errors.Is(err, natsjs.ErrMsgNotFound) {
			return false
		} else if err != nil {
			w.t.Fatal(err)
		}
		for _, r := range running {
			if r.DispatchID == "" || !bytes.Contains(m.Data, []byte(r.DispatchID)) {
				return false
			}
		}
		return true
	}) {
		w.t.Fatal("the timelines of fetches that run are not in the stream")
	}
	return dispatches
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}
