package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/org-runink/runbus/tests/stack"
)

// The variables of a control plane hold for `runink up` as for face: where it listens, what console may reach and read, who may change
// runners, where runners are dialled.
func TestUpHonoursTheVariablesOfAControlPlane(t *testing.T) {
	files := t.TempDir()
	for name, rows := range map[string]string{"mine.csv": "n\n1\n", "denied.csv": "n\n1\n"} {
		if err := os.WriteFile(filepath.Join(files, name), []byte(rows), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(policy, []byte("version: 1\ndefault: allow\ndeny:\n  - name: mine\n    paths: [\""+filepath.Join(files, "denied.csv")+"\"]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	u := &up{bin: binaries(t), env: map[string]string{
		"HOME": t.TempDir(), "RUNBUS_DATA_DIR": filepath.Join(t.TempDir(), "data"), "RUNBUS_HTTP": "127.0.0.1:0", "RUNBUS_NATS": "0.0.0.0:0",
		"RUNBUS_WEBSOCKET": "not used: the flag is", "RUNBUS_NATS_PLAINTEXT": "true", "RUNBUS_HTTP_TLS": "true", "RUNBUS_STOP_GRACE": "2s",
		"MANAGED_RUNNER_POLICY": policy, "MANAGED_RUNNER_FILE_ROOTS": files, "CORE_RUNNER_ADMINS": "nobody-here", "CORE_RUNNER_DIAL_DENY": "192.0.2.0/24",
		"RUNNER_FILE_ROOTS": "not for the runner either", "SERVICE_ROLE": "runner",
	}}
	u.Process = stack.Start(t, "runink up", u.bin.Runink, u.env, "up", "--json", "--websocket", "127.0.0.1:0")
	u.stopAtTheEnd(t)
	if _, _, err := u.Stdout.Await("}", 0); err != nil {
		t.Fatalf("it is not up: %v\n%s", err, u.Stderr)
	}
	if err := json.Unmarshal([]byte(u.Stdout.String()), &u.report); err != nil {
		t.Fatalf("%v in %s", err, u.Stdout)
	}
	if !strings.HasPrefix(u.HTTP, "https://127.0.0.1:") || !strings.HasPrefix(u.NATS, "nats://127.0.0.1:") || u.DataDir != u.env["RUNBUS_DATA_DIR"] || u.RunnerPID == 0 {
		t.Errorf("it is %+v", u.report)
	}
	for file, want := range map[string]struct {
		status int
		text   string
	}{"mine.csv": {0, ""}, "denied.csv": {1, "mine"}} {
		if r := u.runink(t, "fetch", "run", "--runner", "console", "--source", "file", "--set", "path="+filepath.Join(files, file)); r.status != want.status || !strings.Contains(r.stderr, want.text) {
			t.Errorf("%s: %+v", file, r)
		}
	}
	if r := u.runink(t, "fetch", "run", "--runner", "local", "--source", "file", "--set", "path="+filepath.Join(files, "mine.csv")); r.status == 0 {
		t.Errorf("the other runner reads what console alone may: %+v", r)
	}
	if r := u.runink(t, "runner", "create", "--address", "127.0.0.1:7443", "edge"); r.status != 3 || !strings.Contains(r.stderr, "CORE_RUNNER_ADMINS") {
		t.Errorf("somebody who is not listed creates a runner: %+v", r)
	}
	u.Stop(t)
}
