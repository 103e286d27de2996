package chaos

import (
	"regexp"
	"slices"
	"time"

	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/stack"
)

// mostAgain is how often a fetch is asked for again at most when its runner was not heard in time, and a drill is done again in whose time the
// machine stood still.
const mostAgain = 2

// unheard is found in the end of a fetch whose runner's first word had not come within the two seconds that it has, or that got to it only
// then. Only a machine that stood still meanwhile excuses it.
var unheard = regexp.MustCompile(`has not accepted it within|accepted the work too late|got to the work too late`)

// unheard reports whether a job, which has ended, may be asked for again: its runner never started it, since it came too late; or everything
// stood still in its time, so that the runner had no time left, or its word came late.
func (w *world) unheard(j *job) bool {
	if j.attempt == mostAgain {
		return false
	}
	switch j.outcome() {
	case "refused":
		if w.executed(j) > 0 {
			return false
		}
		if !unheard.MatchString(j.final.Message) {
			return stack.Late(j.final.Message)
		}
	case "failed":
		if j.accepted || !unheard.MatchString(j.final.Message) {
			return false
		}
	default:
		return false
	}
	return stack.Excused(w.t, j.String(), j.began, time.Now(), 0)
}

// neverRan fails if an attempt at the job that was refused was executed all the same.
func (w *world) neverRan(j *job) {
	w.t.Helper()
	for _, attempt := range j.refused {
		if n := w.origin.executed(j.marker, attempt); n > 0 {
			w.broken("refused", "attempt %d was refused, and executed %d times all the same: %s", attempt+1, n, j)
		}
	}
}

// inTime waits for ok until a bound from some moment on is over. What comes later is in time only if everything stood still for as long.
func (w *world) inTime(what string, from time.Time, bound time.Duration, ok func() bool) bool {
	w.t.Helper()
	for {
		is, now := ok(), time.Now()
		over := now.Sub(from) - bound
		switch {
		case is && over <= 0:
			return true
		case is:
			return stack.Excused(w.t, what, from, now, over)
		case over > 0 && stack.StoodStill(from, now) < over:
			return false
		}
		<-time.After(25 * time.Millisecond)
	}
}

// survived reports whether a job that did not survive the faults is excused, for as long as its drill can be done again: its runner was lost,
// and everything stood still for a while in its time.
func (w *world) survived(j *job) bool {
	if w.spare == 0 || j.outcome() != "runner_lost" || !stack.Excused(w.t, j.String(), j.began, j.began.Add(j.took), 0) {
		return false
	}
	w.excused = true
	return true
}

// freed waits until every slot of every runner can be had at once, for at most so long. Until then a runner may say that it is busy, and
// nothing else: one that has just stopped has a slot for a moment.
func (w *world) freed(within time.Duration) {
	w.t.Helper()
	if !w.inTime("all slots can be had", time.Now(), within, func() bool {
		all := w.allSlots(false)
		w.run(all, nil)
		for _, j := range all {
			if !j.accepted && j.final.Code != string(schemas.CodeRunnerBusy) && !stack.Late(j.final.Message) {
				w.broken("slots", "it was not accepted: %s", j)
			}
		}
		return w.t.Failed() || !slices.ContainsFunc(all, func(j *job) bool { return !j.accepted })
	}) {
		w.broken("slots", "not all slots can be had %s after the last fault", within)
	}
}

// allSlots is jobs for every slot of every runner.
func (w *world) allSlots(mustStart bool) (all []*job) {
	for _, m := range w.runners {
		for range w.slots {
			all = append(all, &job{runner: m.id, rows: 5, last: 300, timeout: 60 * time.Second, mustStart: mustStart, mustComplete: true})
		}
	}
	return all
}

// toldToStop is when the last of the jobs were: cancelled, left by their callers, or at their deadlines.
func toldToStop(jobs []*job) (last time.Time) {
	for _, j := range jobs {
		at := j.began.Add(j.timeout)
		switch {
		case j.cancelAt > 0:
			at = j.answered.Add(j.cancelAt)
		case j.hangUpAt > 0:
			at = j.began.Add(j.hangUpAt)
		}
		if at.After(last) {
			last = at
		}
	}
	return last
}
