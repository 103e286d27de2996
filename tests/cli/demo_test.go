package cli

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/cmd/runink/demodata"
	"github.com/org-runink/runbus/tests/stack"
)

// One object, exactly these fields, three processes, all rows, and nothing left: without a home folder too.
func TestDemo(t *testing.T) {
	bin, tmp := binaries(t), t.TempDir()
	demo := func() result {
		return run(t, bin.Runink, map[string]string{"HOME": "/none", "XDG_CONFIG_HOME": "/none", "TMPDIR": tmp}, "demo", "--json")
	}
	began := time.Now()
	r := demo()
	if stack.Late(r.stderr) && stack.Excused(t, r.stderr, began, time.Now(), 0) { // once
		wantEmpty(t, tmp)
		r = demo()
	}
	if r.status != 0 || r.stderr != "" {
		t.Fatalf("%+v", r)
	}
	var fields map[string]json.RawMessage
	d := json.NewDecoder(strings.NewReader(r.stdout))
	if err := d.Decode(&fields); err != nil || d.More() {
		t.Fatalf("not one object: %s", r.stdout)
	}
	want := []string{"bytes", "controlPlanePid", "dispatchId", "durationMs", "phases", "pid", "rows", "runnerId", "runnerPid", "source", "tenantId"}
	if got := slices.Sorted(maps.Keys(fields)); !slices.Equal(got, want) {
		t.Errorf("fields %q", got)
	}
	var out struct{ Rows, PID, ControlPlanePID, RunnerPID int }
	if err := json.Unmarshal([]byte(r.stdout), &out); err != nil {
		t.Fatal(err)
	}
	if out.Rows != demodata.Rows || out.PID == out.ControlPlanePID || out.PID == out.RunnerPID || out.ControlPlanePID == out.RunnerPID {
		t.Errorf("%+v", out)
	}
	for _, pid := range []int{out.ControlPlanePID, out.RunnerPID} {
		if alive(t, pid) {
			t.Errorf("process %d is still there", pid)
		}
	}
	wantEmpty(t, tmp)
}

func TestInterruptedDemoLeavesNothing(t *testing.T) {
	for _, at := range []string{"Starting", "control plane  process", "Fetching"} {
		t.Run(at, func(t *testing.T) {
			// A fetch is so short that it may be done before the signal comes.
			for tries := 1; !interrupted(t, at) && at != "Fetching"; tries++ {
				if tries == 5 {
					t.Fatal("each demo was done before it was interrupted")
				}
			}
		})
	}
}

// interrupted starts a demo, interrupts it when it says a text, and sees that it leaves nothing. It returns false for one that was done
// before, or that ended since the machine stood still.
func interrupted(t *testing.T, at string) bool {
	t.Helper()
	tmp, began := t.TempDir(), time.Now()
	p := stack.Start(t, "runink demo", binaries(t).Runink, map[string]string{"TMPDIR": tmp}, "demo")
	p.Stdout.Must(t, at)
	select {
	case <-p.Exited():
	default:
		if err := syscall.Kill(p.PID, syscall.SIGINT); err != nil && !errors.Is(err, syscall.ESRCH) { // p.Signal is for what has not ended
			t.Fatal(err)
		}
	}
	status := p.Exit(t)
	wantEmpty(t, tmp)
	if status == 0 && p.Stdout.Has("Timeline") {
		return false
	}
	if said := p.Stderr.String(); stack.Late(said) && stack.Excused(t, said, began, time.Now(), 0) {
		return false
	}
	if status != 1 {
		t.Errorf("status %d\n%s\n%s", status, p.Stdout, p.Stderr)
	}
	return true
}

func wantEmpty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 0 {
		t.Errorf("left behind: %v %v", entries, err)
	}
}
