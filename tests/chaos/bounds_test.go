package chaos

import (
	"cmp"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// The bounds within which a loss is known. They are promises about time: only the long run holds the product to them, on a machine
// that does nothing else; every run prints what it took.
const (
	offlineWithin = time.Second      // a killed runner is shown offline, and refuses new work
	helloWithin   = time.Second      // its works end when a new process says hello
	silentWithin  = 45 * time.Second // a process that stands still, or a link that is silent: pings, then the grace
	graceSpare    = 2 * time.Second  // beyond the grace
)

// loss is one runner that is lost, and when what was noticed of it.
type loss struct {
	how     string
	m       *member
	jobs    []*job
	at      time.Time
	offline time.Duration // the list says so
	refused time.Duration // new work is
	state   stack.RunnerState
}

// lostAfter is when its jobs had ended, reckoned from a moment; false while one has not.
func (w *world) lostAfter(l *loss, from time.Time) (d time.Duration, ok bool) {
	var last time.Time
	for _, j := range l.jobs {
		at, over := w.endOf(j)
		if !over {
			return 0, false
		}
		if at.After(last) {
			last = at
		}
	}
	return last.Sub(from), true
}

// notice asks until each loss is shown and new work refused.
func (w *world) notice(losses ...*loss) {
	w.t.Helper()
	if !eventually(2*stack.Patience, func() bool {
		missing := false
		list := w.plane.Admin.Runners(w.t)
		for _, l := range losses {
			if l.offline > 0 {
				continue
			}
			state := list[l.m.id]
			if missing = missing || state.Health.Dispatchable; state.Health.Dispatchable {
				continue
			}
			l.offline, l.state = time.Since(l.at), state
			f := w.plane.Admin.Fetch(w.t, map[string]any{"runnerId": l.m.id, "source": map[string]any{"kind": "http", "settings": w.settings(&job{marker: "refused"})}})
			l.refused = time.Since(l.at)
			if f.Status != http.StatusConflict || f.Problem.Code != "runner_offline" {
				w.broken("refused", "new work for %s that was lost (%s): status %d, %+v", l.m.id, l.how, f.Status, f.Problem)
			}
		}
		return !missing
	}) {
		w.broken("in-time", "a lost runner is still shown as taking work")
	}
}

// promised breaks the invariant of time if a bound of the long run is broken.
func (w *world) promised(what string, took, bound time.Duration) {
	w.t.Helper()
	if *longFlag && took > bound {
		w.broken("in-time", "%s took %s, over %s", what, took.Round(time.Millisecond), bound)
	}
}

// A runner that is killed, whose process stands still, or whose link is silent: it is shown offline, new work is refused, and its
// works end as lost, once a new process says hello or the grace is over. The list says which signal told.
func TestLossIsSeenInTime(t *testing.T) {
	t.Parallel()
	grace, env := 3*time.Second, map[string]string{"RUNNER_GRACE": "3s"}
	if *longFlag {
		grace, env = 15*time.Second, nil // the default
	}
	w := newWorld(t, sealed, 4, few, env)
	w.eavesdrop(w.runners[0])
	losses := make([]*loss, 4)
	var jobs []*job
	for i, how := range []string{"killed", "killed, and started again", "stopped", "silently cut"} {
		m := w.runners[i]
		losses[i] = &loss{how: how, m: m, jobs: several(2, job{runner: m.id, rows: 200, last: 600_000, timeout: 5 * time.Minute, mustStart: true, want: []string{"runner_lost"}})}
		jobs = append(jobs, losses[i].jobs...)
	}
	killed, again, stopped, silent := losses[0], losses[1], losses[2], losses[3]
	var hello time.Time
	w.run(jobs, func() {
		w.running(jobs)
		for _, l := range losses {
			l.at = time.Now()
			switch l {
			case killed, again:
				l.m.process.Signal(t, syscall.SIGKILL)
			case stopped:
				l.m.process.Signal(t, syscall.SIGSTOP)
			case silent:
				l.m.proxy.blacken()
			}
		}
		w.notice(killed, again)
		w.start(again.m)
		hello = enrolled(t, again.m)
		w.notice(stopped, silent)
		if table, _, status := w.plane.Runink(t, "runner", "list"); status != 0 || !strings.Contains(rowOf(table, killed.m.id), " down/") {
			t.Errorf("runink runner list ends with %d: %s", status, table)
		}
		eventually(2*stack.Patience, func() bool {
			for _, l := range losses {
				if _, over := w.lostAfter(l, l.at); !over {
					return false
				}
			}
			return true
		})
		stopped.m.process.Signal(t, syscall.SIGCONT)
		silent.m.proxy.heal()
	})
	for _, l := range losses {
		if signals := l.state.Health.Signals; signals.Connection != "down" || l.state.Health.Connected {
			t.Errorf("%s: the list does not say that the link is gone: %+v", l.how, l.state.Health)
		}
		lost, _ := w.lostAfter(l, l.at)
		say("chaos: runner %s: offline after %s by connection %s (heartbeat %s, responders %s), new work refused after %s, works %s after %s (grace %s)\n",
			l.how, l.offline.Round(time.Millisecond), l.state.Health.Signals.Connection, l.state.Health.Signals.Heartbeat,
			l.state.Health.Signals.Responders, l.refused.Round(time.Millisecond), cmp.Or(l.jobs[0].outcome(), "?"), lost.Round(time.Millisecond), grace)
	}
	lost, _ := w.lostAfter(again, hello)
	say("chaos: works of the process before ended %s after the new one had been answered its hello\n", lost.Round(time.Millisecond))
	for _, l := range losses[:2] {
		w.promised("new work for a killed runner to be refused", l.refused, offlineWithin)
	}
	ended, _ := w.lostAfter(killed, killed.at)
	w.promised("works of a killed runner to end", ended, grace+graceSpare)
	w.promised("works of a runner whose new process said hello to end", lost, helloWithin)
	for _, l := range losses[2:] {
		w.promised("a runner that was "+l.how+" to be shown offline", l.offline, silentWithin)
		ended, _ := w.lostAfter(l, l.at)
		w.promised("works of a runner that was "+l.how+" to end", ended, silentWithin)
	}
	w.watched()
	w.start(killed.m)
	w.awaitAll()
	w.idle(stack.Patience)
	w.free()
	if n := w.origin.executed("refused"); n > 0 {
		w.broken("refused", "refused, and executed %d times all the same", n)
	}
}

// enrolled is when the runner's process had said hello, by its log.
func enrolled(t testing.TB, m *member) time.Time {
	t.Helper()
	line := m.process.Stderr.Must(t, "msg=enrolled")
	text, _, _ := strings.Cut(strings.TrimPrefix(line, "time="), " ")
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return at
}

// rowOf is the line of a table whose first column is this.
func rowOf(table, first string) string {
	for line := range strings.Lines(table) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] == first {
			return line
		}
	}
	return ""
}

