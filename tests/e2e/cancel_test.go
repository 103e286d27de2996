package e2e

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// auditEvent is an event as the API shows it.
type auditEvent struct {
	Action, Subject, Outcome string
	Details                  map[string]string
}

// endOf waits until the end of a dispatch is in the audit, and returns the event.
func endOf(t *testing.T, plane *stack.Plane, dispatch string) auditEvent {
	t.Helper()
	give := time.Now().Add(stack.Patience)
	for {
		var events []auditEvent
		plane.Admin.Must(t, http.MethodGet, "/api/audit?limit=1000", nil, &events)
		for _, e := range events {
			if e.Action == "dispatch.end" && e.Subject == "dispatch:"+dispatch {
				return e
			}
		}
		if time.Now().After(give) {
			t.Fatalf("the end of dispatch %q is not in the audit: %+v", dispatch, events)
		}
		<-time.After(20 * time.Millisecond)
	}
}

// D12 on a database: however the caller cancels, the query is gone from pg_stat_activity and the outcome is `cancelled`.
func TestCancelledQueryIsGone(t *testing.T) {
	eachLink(t, cancelledQueryIsGone)
}

func cancelledQueryIsGone(t *testing.T, link stack.Link) {
	user := newLogin(t, "cancels")
	plane := stack.StartPlane(t, true, nil)
	runner := plane.StartLinked(t, link, "edge", nil)
	queries := []struct{ name, sql string }{
		{"a query that computes", "SELECT pg_sleep(600)::text AS s"},
		{"a query that streams for ever", "SELECT md5(generate_series(1, 1000000000000)::text) AS m"},
	}
	ways := []struct {
		name string
		// cancel starts a fetch, awaits that it runs, cancels it, and returns its id.
		cancel func(t *testing.T, sql string) (dispatch string)
	}{
		{"DELETE", func(t *testing.T, sql string) string {
			f := plane.Admin.Fetch(t, user.body("edge", sql))
			f.Await("accepted")
			user.awaitRuns(t)
			plane.Admin.Must(t, http.MethodDelete, "/api/fetches/"+f.Dispatch, nil, nil)
			if end := f.End(); end.Outcome != "cancelled" || end.Code != "cancelled" {
				t.Errorf("ended %+v", end)
			}
			return f.Dispatch
		}},
		{"closed connection", func(t *testing.T, sql string) string {
			f := plane.Admin.Fetch(t, user.body("edge", sql))
			f.Await("accepted")
			user.awaitRuns(t)
			f.HangUp()
			return f.Dispatch
		}},
		{"Ctrl-C", func(t *testing.T, sql string) string {
			file := filepath.Join(t.TempDir(), "rows")
			c, dispatch := user.start(t, plane, "edge", sql, "--format", "json", "--out", file)
			c.Signal(t, syscall.SIGINT)
			if code := c.Exit(t); code != 1 || !c.Stderr.Has("cancelled") {
				t.Errorf("runink ended with status %d: %s", code, c.Stderr)
			}
			nothingLeft(t, file)
			return dispatch
		}},
		{"Ctrl-C of a raw format", func(t *testing.T, sql string) string {
			file := filepath.Join(t.TempDir(), "rows")
			c, dispatch := user.start(t, plane, "edge", sql, "--format", "arrow", "--out", file)
			c.Signal(t, syscall.SIGINT)
			if code := c.Exit(t); code != 1 || !c.Stderr.Has("cancelled") {
				t.Errorf("runink ended with status %d: %s", code, c.Stderr)
			}
			nothingLeft(t, file)
			return dispatch
		}},
	}
	for _, query := range queries {
		for _, way := range ways {
			t.Run(query.name+", "+way.name, func(t *testing.T) {
				dispatch := way.cancel(t, query.sql)
				t.Logf("the query was gone %s after the cancel", user.awaitGone(t))
				if e := endOf(t, plane, dispatch); e.Details["outcome"] != "cancelled" {
					t.Errorf("the audit has %+v", e)
				}
			})
		}
	}
	// The runner goes on.
	if end := plane.Admin.Fetch(t, user.body("edge", "SELECT 1 AS n")).End(); end.Outcome != "completed" || end.Rows != 1 {
		t.Errorf("a fetch after all that ended %+v", end)
	}
	runner.Stop(t)
	plane.Stop(t)
}

