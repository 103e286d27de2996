package chaos

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// job is one fetch of a run: what is asked for, what may be expected, and what came of it.
type job struct {
	runner             string
	rows, most         int // of the source; most is the caller's limit, 0 for none
	first, pause, last int // ms of the source: before the first row, after each hundred, before the end
	large              bool
	each               func(row int) // called when as many rows of a large result have come
	timeout            time.Duration
	cancelAt, hangUpAt time.Duration // 0: never
	mustStart          bool          // the runner can't be missing, nor busy
	mustComplete       bool          // once accepted: the faults are such that it must
	want               []string      // outcomes, if only some are right
	bereft             bool          // the control plane dies: its caller may be left with nothing
	patience           time.Duration // what the faults may add to the time it takes

	marker  string
	attempt int   // how often it was asked for again
	refused []int // attempts
	came
}

// came is what came of a job.
type came struct {
	dispatch    string
	status      int
	accepted    bool
	got, finals int
	disorder    string
	sum         string // of a large result
	broke       error  // of the connection to the control plane, or of a large result
	final       stack.Line
	hungUp      bool
	began       time.Time
	answered    time.Time // the first of its answer
	took        time.Duration
}

func (j *job) String() string {
	return fmt.Sprintf("fetch %s (%s on %s: %d rows, at most %d, pause %d, last %d, timeout %s, cancel %s, hang-up %s): status %d, accepted %v, %d rows, outcome %q %q after %s, %v",
		j.marker, j.dispatch, j.runner, j.rows, j.most, j.pause, j.last, j.timeout, j.cancelAt, j.hangUpAt, j.status, j.accepted, j.got, j.outcome(), j.final.Message, j.took.Round(time.Millisecond), j.broke)
}

// outcome is what the caller was told.
func (j *job) outcome() string {
	switch {
	case j.finals == 0:
		return ""
	case j.status != http.StatusOK && j.final.Outcome == "":
		return "refused"
	}
	return j.final.Outcome
}

// run starts the jobs at once, has faults do its part in the meantime, waits for all and judges them.
func (w *world) run(jobs []*job, faults func()) {
	w.t.Helper()
	var all sync.WaitGroup
	for _, j := range jobs {
		j.marker = "m" + strconv.FormatInt(w.number.Add(1), 10)
		all.Go(func() { w.fetch(j) })
	}
	if faults != nil {
		faults()
	}
	all.Wait()
	w.judge(jobs)
}

// fetch runs one to its end for its caller. One that must start is asked for again when its runner did not accept it within the two
// seconds that it has, and nobody is to blame.
func (w *world) fetch(j *job) {
	defer func() { w.ends.Store(j.marker, time.Now()) }()
	for ; ; j.attempt++ {
		j.came = came{} // and nothing else: what is asked for is read elsewhere meanwhile
		w.once(j)
		if j.outcome() == "refused" {
			j.refused = append(j.refused, j.attempt)
		}
		if !j.mustStart || !w.unheard(j) {
			return
		}
		say("chaos: asked for again: %s\n", j)
	}
}

// executed is how often the job was, as it was asked for last.
func (w *world) executed(j *job) int { return w.origin.executed(j.marker, j.attempt) }

