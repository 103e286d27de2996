package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/org-runink/runbus/cmd/runink/demodata"
)

// console is the managed runner as `runner list` shows it.
func (u *up) console(t *testing.T) (pid int, state string) {
	t.Helper()
	var list []struct {
		ID, State, Link string
		Claims          struct{ Pid int }
	}
	r := u.runink(t, "runner", "list", "--json")
	if err := json.Unmarshal([]byte(r.stdout), &list); err != nil || len(list) == 0 || list[0].ID != "console" || list[0].Link != "local" {
		t.Fatalf("%v: %+v", err, r)
	}
	return list[0].Claims.Pid, list[0].State
}

// `runink up` has a managed runner when it says that it is up, which reads the sample data and what --files names, and goes with it.
func TestUpHasAManagedRunner(t *testing.T) {
	files := t.TempDir()
	if err := os.WriteFile(filepath.Join(files, "mine.csv"), []byte("n\n1\n2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	u := startUp(t, t.TempDir(), filepath.Join(t.TempDir(), "data"), "--no-runner", "--files", files)
	pid, state := u.console(t)
	if state != "RUNNING" || pid == 0 || pid == u.PlanePID {
		t.Errorf("it is %s, process %d", state, pid)
	}
	for path, rows := range map[string]int{filepath.Join(u.DataDir, "data", demodata.Name): demodata.Rows, filepath.Join(files, "mine.csv"): 2} {
		r := u.runink(t, "fetch", "run", "--json", "--runner", "console", "--source", "file", "--set", "path="+path)
		var out struct {
			Outcome         string
			Rows, RunnerPID int
		}
		if err := json.Unmarshal([]byte(r.stdout), &out); err != nil || out.Outcome != "completed" || out.Rows != rows || out.RunnerPID != pid {
			t.Errorf("%v: %.500s %s", err, r.stdout, r.stderr)
		}
	}
	if r := u.runink(t, "runner", "health", "console"); r.status != 0 || !strings.Contains(r.stdout, "goroutines") || !strings.Contains(r.stdout, "cpu") {
		t.Errorf("its health: %+v", r)
	}
	for _, command := range [][]string{{"revoke", "console"}, {"token", "console"}, {"connect", "console"}, {"edit", "--address", "127.0.0.1:1", "console"}} {
		if r := u.runink(t, append([]string{"runner"}, command...)...); r.status == 0 || !strings.Contains(r.stderr, "the platform's own") {
			t.Errorf("%v: %+v", command, r)
		}
	}
	u.Signal(t, syscall.SIGKILL)
	u.Exit(t)
	awaitGone(t, "managed runner", pid)
	awaitGone(t, "control plane", u.PlanePID)
}

func TestUpWithoutAManagedRunner(t *testing.T) {
	u := startUp(t, t.TempDir(), filepath.Join(t.TempDir(), "data"), "--managed", "none")
	if pid, state := u.console(t); state != "UNKNOWN" || pid != 0 {
		t.Errorf("it is %s, process %d", state, pid)
	}
	r := u.runink(t, "fetch", "run", "--runner", "console", "--source", "file", "--set", "path=x")
	if r.status != 3 || !strings.Contains(r.stderr, "Analysis failed: dedicated runner unreachable — fetch does not run on the control plane: there is none") {
		t.Errorf("a fetch on it: %+v", r)
	}
	u.Stop(t)
	saysWhatIsWrong(t, u)
}

// saysWhatIsWrong gives up wrong settings, as flags and as variables.
func saysWhatIsWrong(t *testing.T, u *up) {
	t.Helper()
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(policy, []byte("version: 2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"--managed", "yes"}, {"--managed-policy", policy}, {"--managed-policy", policy + ".none"}} {
		r := run(t, u.bin.Runink, u.env, append([]string{"up", "--data-dir", filepath.Join(t.TempDir(), "data"), "--http", "127.0.0.1:0", "--nats", "127.0.0.1:0"}, args...)...)
		if r.status != 2 || !strings.Contains(r.stderr, args[0]) {
			t.Errorf("%v: %+v", args, r)
		}
	}
	for name, values := range map[string][]string{
		"MANAGED_RUNNER_ENDPOINT": {"lcal", "face-runner:7102"}, "MANAGED_RUNNER_POLICY": {policy, policy + ".none"},
		"MANAGED_RUNNER_FILE_ROOTS": {policy + ".none"}, "MANAGED_RUNNER_MAX": {"many"}, "CORE_RUNNER_LEAF_LIFE": {"1d", "1s"},
		"CORE_RUNNER_ADMINS": {","}, "CORE_RUNNER_DIAL_DENY": {"x"}, "RUNBUS_TLS_CERT": {"cert.pem"}, "RUNBUS_WEBSOCKET": {"7101"},
	} {
		for _, value := range values {
			env := map[string]string{"HOME": u.env["HOME"], name: value}
			r := run(t, u.bin.Runink, env, "up", "--data-dir", filepath.Join(t.TempDir(), "data"), "--http", "127.0.0.1:0", "--nats", "127.0.0.1:0")
			if want := strings.Replace(name, "RUNBUS_WEBSOCKET", "WebSocket", 1); r.status != 2 || r.stdout != "" || !strings.Contains(r.stderr, want) {
				t.Errorf("%s=%s: %+v", name, value, r)
			}
		}
	}
}
