package stack

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
)

const lateID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"

// logs is a process that has logged these lines.
func logs(t *testing.T, lines string) *Process {
	t.Helper()
	p := &Process{Stderr: newLines()}
	p.Stderr.readFrom(strings.NewReader(lines), nil, func(string) {})
	p.enlist()
	t.Cleanup(p.discharge)
	return p
}

const (
	noAnswer  = "runner \"a\" is offline: no answer"
	tooLate   = "runner \"a\" is offline: it accepted the work too late, and was stopped"
	gotToLate = "runner \"a\" is offline: it got to the work too late, and has not run it"
)

// Only an assignment that came to a runner is an excuse, and not for ever.
func TestExcuse(t *testing.T) {
	t.Cleanup(func() { lates.Store(0) })
	logs(t, "level=WARN msg=\"credentials for a work that does not run here were dropped\" dispatch="+lateID+"\n")
	for _, id := range []string{lateID, ""} {
		if err := excuse(id, noAnswer, 0); err == nil {
			t.Errorf("%q is excused, of which no assignment came", id)
		}
	}
	logs(t, "level=WARN msg=\"an assignment came too late and was dropped unrun\" dispatch="+lateID+"\n")
	for range mostLate - 2 {
		if err := excuse(lateID, noAnswer, 0); err != nil {
			t.Fatal(err)
		}
	}
	if err := excuse(lateID, noAnswer, 0); err == nil {
		t.Error("any number is excused")
	}
}

// Who had the work and was late is excused by a standstill in the time of the fetch alone, and not by what says that it was late.
func TestExcuseOfWhoHadTheWork(t *testing.T) {
	t.Cleanup(func() { lates.Store(0) })
	stands(t)
	for _, said := range []string{tooLate, gotToLate} {
		id := schemas.NewULID(time.Now())
		logs(t, "level=INFO msg=\"fetch ended\" dispatch="+id+" error=\""+said+"\"\nlevel=WARN msg=\"an assignment came too late and was dropped unrun\" dispatch="+id+"\n")
		if err := excuse(id, said, 0); err == nil {
			t.Errorf("%q is excused, while nothing stood still", said)
		}
	}
	stand(-time.Minute, time.Second)
	if err := excuse(schemas.NewULID(time.Now().Add(-10*time.Second)), tooLate, 0); err == nil {
		t.Error("it is excused by a standstill before it")
	}
	stand(-3*time.Second, 2*time.Second)
	for _, said := range []string{tooLate, gotToLate} {
		if err := excuse(schemas.NewULID(time.Now().Add(-10*time.Second)), said, 0); err != nil {
			t.Errorf("%q: %v", said, err)
		}
	}
	if err := excuse("", tooLate, 0); err == nil {
		t.Error("it is excused without a dispatch")
	}
}

// What ended late is asked for again once.
func TestLateIsAskedForAgainOnce(t *testing.T) {
	t.Cleanup(func() { lates.Store(0) })
	stands(t)
	stand(-3*time.Second, 2*time.Second)
	logs(t, "{\"msg\":\"an assignment that is known already was dropped\",\"dispatch\":\""+lateID+"\"}\n")
	for _, why := range []string{"no answer", "it accepted the work too late, and was stopped", "it got to the work too late, and has not run it"} {
		askedForAgainOnce(t, "{\"detail\":\"runner \\\"edge-1\\\" is offline: "+why+"\"}")
	}
}

func askedForAgainOnce(t *testing.T, refusal string) {
	t.Helper()
	asked := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked++
		w.Header().Set("Runbus-Dispatch-Id", lateID)
		w.WriteHeader(http.StatusConflict)
		_, _ = io.WriteString(w, refusal)
	}))
	t.Cleanup(s.Close)
	status, body := (&API{URL: s.URL}).Call(t, http.MethodPost, "/api/fetches", map[string]string{})
	if status != http.StatusConflict || string(body) != refusal || asked != 2 || !json.Valid(body) {
		t.Errorf("%d %s after %d calls", status, body, asked)
	}
}

// The dispatch of a command line is the one that the control plane tells of behind that, whatever the form of its log.
func TestLateDispatch(t *testing.T) {
	for _, line := range []string{
		"level=INFO msg=\"fetch ended\" dispatch=" + lateID + " tenant=local error=\"runner \\\"a\\\" is offline: no answer\"",
		"{\"msg\":\"fetch ended\",\"dispatch\":\"" + lateID + "\",\"error\":\"runner \\\"a\\\" is offline: no answer\"}",
	} {
		p := logs(t, strings.ReplaceAll(line, lateID, strings.Repeat("0", 26))+"\n"+line+"\n")
		if id, err := lateDispatch(p.Stderr, 1); id != lateID || err != nil {
			t.Errorf("%q, %v in %s", id, err, line)
		}
	}
	if id, err := lateDispatch(logs(t, "another line\n").Stderr, 0); err == nil {
		t.Errorf("%q in a log without", id)
	}
}

// A command line is run again, once, and only for what is Late.
func TestAgain(t *testing.T) {
	t.Cleanup(func() { lates.Store(0) })
	const refusal = "runner \"edge-1\" is offline: no answer"
	p := logs(t, "level=WARN msg=\"an assignment came too late and was dropped unrun\" dispatch="+lateID+"\n")
	for _, c := range []struct {
		status int
		text   string
		calls  int
	}{{0, refusal, 1}, {3, "runner \"edge-1\" is offline: not connected", 1}, {3, refusal, 2}} {
		calls := 0
		Again(t, p.Stderr, func() (int, string) {
			calls++
			p.Stderr.readFrom(strings.NewReader("level=INFO msg=\"fetch ended\" dispatch="+lateID+" error=\""+c.text+"\"\n"), nil, func(string) {})
			return c.status, c.text
		})
		if calls != c.calls {
			t.Errorf("status %d, %q: run %d times", c.status, c.text, calls)
		}
	}
}
