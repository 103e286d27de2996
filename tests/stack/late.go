package stack

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
)

// mostLate is how many fetches of a run of tests may be Late. A machine stands still now and then; what is late each time is broken.
const mostLate = 8

var lates atomic.Int32

// Late reports whether a refusal says that the control plane did not hear within the two seconds that a runner has for that that it accepted
// a fetch, and that it never started, or was stopped at once; or that the runner did not get to it in time: on a machine that stands still for
// as long that is nobody's fault.
func Late(refusal string) bool {
	return strings.Contains(refusal, "is offline: no answer") || toldLate(refusal)
}

// toldLate reports whether a refusal says that the runner had the work: its acceptance came too late, or it got to it too late.
func toldLate(refusal string) bool {
	return strings.Contains(refusal, "accepted the work too late, and was stopped") || strings.Contains(refusal, "got to the work too late, and has not run it")
}

// excuse returns nil when the fetch of this dispatch, which ended Late as said, may be asked for again, and not too many were late. Either its
// assignment came to the runner too late, whose log says so within patience: one that was lost has no excuse. Or the runner had it, and was late:
// the machine stood still meanwhile.
func excuse(id, said string, patience time.Duration) error {
	if n := lates.Add(1); n > mostLate {
		return fmt.Errorf("%d fetches were not accepted in time, of which dispatch %s is the last", n, id)
	}
	if toldLate(said) {
		u, err := ulid.ParseStrict(id)
		if err != nil {
			return fmt.Errorf("dispatch %q: %w", id, err)
		}
		_, err = still.excuse(ulid.Time(u.Time()), time.Now(), 0)
		return err
	}
	for give := time.Now().Add(patience); !cameLate(id); <-time.After(20 * time.Millisecond) {
		if time.Now().After(give) {
			return fmt.Errorf("no runner has the assignment of dispatch %s, neither in time nor late", id)
		}
	}
	return nil
}

// Excuse fails the test unless the fetch of this dispatch, which ended Late as said, may be asked for again.
func Excuse(t testing.TB, id, said string) {
	t.Helper()
	if err := excuse(id, said, Patience); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	t.Logf("asked for again: %s", said)
}

// cameLate reports whether a process of this run of tests has logged that it dropped the assignment of this dispatch.
func cameLate(id string) bool {
	if id == "" {
		return false
	}
	alive.mu.Lock()
	all := slices.Clone(alive.all)
	alive.mu.Unlock()
	return slices.ContainsFunc(all, func(p *Process) bool {
		return p.Stderr.contains(func(line string) bool {
			return strings.Contains(line, id) && strings.Contains(line, "an assignment ") && strings.Contains(line, "dropped")
		})
	})
}

// aDispatch is the dispatch that a log line is about.
var aDispatch = regexp.MustCompile(`\bdispatch"?[=:]"?([0-9A-Z]{26})\b`)

// lateDispatch waits for the first line behind index from of a control plane's log in which a fetch ends Late, and returns its dispatch.
func lateDispatch(log *Lines, from int) (string, error) {
	line, _, err := log.await(func(line string) bool { return Late(line) && aDispatch.MatchString(line) }, from)
	if err != nil {
		return "", fmt.Errorf("the control plane logs no fetch that was not accepted in time: %w", err)
	}
	return aDispatch.FindStringSubmatch(line)[1], nil
}

// StartFetch starts a command line that fetches for long and returns it when runs, which is told when it ends, says that it does. A fetch that
// ended Late is asked for again, once; the test fails if that has no excuse.
func (p *Plane) StartFetch(t testing.TB, runs func(ended <-chan struct{}) bool, args ...string) *Process {
	t.Helper()
	for again := false; ; again = true {
		from := p.Stderr.count()
		c := Start(t, "runink "+strings.Join(args, " "), p.Bin.Runink, p.RuninkEnv(), args...)
		if runs(c.Exited()) {
			return c
		}
		status, said := c.Exit(t), c.Stdout.String()+c.Stderr.String()
		if again || !Late(said) {
			t.Fatalf("it ended with status %d before its fetch ran: %s", status, said)
		}
		id, err := lateDispatch(p.Stderr, from)
		if err != nil {
			t.Fatalf("%v: %s", err, said)
		}
		Excuse(t, id, said)
	}
}

// contains reports whether there is such a line so far.
func (l *Lines) contains(is func(line string) bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.lines, is)
}

// count is how many lines there are so far.
func (l *Lines) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.lines)
}
