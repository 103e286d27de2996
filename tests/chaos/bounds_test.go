package chaos

import (
	"cmp"
	"net/http"
	"slices"
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

// How a runner is lost.
const (
	killed  = "killed"
	again   = "killed, and started again"
	stopped = "stopped"
	silent  = "silently cut"
)

// loss is one runner that is lost, and when what was noticed of it.
type loss struct {
	how     string
	m       *member
	jobs    []*job
	at      time.Time
	hello   time.Time     // of the process that was started again
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

// Over each kind of link a runner that is killed, whose process stands still, or whose link is silent: it is shown offline, new work is refused, and its
// works end as lost, once a new process says hello or the grace is over. The list says which signal told.
func TestLossIsSeenInTime(t *testing.T) {
	t.Parallel()
	grace, env := 3*time.Second, map[string]string{"RUNNER_GRACE": "3s"}
	if *longFlag {
		grace, env = 15*time.Second, nil // the default
	}
	hows := []string{killed, again, stopped, silent}
	var links []stack.Link
	for _, link := range stack.Links {
		links = append(links, slices.Repeat([]stack.Link{link}, len(hows))...)
	}
	w := newWorld(t, sealed, links, few, env)
	w.eavesdrop(w.runners[0])
	by := map[string][]*loss{}
	var losses []*loss
	var jobs []*job
	for i, m := range w.runners {
		l := &loss{how: hows[i%len(hows)], m: m, jobs: several(2, job{runner: m.id, rows: 200, last: 600_000, timeout: 5 * time.Minute, mustStart: true, want: []string{"runner_lost"}})}
		by[l.how], losses, jobs = append(by[l.how], l), append(losses, l), append(jobs, l.jobs...)
	}
	w.run(jobs, func() {
		w.underWay(jobs)
		for _, l := range losses {
			l.at = time.Now()
			switch l.how {
			case killed, again:
				l.m.process.Signal(t, syscall.SIGKILL)
			case stopped:
				l.m.process.Signal(t, syscall.SIGSTOP)
			case silent:
				l.m.proxy.blacken()
			}
		}
		w.notice(append(slices.Clone(by[killed]), by[again]...)...)
		for _, l := range by[again] {
			w.start(l.m)
			l.hello = enrolled(t, l.m)
		}
		w.notice(append(slices.Clone(by[stopped]), by[silent]...)...)
		table, _, status := w.plane.Runink(t, "runner", "list")
		for _, l := range by[killed] {
			if status != 0 || !strings.Contains(rowOf(table, l.m.id), " down/") {
				t.Errorf("runink runner list ends with %d: %s", status, table)
			}
		}
		eventually(2*stack.Patience, func() bool {
			return !slices.ContainsFunc(losses, func(l *loss) bool {
				_, over := w.lostAfter(l, l.at)
				return !over
			})
		})
		for _, l := range by[stopped] {
			l.m.process.Signal(t, syscall.SIGCONT)
		}
		for _, l := range by[silent] {
			l.m.proxy.heal()
		}
	})
	for _, l := range losses {
		w.told(l, grace)
	}
	w.watched()
	for _, l := range by[killed] {
		w.start(l.m)
	}
	w.awaitAll()
	w.idle(stack.Patience)
	w.free()
	if n := w.origin.executed("refused", 0); n > 0 {
		w.broken("refused", "refused, and executed %d times all the same", n)
	}
}

// told says what was seen of a loss, and holds it against the promises.
func (w *world) told(l *loss, grace time.Duration) {
	w.t.Helper()
	what := "a runner (" + string(l.m.link) + ") that was " + l.how
	signals := l.state.Health.Signals
	if signals.Connection != "down" || l.state.Health.Connected {
		w.t.Errorf("%s: the list does not say that the link is gone: %+v", what, l.state.Health)
	}
	lost, _ := w.lostAfter(l, l.at)
	say("chaos: %s: offline after %s by connection %s (heartbeat %s, responders %s), new work refused after %s, works %s after %s (grace %s)\n",
		what, l.offline.Round(time.Millisecond), signals.Connection, signals.Heartbeat, signals.Responders, l.refused.Round(time.Millisecond),
		cmp.Or(l.jobs[0].outcome(), "?"), lost.Round(time.Millisecond), grace)
	switch l.how {
	case killed:
		w.promised("new work for "+what+" to be refused", l.refused, offlineWithin)
		w.promised("works of "+what+" to end", lost, grace+graceSpare)
	case again:
		lost, _ = w.lostAfter(l, l.hello)
		say("chaos: works of the process before ended %s after the new one had been answered its hello\n", lost.Round(time.Millisecond))
		w.promised("new work for "+what+" to be refused", l.refused, offlineWithin)
		w.promised("works of "+what+" to end after the hello", lost, helloWithin)
	default:
		w.promised(what+" to be shown offline", l.offline, silentWithin)
		w.promised("works of "+what+" to end", lost, silentWithin)
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
	w := newWorld(t, sealed, []stack.Link{stack.OverTLS}, few, nil)
	w.eavesdrop(w.runners[0])
	deaf, mute := newRogue(t, w.plane, "deaf"), newRogue(t, w.plane, "mute")
	began := time.Now()
	if err := deaf.works.Unsubscribe(); err != nil {
		t.Fatal(err)
	}
	deaf.flush(t)
	var end asked
	for again := 0; ; again++ {
		deaf.beat(t)
		asked := time.Now()
		end = <-ask(t, w.plane, "deaf", "30s")
		// A control plane that stands still hears too late that nobody was there.
		if again == mostAgain || !unheard.MatchString(end.last.Message) || !stack.Excused(t, end.last.Message, asked, time.Now(), 0) {
			break
		}
	}
	if end.last.Code != "runner_offline" {
		t.Errorf("work that nobody hears of ends as %d %+v", end.status, end.last)
	}
	h := w.plane.Admin.Runners(t)["deaf"].Health
	if !eventually(stack.Patience, func() bool { // however long ago its last heartbeat was
		deaf.beat(t)
		h = w.plane.Admin.Runners(t)["deaf"].Health
		return !h.Dispatchable && h.Signals.Connection == "up" && h.Signals.Heartbeat == "fresh" && h.Signals.Responders == "none"
	}) {
		t.Errorf("a runner that nobody hears is shown as %+v", h)
	}
	var table string
	if !eventually(stack.Patience, func() bool {
		deaf.beat(t)
		var status int
		table, _, status = w.plane.Runink(t, "runner", "list")
		return status == 0 && strings.Contains(rowOf(table, "deaf"), "up/fresh/none")
	}) {
		t.Errorf("runink runner list prints %s", table)
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