// nothingLeft fails unless neither the file nor a part of it is there.
func nothingLeft(t *testing.T, file string) {
	t.Helper()
	left, err := filepath.Glob(file + "*")
	if err != nil || len(left) > 0 {
		t.Errorf("files are left: %v %v", left, err)
	}
}

// D4 on a database: at the deadline the query is stopped.
func TestDeadlineStopsTheQuery(t *testing.T) {
	eachLink(t, deadlineStopsTheQuery)
}

func deadlineStopsTheQuery(t *testing.T, link stack.Link) {
	user := newLogin(t, "deadline")
	plane := stack.StartPlane(t, true, nil)
	plane.StartLinked(t, link, "edge", nil)
	// Runner and control plane both watch the clock; whoever is first says so.
	stopped := regexp.MustCompile(`ran out of time and was stopped|did not finish within [\dms]+ and was stopped`)
	for timeout := 4 * time.Second; ; timeout *= 2 {
		body := user.body("edge", "SELECT pg_sleep(600)::text AS s")
		body["timeout"] = timeout.String()
		f := plane.Admin.Fetch(t, body)
		f.Await("accepted")
		if end := f.End(); end.Outcome != "deadline" || end.Code != "deadline" || !stopped.MatchString(end.Message) {
			t.Errorf("ended %+v", end)
		}
		user.awaitGone(t)
		if steps := timelineOf(t, plane.Admin, f.Dispatch).phases(); strings.Contains(steps, "querying") {
			break // else the query had not begun by then, and this showed nothing
		} else if timeout > stack.Patience {
			t.Fatalf("within %s the query did not begin: %s", timeout, steps)
		}
	}

	began := time.Now()
	stdout, stderr, status := plane.Runink(t, user.args(t, "edge", "SELECT pg_sleep(600)::text AS s", "--timeout", "5s")...)
	if status != 1 || stdout != "" || !stopped.MatchString(stderr) {
		t.Errorf("runink ended with status %d after %s: %s %s", status, time.Since(began), stdout, stderr)
	}
	user.awaitGone(t)
}

// A secret is sealed to the runner, used there, and shown nowhere: not when it opens the source, not when the source refuses it.
func TestSecretIsUsedAndNotShown(t *testing.T) {
	eachLink(t, secretIsUsedAndNotShown)
}

