package e2e

import (
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

func await(t *testing.T, what string, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(stack.Patience):
		t.Fatalf("waiting for %s", what)
	}
}

// E2: each process says what it is.
func TestRolesAreLogged(t *testing.T) {
	t.Parallel()
	plane := stack.StartPlane(t, true, map[string]string{"MANAGED_RUNNER_ENDPOINT": "face-runner:7102"})
	plane.Stderr.Must(t, `🧵 Fetch role: CONTROL-PLANE — forwards fetches to the dedicated runner at face-runner:7102 (never runs them here).`)
	runner := plane.StartRunner(t, "edge", nil)
	runner.Stderr.Must(t, `🧵 Fetch role: RUNNER — executes the fetch pipeline in-process (dedicated compute).`)
	addr := strings.TrimPrefix(plane.NATS, "tls://")
	runner.Stderr.Must(t, fmt.Sprintf(`🛰️  Outbound runner enrolment enabled: dialling %s (runner id "edge")`, addr))

	// The same agent under face.
	_, token := plane.Admin.MintKey(t, "backend")
	env := plane.RunnerEnv("backend", token)
	env["SERVICE_ROLE"] = "runner"
	face := stack.Start(t, "face runner", plane.Bin.Face, env)
	face.Stderr.Must(t, `🧵 Fetch role: RUNNER`)
	plane.Admin.AwaitRunner(t, "backend", true)
	face.Stop(t)
	runner.Stop(t)
	plane.Stop(t)
}

// D1, D2: a fetch runs in the runner's process and its progress streams back.
func TestAFetchRunsOnTheRunner(t *testing.T) { eachLink(t, aFetchRunsOnTheRunner) }

func aFetchRunsOnTheRunner(t *testing.T, link stack.Link) {
	plane := stack.StartPlane(t, true, nil)
	runner := plane.StartLinked(t, link, "edge", nil)
	src := newSource(t)
	f := plane.Admin.Fetch(t, src.body("edge"))
	accepted := f.Await("accepted")
	if accepted.RunnerPID != int64(runner.PID) || accepted.DispatchID != f.Dispatch || f.Dispatch == "" {
		t.Fatalf("accepted %+v by process %d", accepted, runner.PID)
	}
	await(t, "the request", src.opened)
	f.Await("progress") // while it runs
	src.let()
	end := f.End()
	if end.Outcome != "completed" || end.Rows != rowsBefore+rowsAfter || end.RunnerPID != int64(runner.PID) {
		t.Fatalf("ended %+v", end)
	}
	rows := 0
	for _, l := range f.Lines {
		if l.Type == "row" {
			rows++
		}
	}
	if rows != rowsBefore+rowsAfter {
		t.Errorf("%d rows in the stream", rows)
	}
	var last time.Time
	for _, p := range end.Phases {
		if p.At.Before(last) {
			t.Errorf("the timeline goes back at %s", p.Phase)
		}
		last = p.At
	}
}

// D3, D7: refusals have their code and text, and nothing of the source is touched.
func TestRefusalsTouchNothing(t *testing.T) { eachLink(t, refusalsTouchNothing) }

