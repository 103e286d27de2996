// Package cli uses the binaries as a person does: on a terminal and in scripts, with what people get wrong.
package cli

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

func TestMain(m *testing.M) {
	code := m.Run()
	stack.Remove()
	os.Exit(code)
}

func binaries(t *testing.T) stack.Binaries {
	t.Helper()
	bin, err := stack.Build(true)
	if err != nil {
		t.Fatal(err)
	}
	return bin
}

// result is how a command ended.
type result struct {
	stdout, stderr string
	status         int
}

// run runs a binary to its end.
func run(t *testing.T, path string, env map[string]string, args ...string) result {
	t.Helper()
	p := stack.Start(t, strings.Join(args, " "), path, env, args...)
	status := p.Exit(t)
	return result{p.Stdout.String(), p.Stderr.String(), status}
}

// failure is the one object of an error with --json.
func (r result) failure(t *testing.T) (code, message, hint string) {
	t.Helper()
	var e struct {
		Error *struct{ Code, Message, Hint, DispatchID string } `json:"error"`
	}
	d := json.NewDecoder(strings.NewReader(r.stderr))
	d.DisallowUnknownFields()
	if err := d.Decode(&e); err != nil || e.Error == nil || d.More() {
		t.Fatalf("not one error object: %s (%v)", r.stderr, err)
	}
	return e.Error.Code, e.Error.Message, e.Error.Hint
}

// dispatch is the id of the dispatch that the error object is about.
func (r result) dispatch(t *testing.T) string {
	t.Helper()
	var e struct{ Error struct{ DispatchID string } }
	if err := json.Unmarshal([]byte(r.stderr), &e); err != nil || e.Error.DispatchID == "" {
		t.Fatalf("no dispatch in %s (%v)", r.stderr, err)
	}
	return e.Error.DispatchID
}

// up is a running `runink up`.
type up struct {
	*stack.Process
	bin stack.Binaries
	env map[string]string
	dir string
	report
}

type report struct {
	HTTP      string `json:"http"`
	NATS      string `json:"nats"`
	DataDir   string `json:"dataDir"`
	PlanePID  int    `json:"pid"`
	RunnerID  string `json:"runnerId"`
	RunnerPID int    `json:"runnerPid"`
}

// startUp starts `runink up --json` on free ports, the folder dir and the home folder home, and waits until it is up.
func startUp(t *testing.T, home, dir string, args ...string) *up {
	t.Helper()
	u := &up{bin: binaries(t), env: map[string]string{"HOME": home}, dir: dir}
	args = append([]string{"up", "--json", "--data-dir", dir, "--http", "127.0.0.1:0", "--nats", "127.0.0.1:0"}, args...)
	u.Process = stack.Start(t, "runink up", u.bin.Runink, u.env, args...)
	u.stopAtTheEnd(t)
	if _, _, err := u.Stdout.Await("}", 0); err != nil {
		t.Fatalf("it is not up: %v\n%s", err, u.Stderr)
	}
	if err := json.Unmarshal([]byte(u.Stdout.String()), &u.report); err != nil {
		t.Fatalf("%v in %s", err, u.Stdout)
	}
	return u
}

// stopAtTheEnd stops it if the test does not: one that is killed leaves children that still write for a moment, into folders that go.
func (u *up) stopAtTheEnd(t *testing.T) {
	t.Cleanup(func() {
		select {
		case <-u.Exited():
		default:
			u.Stop(t)
		}
	})
}

// runink runs a command with the context that up wrote, a fetch that ended late once more.
func (u *up) runink(t *testing.T, args ...string) (r result) {
	t.Helper()
	stack.Again(t, u.Stderr, func() (int, string) {
		r = run(t, u.bin.Runink, u.env, args...)
		return r.status, r.stdout + r.stderr
	})
	return r
}

// awaitGone asks until a process that is nobody's child here has ended.
func awaitGone(t *testing.T, what string, pid int) {
	t.Helper()
	give := time.Now().Add(stack.Patience)
	for alive(t, pid) {
		if time.Now().After(give) {
			t.Fatalf("the %s, process %d, is still there", what, pid)
		}
		<-time.After(20 * time.Millisecond)
	}
}

func alive(t *testing.T, pid int) bool {
	t.Helper()
	if pid <= 1 {
		t.Fatalf("%d is no process of a stack", pid)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z") // ended, and its parent has not asked yet
}

// held is an HTTP source that gives one row and no end, until its client goes away.
func held(t *testing.T) (url string, opened, gone <-chan struct{}) {
	t.Helper()
	in, out := make(chan struct{}, 8), make(chan struct{}, 8)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/x-ndjson")
		_, _ = fmt.Fprintln(w, `{"n":1}`)
		_ = http.NewResponseController(w).Flush()
		in <- struct{}{}
		<-r.Context().Done()
		out <- struct{}{}
	}))
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return s.URL, in, out
}

func await(t *testing.T, what string, event <-chan struct{}) {
	t.Helper()
	select {
	case <-event:
	case <-time.After(stack.Patience):
		t.Fatalf("waited for %s", what)
	}
}