func (w *world) once(j *job) {
	j.began = time.Now()
	defer func() { j.took = time.Since(j.began) }()
	body := map[string]any{
		"runnerId": j.runner, "timeout": j.timeout.String(),
		"source": map[string]any{"kind": "http", "settings": w.settings(j)},
	}
	if j.most > 0 {
		body["maxRows"] = j.most
	}
	b, err := json.Marshal(body)
	if err != nil {
		j.disorder = err.Error()
		return
	}
	ctx, hangUp := context.WithTimeout(w.t.Context(), j.within()) // what takes longer is never waited for
	defer hangUp()
	if j.hangUpAt > 0 {
		timer := time.AfterFunc(j.hangUpAt, hangUp)
		defer timer.Stop()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url+"/api/fetches", bytes.NewReader(b))
	if err != nil {
		j.disorder = err.Error()
		return
	}
	accept := mediaNDJSON
	if j.large {
		accept = mediaArrow
	}
	req.Header = http.Header{"Authorization": {"Bearer " + w.token}, "Content-Type": {"application/json"}, "Accept": {accept}}
	resp, err := w.client.Do(req)
	if err != nil {
		j.hungUp, j.broke = ctx.Err() != nil, err
		return
	}
	defer resp.Body.Close()
	j.answered, j.status, j.dispatch = time.Now(), resp.StatusCode, resp.Header.Get("Runbus-Dispatch-Id")
	if j.cancelAt > 0 && j.dispatch != "" {
		dispatch := j.dispatch
		timer := time.AfterFunc(j.cancelAt, func() { w.cancel(dispatch) })
		defer timer.Stop()
	}
	if j.large && j.status == http.StatusOK {
		j.takeArrow(resp)
		j.hungUp = ctx.Err() != nil
		return
	}
	lines := bufio.NewReaderSize(resp.Body, 64<<10)
	for {
		line, err := lines.ReadBytes('\n')
		if err == nil || j.status != http.StatusOK && len(line) > 0 {
			j.take(line)
		}
		if j.accepted {
			w.accepts.Store(j.marker, true)
		}
		if err != nil { // what is cut within a line is no line: who hung up, or lost the control plane, has those
			if !errors.Is(err, io.EOF) {
				j.broke = err
			}
			break
		}
	}
	j.hungUp = ctx.Err() != nil
}

// settings are those of the job's source.
func (w *world) settings(j *job) map[string]string {
	url := fmt.Sprintf("%s/?marker=%s&attempt=%d&rows=%d&first=%d&pause=%d&last=%d", w.origin.URL, j.marker, j.attempt, j.rows, j.first, j.pause, j.last)
	if j.large {
		url += "&large=1"
	}
	return map[string]string{"url": url, "format": "jsonl", "timeout": "10m"}
}

// endOf is when a job ended for its caller; false while it has not.
func (w *world) endOf(j *job) (time.Time, bool) {
	at, ok := w.ends.Load(j.marker)
	if !ok {
		return time.Time{}, false
	}
	return at.(time.Time), true
}

// underWay is running, and waits until the callers know it, too: a work that has begun tells so some milliseconds later.
func (w *world) underWay(jobs []*job) {
	w.t.Helper()
	w.running(jobs)
	if !eventually(stack.Patience, func() bool {
		return !slices.ContainsFunc(jobs, func(j *job) bool { _, told := w.accepts.Load(j.marker); return !told })
	}) {
		w.t.Error("not all callers were told that their fetches were accepted")
	}
}

// running waits until the source answers all of the jobs.
func (w *world) running(jobs []*job) {
	w.t.Helper()
	if !eventually(stack.Patience, func() bool {
		return !slices.ContainsFunc(jobs, func(j *job) bool { return !slices.Contains(w.origin.busy(), j.marker) })
	}) {
		w.t.Errorf("not all fetches have begun: the source is answering %q", w.origin.busy())
	}
}

// take reads one line of the answer.
func (j *job) take(b []byte) {
	if j.status != http.StatusOK {
		var p struct {
			stack.Line
			Detail string `json:"detail"`
		}
		if json.Unmarshal(b, &p) == nil {
			j.final, j.finals = p.Line, j.finals+1
			j.final.Message = p.Detail
		}
		return
	}
	var l stack.Line
	if err := json.Unmarshal(b, &l); err != nil {
		j.disorder = fmt.Sprintf("line %.200q: %v", b, err)
		return
	}
	if j.finals > 0 {
		j.disorder = "a line of type " + l.Type + " behind the end"
	}
	switch l.Type {
	case "accepted":
		j.accepted = true
	case "row":
		var row struct {
			N    int
			Text string
		}
		if err := json.Unmarshal(l.Row, &row); err != nil || row.N != j.got || row.Text != rowText(j.got) {
			j.disorder = fmt.Sprintf("row %s in place %d", l.Row, j.got)
		}
		j.got++
	case "result", "error":
		j.final, j.finals = l, j.finals+1
	}
}

// cancel asks for the end of a dispatch as its caller would from elsewhere; one that has ended is no error.
func (w *world) cancel(dispatch string) {
	req, err := http.NewRequestWithContext(w.t.Context(), http.MethodDelete, w.url+"/api/fetches/"+dispatch, nil)
	if err != nil {
		return
	}
	req.Header = http.Header{"Authorization": {"Bearer " + w.token}}
	if resp, err := w.client.Do(req); err == nil {
		_ = resp.Body.Close()
	}
}