func refusalsTouchNothing(t *testing.T, link stack.Link) {
	plane := stack.StartPlane(t, true, nil)
	runner := plane.StartLinked(t, link, "edge", map[string]string{"RUNNER_CONCURRENCY": "1"})
	away := plane.StartLinked(t, link, "away", nil)
	away.Stop(t)
	plane.Admin.AwaitRunner(t, "away", false)
	src := newSource(t)

	with := func(runnerID string) map[string]any {
		body := src.body(runnerID)
		body["secrets"] = map[string]string{"token": "canary-of-a-refused-fetch"}
		return body
	}
	expect := func(runnerID string, status int, code, text string) {
		t.Helper()
		f := plane.Admin.Fetch(t, with(runnerID))
		if f.Status != status || f.Problem.Code != code || f.Problem.Outcome != "refused" || !strings.Contains(f.Problem.Message, text) {
			t.Errorf("runner %q: %d %+v, want %d %s %q", runnerID, f.Status, f.Problem, status, code, text)
		}
	}
	expect("", http.StatusBadRequest, "no_runner", "no runner is selected")
	expect("nobody", http.StatusNotFound, "runner_unknown", `"nobody"`)
	expect("away", http.StatusConflict, "runner_offline", `"away"`)
	if f := plane.Admin.Fetch(t, with("not a name")); f.Status != http.StatusBadRequest || !strings.Contains(f.Problem.Message, "not a runner name (a DNS label, or `console` for the Runink managed runner)") {
		t.Errorf("not a name: %d %+v", f.Status, f.Problem)
	}

	// The runner itself refuses what is over its limit (D6).
	first := plane.Admin.Fetch(t, src.body("edge"))
	first.Await("accepted")
	await(t, "the request", src.opened)
	expect("edge", http.StatusTooManyRequests, "runner_busy", fmt.Sprintf("%q", runner.ID))

	// SIGTERM: running work goes on, new work is refused with `draining`, exit 0 (D14).
	runner.Signal(t, syscall.SIGTERM)
	plane.Admin.AwaitRunner(t, "edge", false)
	expect("edge", http.StatusConflict, "runner_offline", "draining")
	if n := src.requests(); n != 0 { // the first one's was taken above
		t.Errorf("%d refused fetches reached the source", n)
	}
	src.let()
	if end := first.End(); end.Outcome != "completed" || end.Rows != rowsBefore+rowsAfter {
		t.Errorf("the running fetch ended %+v", end)
	}
	if code := runner.Exit(t); code != 0 {
		t.Errorf("a drained runner ended with status %d", code)
	}
	plane.Admin.AwaitRunner(t, "edge", false)
	expect("edge", http.StatusConflict, "runner_offline", `"edge"`)

	// No refusal read a credential. What reads none is recorded without waiting (R8).
	type event struct{ Action string }
	var events []event
	refused := func(e event) bool { return strings.Contains(e.Action, "refuse") }
	for give := time.Now().Add(stack.Patience); !slices.ContainsFunc(events, refused); <-time.After(20 * time.Millisecond) {
		if time.Now().After(give) {
			t.Fatalf("no refusal is in the audit: %+v", events)
		}
		plane.Admin.Must(t, http.MethodGet, "/api/audit?limit=1000", nil, &events)
	}
	for _, e := range events {
		if strings.Contains(e.Action, "credential") {
			t.Errorf("a refusal read a credential: %+v", e)
		}
	}
	for _, p := range []*stack.Process{plane.Process, runner.Process, away.Process} {
		if p.Stderr.Has("canary-of-a-refused-fetch") {
			t.Errorf("the log of %s shows a secret", p.Name)
		}
	}
}

// D4: a runner that accepted and fell silent leaves the outcome unknown, with the literal text.
func TestSilentRunnerLeavesTheOutcomeUnknown(t *testing.T) {
	eachLink(t, silentRunnerLeavesTheOutcomeUnknown)
}

func silentRunnerLeavesTheOutcomeUnknown(t *testing.T, link stack.Link) {
	const silence = "15s" // in which the runner must have accepted
	plane := stack.StartPlane(t, true, map[string]string{"DISPATCH_TIMEOUT": silence, "RUNNER_GRACE": "60s"})
	runner := plane.StartLinked(t, link, "edge", nil)
	src := newSource(t)
	f := plane.Admin.Fetch(t, src.body("edge"))
	f.Await("accepted")
	await(t, "the request", src.opened)
	runner.Signal(t, syscall.SIGSTOP)
	end := f.End()
	want := fmt.Sprintf("runner %q accepted the work and has not answered within %s — the run may still be in progress there", runner.ID, silence)
	if end.Outcome != "outcome_unknown" || end.Code != "outcome_unknown" || end.Message != want {
		t.Fatalf("ended %+v, want %q", end, want)
	}
}

// D4: a deadline that the runner confirms is `deadline`, and the source is let go.
func TestDeadlineThatTheRunnerConfirms(t *testing.T) {
	eachLink(t, deadlineThatTheRunnerConfirms)
}

func deadlineThatTheRunnerConfirms(t *testing.T, link stack.Link) {
	plane := stack.StartPlane(t, true, nil)
	plane.StartLinked(t, link, "edge", nil)
	src := newSource(t)
	for timeout := 4 * time.Second; ; timeout *= 2 {
		body := src.body("edge")
		body["timeout"] = timeout.String()
		if end := plane.Admin.Fetch(t, body).End(); end.Outcome != "deadline" {
			t.Fatalf("ended %+v", end)
		}
		if src.requests() > 0 {
			break // else the source was not asked by then, and this showed nothing
		}
		if timeout > stack.Patience {
			t.Fatalf("within %s the source was not asked", timeout)
		}
	}
	await(t, "the source's client to go", src.gone)
}

// E8: a second process under the id replaces the first, which is told so, ends with status 10, and does not come back. A dialled runner
// has no second process on its folder.
func TestTwoProcessesUnderOneID(t *testing.T) {
	t.Parallel()
	for _, link := range []stack.Link{stack.OverTLS, stack.OverWSS} {
		t.Run(string(link), func(t *testing.T) {
			t.Parallel()
			twoProcessesUnderOneID(t, link)
		})
	}
}