func secretIsUsedAndNotShown(t *testing.T, link stack.Link) {
	user := newLogin(t, "secrets")
	plane := stack.StartPlane(t, true, nil)
	runner := plane.StartLinked(t, link, "edge", nil)

	good := plane.Admin.Fetch(t, user.body("edge", "SELECT current_user::text AS u"))
	if end := good.End(); end.Outcome != "completed" || end.Rows != 1 {
		t.Errorf("ended %+v", end)
	}
	const wrong = "wrong-pw-canary-8Jq2"
	refused := fmt.Sprintf("password authentication failed for user %q", user.User)
	body := user.body("edge", "SELECT 1 AS n")
	body["secrets"] = map[string]string{"password": wrong}
	bad := plane.Admin.Fetch(t, body)
	end := bad.End()
	if end.Outcome != "failed" || end.Code != "source_failed" || !strings.Contains(end.Message, refused) || !strings.Contains(end.Message, "28P01") {
		t.Errorf("ended %+v", end)
	}
	args := user.args(t, "edge", "SELECT 1 AS n")
	for i, a := range args {
		if a == "--secrets-file" {
			args[i+1] = secretsFile(t, wrong)
		}
	}
	stdout, stderr, status := plane.Runink(t, args...)
	if status != 1 || !strings.Contains(stderr, refused) {
		t.Errorf("runink ended with status %d: %s", status, stderr)
	}

	// The audit says that credentials were read, by whom, for which dispatch; and has none of them.
	endOf(t, plane, bad.Dispatch)
	_, audit := plane.Admin.Call(t, http.MethodGet, "/api/audit?limit=1000", nil)
	var events []auditEvent
	if err := json.Unmarshal(audit, &events); err != nil {
		t.Fatal(err)
	}
	read := 0
	for _, e := range events {
		if e.Action == "credential.read" && e.Details["names"] == "password" {
			read++
		}
	}
	if read != 3 {
		t.Errorf("%d credential reads are in the audit, not 3: %s", read, audit)
	}
	var answers strings.Builder
	for _, l := range append(good.Lines, bad.Lines...) {
		b, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		answers.Write(b)
	}
	for where, text := range map[string]string{
		"the log of the control plane": plane.Stderr.String() + plane.Stdout.String(), "the log of the runner": runner.Stderr.String() + runner.Stdout.String(),
		"the answers": answers.String(), "runink's output": stdout + stderr, "the audit": string(audit),
	} {
		for _, secret := range []string{wrong, user.Password} {
			if strings.Contains(text, secret) {
				t.Errorf("%s shows a password", where)
			}
		}
	}
	// Nor has anything on disk: the bus' streams are there.
	plane.Stop(t)
	err := filepath.WalkDir(plane.DataDir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if strings.Contains(string(b), wrong) || strings.Contains(string(b), user.Password) {
			t.Errorf("%s has a password in it", filepath.Base(path))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// What a source fails with that fails in the middle, some chunks behind the beginning: a machine that has other things to do takes long
// for rows as JSON.
const (
	failsInTheMiddle = "SELECT md5(i::text) AS m, 1 / (60000 - i) AS q FROM (SELECT generate_series(1, 90000) AS i) AS s"
	rowOfFailure     = 60_000
	failure          = "division by zero"
	failureState     = "SQLSTATE 22012"
)

// A source that fails in the middle fails the fetch, in its own words, in each format's own place; a result that was cut short is
// never taken for a whole one.
func TestSourceFailsInTheMiddle(t *testing.T) {
	eachLink(t, sourceFailsInTheMiddle)
}

func sourceFailsInTheMiddle(t *testing.T, link stack.Link) {
	user := newLogin(t, "breaks")
	plane := stack.StartPlane(t, true, nil)
	plane.StartLinked(t, link, "edge", nil)
	f := plane.Admin.Fetch(t, user.body("edge", failsInTheMiddle))
	end := f.End()
	if end.Outcome != "failed" || end.Code != "source_failed" || !strings.Contains(end.Message, failure) || !strings.Contains(end.Message, failureState) {
		t.Errorf("NDJSON ended %+v", end)
	}
	rows := 0
	for _, l := range f.Lines {
		if l.Type == "row" {
			rows++
		}
	}
	if rows == 0 || rows >= rowOfFailure {
		t.Errorf("%d rows came before the failure", rows)
	}

	for _, accept := range []string{arrowStream, "text/csv"} {
		resp := plane.Admin.Send(t, t.Context(), http.MethodPost, "/api/fetches", user.body("edge", failsInTheMiddle), accept)
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", accept, resp.Status)
		}
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		if len(b) == 0 {
			t.Errorf("%s: no rows came before the failure", accept)
		}
		var e stack.Line
		if err := json.Unmarshal([]byte(resp.Trailer.Get("Runbus-Error")), &e); err != nil {
			t.Fatalf("%s: %v in %v", accept, err, resp.Trailer)
		}
		if outcome := resp.Trailer.Get("Runbus-Outcome"); outcome != "failed" || e.Code != "source_failed" || !strings.Contains(e.Message, failure) || !strings.Contains(e.Message, failureState) {
			t.Errorf("%s ended %q %+v", accept, outcome, e)
		}
		if accept == arrowStream {
			if sum, err := sumOfArrow(strings.NewReader(string(b))); err == nil {
				t.Errorf("the Arrow stream looks whole, with %d rows", sum.Rows)
			}
		} else if _, err := csv.NewReader(strings.NewReader(string(b))).ReadAll(); err != nil {
			t.Errorf("the CSV is cut within a record: %v", err)
		}
	}

	user.awaitGone(t)
}

// The command line leaves nothing of a result that was cut short. It sees the API alone, which is the same over each link.
func TestRuninkLeavesNoPartOfAResult(t *testing.T) {
	t.Parallel()
	user := newLogin(t, "cut")
	plane := stack.StartPlane(t, true, nil)
	plane.StartRunner(t, "edge", nil)
	for _, format := range []string{"arrow", "csv", "json", "table"} {
		file := filepath.Join(t.TempDir(), "rows")
		_, stderr, status := plane.Runink(t, user.args(t, "edge", failsInTheMiddle, "--format", format, "--out", file)...)
		if status != 1 || !strings.Contains(stderr, failure) || !strings.Contains(stderr, failureState) {
			t.Errorf("%s ended with status %d: %s", format, status, stderr)
		}
		nothingLeft(t, file)
	}
	user.awaitGone(t)
}