// The two other signals, of runners whose link is up: one that nobody hears (no responders), and, in the long run, one whose
// heartbeats don't come.
func TestEachSignalIsShown(t *testing.T) {
	t.Parallel()
	w := newWorld(t, sealed, 1, few, nil)
	w.eavesdrop(w.runners[0])
	deaf, mute := newRogue(t, w.plane, "deaf"), newRogue(t, w.plane, "mute")
	began := time.Now()
	if err := deaf.works.Unsubscribe(); err != nil {
		t.Fatal(err)
	}
	deaf.flush(t)
	if end := <-ask(t, w.plane, "deaf", "30s"); end.last.Code != "runner_offline" {
		t.Errorf("work that nobody hears of ends as %d %+v", end.status, end.last)
	}
	h := w.plane.Admin.Runners(t)["deaf"].Health
	if h.Dispatchable || h.Signals.Connection != "up" || h.Signals.Heartbeat != "fresh" || h.Signals.Responders != "none" {
		t.Errorf("a runner that nobody hears is shown as %+v", h)
	}
	if table, _, status := w.plane.Runink(t, "runner", "list"); status != 0 || !strings.Contains(rowOf(table, "deaf"), "up/fresh/none") {
		t.Errorf("runink runner list ends with %d: %s", status, table)
	}
	say("chaos: runner without a subscription: link %s, heartbeat %s, responders %s: %s\n", h.Signals.Connection, h.Signals.Heartbeat, h.Signals.Responders, h.Detail)
	w.free()
	w.watched()
	if !*longFlag {
		return
	}
	h = w.plane.Admin.AwaitRunner(t, "mute", false).Health
	if h.Signals.Connection != "up" || h.Signals.Heartbeat != "late" {
		t.Errorf("a runner without heartbeats is shown as %+v", h)
	}
	if table, _, status := w.plane.Runink(t, "runner", "list"); status != 0 || !strings.Contains(rowOf(table, mute.ref.Runner), "up/late/") {
		t.Errorf("runink runner list ends with %d: %s", status, table)
	}
	say("chaos: runner without heartbeats, %s after its last: link %s, heartbeat %s: %s\n", time.Since(began).Round(time.Second), h.Signals.Connection, h.Signals.Heartbeat, h.Detail)
}