func twoProcessesUnderOneID(t *testing.T, link stack.Link) {
	plane := stack.StartPlane(t, true, nil)
	_, token := plane.Admin.MintKey(t, "edge")
	older := plane.StartLinked(t, link, "edge", map[string]string{"RUNNER_ENROLL_TOKEN": token})
	src := newSource(t)
	running := plane.Admin.Fetch(t, src.body("edge"))
	running.Await("accepted")
	newer := plane.StartLinked(t, link, "edge", map[string]string{"RUNNER_ENROLL_TOKEN": token})
	if code := older.Exit(t); code != 10 {
		t.Errorf("the older process ended with status %d", code)
	}
	if !older.Stderr.Has("REPLACED") {
		t.Error("the older process was not told REPLACED")
	}
	if end := running.End(); end.Outcome != "runner_lost" { // D13: a new process under its id
		t.Errorf("the older process's fetch ended %+v", end)
	}
	src.let()
	f := plane.Admin.Fetch(t, src.body("edge"))
	if end := f.End(); end.Outcome != "completed" || end.RunnerPID != int64(newer.PID) {
		t.Errorf("ended %+v, want it on process %d", end, newer.PID)
	}
	newer.Stop(t) // then all of its log is here
	if n := strings.Count(newer.Stderr.String(), "msg=enrolled"); n != 1 {
		t.Errorf("the newer process enrolled %d times", n)
	}
}

// D13: a killed runner fails its fetch as lost, long before the deadline.
func TestKilledRunnerIsLost(t *testing.T) { eachLink(t, killedRunnerIsLost) }

func killedRunnerIsLost(t *testing.T, link stack.Link) {
	plane := stack.StartPlane(t, true, map[string]string{"RUNNER_GRACE": "2s"})
	runner := plane.StartLinked(t, link, "edge", nil)
	src := newSource(t)
	f := plane.Admin.Fetch(t, src.body("edge"))
	f.Await("accepted")
	await(t, "the request", src.opened)
	runner.Signal(t, syscall.SIGKILL)
	plane.Admin.AwaitRunner(t, "edge", false) // offline for new work at once
	if end := f.End(); end.Outcome != "runner_lost" || end.Code != "runner_lost" {
		t.Fatalf("ended %+v", end)
	}
}

// D12: a cancel reaches the source, whether by DELETE or by a caller that goes away.
func TestCancelReachesTheSource(t *testing.T) { eachLink(t, cancelReachesTheSource) }

func cancelReachesTheSource(t *testing.T, link stack.Link) {
	plane := stack.StartPlane(t, true, nil)
	plane.StartLinked(t, link, "edge", nil)
	src := newSource(t)

	f := plane.Admin.Fetch(t, src.body("edge"))
	f.Await("accepted")
	await(t, "the request", src.opened)
	plane.Admin.Must(t, http.MethodDelete, "/api/fetches/"+f.Dispatch, nil, nil)
	if end := f.End(); end.Outcome != "cancelled" {
		t.Errorf("ended %+v", end)
	}
	await(t, "the source's client to go after DELETE", src.gone)

	f = plane.Admin.Fetch(t, src.body("edge"))
	f.Await("accepted")
	await(t, "the request", src.opened)
	f.HangUp()
	await(t, "the source's client to go after the caller", src.gone)

	if status, _ := plane.Admin.Call(t, http.MethodDelete, "/api/fetches/"+f.Dispatch+"0", nil); status != http.StatusNotFound {
		t.Errorf("an unknown dispatch was cancelled: %d", status)
	}
}

// D7: a registry that can't be read is `failed`, never `runner_unknown`; and a control plane that starts on a folder whose
// security buckets are gone raises an alarm instead of starting empty.
func TestMissingSecurityBucketIsAnAlarm(t *testing.T) {
	t.Parallel()
	plane := stack.StartPlane(t, true, nil)
	plane.Stop(t)
	streams, err := filepath.Glob(filepath.Join(plane.DataDir, "jetstream", "jetstream", "SEC", "streams", "KV_runbus_identities"))
	if err != nil || len(streams) != 1 {
		t.Fatalf("the stream's folder: %v %v", streams, err)
	}
	removeAll(t, streams[0])
	again := stack.Start(t, "control plane", plane.Bin.Face, plane.Env)
	if code := again.Exit(t); code == 0 || !strings.Contains(again.Stderr.String(), "identities") {
		t.Errorf("it ended with status %d: %s", code, again.Stderr)
	}
}