// overtime is what a fetch may take beyond its timeout: the confirmation of the cancel, and a machine that is busy.
const overtime = 20 * time.Second

// within is how long a caller waits for a fetch that never ends.
func (j *job) within() time.Duration { return j.timeout + stack.Patience + j.patience }

// judge holds the jobs against the invariants.
func (w *world) judge(jobs []*job) {
	w.t.Helper()
	w.jobs = append(w.jobs, jobs...)
	audit := w.audit(jobs)
	for _, j := range jobs {
		n := w.executed(j)
		for attempt := range j.attempt + 1 {
			if n := w.origin.executed(j.marker, attempt); n > 1 {
				w.broken("at-most-once", "executed %d times, asked for the %dth time: %s", n, attempt+1, j)
			}
		}
		if j.disorder != "" {
			w.broken("rows", "%s: %s", j.disorder, j)
		}
		outcome := j.outcome()
		if j.finals > 1 || j.finals == 0 && !j.hungUp && !j.bereft {
			w.broken("one-outcome", "%d outcomes: %s", j.finals, j)
		}
		w.neverRan(j)
		want := j.rows
		if j.most > 0 {
			want = min(want, j.most)
		}
		if outcome == "completed" && (j.got != want || int(j.final.Rows) != want || n != 1) {
			w.broken("rows", "not %d rows, of one execution (%d): %s", want, n, j)
		}
		if over := j.took - j.timeout - overtime - j.patience; over > 0 && !stack.Excused(w.t, j.String(), j.began, j.began.Add(j.took), over) {
			w.broken("in-time", "it took too long: %s", j)
		}
		if j.mustStart && !j.accepted {
			w.broken("slots", "it was not accepted: %s", j)
		}
		if j.mustComplete && j.accepted && outcome != "completed" && !w.survived(j) {
			w.broken("survives", "it did not survive the faults: %s", j)
		}
		if len(j.want) > 0 && !slices.Contains(j.want, outcome) {
			w.broken("right-outcome", "not one of %q: %s", j.want, j)
		}
		if j.dispatch == "" {
			continue
		}
		ends := audit[j.dispatch]
		switch {
		case len(ends) == 0 && j.bereft:
		case len(ends) != 1:
			w.broken("audit", "%d ends in the audit %q: %s", len(ends), ends, j)
		case outcome != "" && ends[0] != outcome:
			w.broken("audit", "the audit has %q: %s", ends[0], j)
		}
	}
}

// audit is the outcomes that the audit has of these dispatches. It comes a moment after the answer.
func (w *world) audit(jobs []*job) (ends map[string][]string) {
	w.t.Helper()
	path := "/api/audit?limit=" + strconv.Itoa(min(4*len(jobs)+100, 1000))
	eventually(stack.Patience, func() bool {
		var events []struct {
			Action, Subject string
			Details         map[string]string
		}
		status, body := w.plane.Admin.Call(w.t, http.MethodGet, path, nil)
		if status == http.StatusServiceUnavailable {
			return false // it says so itself when it can't be read now
		}
		if err := json.Unmarshal(body, &events); status != http.StatusOK || err != nil {
			w.t.Fatalf("the audit: %d %s: %v", status, body, err)
		}
		ends = map[string][]string{}
		for _, e := range events {
			if id, ok := strings.CutPrefix(e.Subject, "dispatch:"); ok && (e.Action == "dispatch.end" || e.Action == "dispatch.refuse") {
				ends[id] = append(ends[id], e.Details["outcome"])
			}
		}
		for _, j := range jobs {
			if j.dispatch != "" && !j.bereft && len(ends[j.dispatch]) == 0 {
				return false
			}
		}
		return true
	})
	return ends
}

// idle fails unless the source's last requests end soon: what was cancelled, or is lost, is not read on.
func (w *world) idle(within time.Duration) {
	w.t.Helper()
	w.idleSince(time.Now(), within)
}

// idleSince is idle, reckoned from a moment.
func (w *world) idleSince(from time.Time, within time.Duration) {
	w.t.Helper()
	if !w.inTime("the source is no longer read", from, within, func() bool { return len(w.origin.busy()) == 0 }) {
		w.broken("stopped", "the source was read for more than %s: %q", within, w.origin.busy())
	}
}
