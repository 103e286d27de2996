package cli

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/org-runink/runbus/cmd/runink/demodata"
	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/stack"
)

// The commands that up prints work as they are, pasted into a shell.
func TestWhatNextCanBePasted(t *testing.T) {
	bin, env := binaries(t), map[string]string{"HOME": t.TempDir(), "XDG_CONFIG_HOME": t.TempDir()}
	dir := filepath.Join(t.TempDir(), "it's here")
	p := stack.Start(t, "runink up", bin.Runink, env, "up", "--data-dir", dir, "--http", "127.0.0.1:0", "--nats", "127.0.0.1:0")
	p.Stdout.Must(t, "Ctrl-C stops it.")
	pasted := 0
	for line := range strings.Lines(p.Stdout.String()) {
		command := strings.TrimSpace(line)
		if !strings.HasPrefix(command, bin.Runink+" ") {
			continue
		}
		pasted++
		shell := []string{"/bin/sh", "-c", command}
		if strings.Contains(command, " runner create ") { // shows a ticket, as the test must be able to tell by the words
			text, _, _ := strings.Cut(command, "#")
			shell = strings.Fields(text)
		}
		var r result
		stack.Again(t, p.Stderr, func() (int, string) {
			r = run(t, shell[0], env, shell[1:]...)
			return r.status, r.stdout + r.stderr
		})
		if r.status != 0 || r.stdout == "" {
			t.Errorf("%s: %+v", command, r)
		} else if strings.Contains(command, "fetch run") && !strings.Contains(r.stdout, "Hydrogen") {
			t.Errorf("%s: %s", command, r.stdout)
		}
	}
	if r := run(t, bin.Runink, env, "runner", "show", "dialled"); r.status != 0 || !strings.Contains(r.stdout, "PENDING") {
		t.Errorf("the runner that was created: %+v", r)
	}
	if !p.Stdout.Has("--files DIR") || !p.Stdout.Has("fetch run --runner console --source file --set path=DIR/FILE.csv") {
		t.Errorf("nothing of files of one's own in %s", p.Stdout)
	}
	if pasted != 4 {
		t.Errorf("%d commands in %s", pasted, p.Stdout)
	}
	p.Stop(t)
}

// In order, status 0, and the next start on the folder goes on with the same keys, tenant and runner.
func TestUpAgain(t *testing.T) {
	home, dir := t.TempDir(), filepath.Join(t.TempDir(), "data")
	first := startUp(t, home, dir)
	public := liveKey(t, first)
	for _, file := range []string{first.RunnerPIDFile("environ"), first.RunnerPIDFile("cmdline")} {
		b, err := os.ReadFile(file)
		if err != nil || strings.Contains(string(b), schemas.ServiceTokenPrefix) || strings.Contains(string(b), schemas.SessionTokenPrefix) {
			t.Errorf("%s shows a token (%v)", file, err)
		}
	}
	first.Stop(t)
	for what, pid := range map[string]int{"control plane": first.PlanePID, "runner": first.RunnerPID} {
		if alive(t, pid) {
			t.Errorf("the %s is still there", what)
		}
	}
	_, next, err := first.Stderr.Await("draining: new work is refused", 0)
	if err == nil {
		_, _, err = first.Stderr.Await("control plane stops", next)
	}
	if err != nil {
		t.Errorf("not stopped in order: %v\n%s", err, first.Stderr)
	}
	second := startUp(t, home, dir)
	if again := liveKey(t, second); again != public || second.RunnerID != first.RunnerID {
		t.Errorf("the runner's key is another one: %s, was %s", again, public)
	}
	wantFetch(t, second)
	if _, err := os.Stat(filepath.Join(dir, "runner", "journal")); err != nil {
		t.Errorf("the runner of up keeps its journal elsewhere: %v", err)
	}
	// Its key revoked: the runner is cut, the control plane goes on, and the next start has a key that works.
	if r := second.runink(t, "key", "revoke", "sa-local"); r.status != 0 {
		t.Fatal(r)
	}
	second.Stderr.Must(t, "goes on without it")
	awaitGone(t, "runner", second.RunnerPID)
	if r := second.runink(t, "runner", "list"); r.status != 0 {
		t.Error(r)
	}
	second.Stop(t)
	third := startUp(t, home, dir)
	if liveKey(t, third) == public {
		t.Error("the revoked key is used")
	}
	third.Stderr.Must(t, "it has a new one")
	wantFetch(t, third)
	third.Stop(t)
}

// RunnerPIDFile is a file of the runner in /proc.
func (u *up) RunnerPIDFile(name string) string { return fmt.Sprintf("/proc/%d/%s", u.RunnerPID, name) }

func liveKey(t *testing.T, u *up) string {
	t.Helper()
	var keys []struct {
		PublicKey string
		RevokedAt *string
	}
	r := u.runink(t, "key", "list", "--json")
	if err := json.Unmarshal([]byte(r.stdout), &keys); err != nil {
		t.Fatalf("%v: %+v", err, r)
	}
	for _, k := range keys {
		if k.RevokedAt == nil {
			return k.PublicKey
		}
	}
	t.Fatalf("no live key: %s", r.stdout)
	return ""
}

func wantFetch(t *testing.T, u *up) {
	t.Helper()
	r := u.runink(t, "fetch", "run", "--json", "--runner", u.RunnerID, "--source", "file", "--set", "path="+filepath.Join(u.DataDir, "data", demodata.Name))
	var out struct {
		Outcome   string
		Rows      int
		RunnerPID int
		Data      []map[string]any
	}
	if err := json.Unmarshal([]byte(r.stdout), &out); err != nil || out.Outcome != "completed" || out.Rows != demodata.Rows || len(out.Data) != demodata.Rows || out.RunnerPID != u.RunnerPID {
		t.Errorf("%v: %.2000s %s", err, r.stdout, r.stderr)
	}
}

func TestKilledUpTakesItsChildrenAlong(t *testing.T) {
	u := startUp(t, t.TempDir(), filepath.Join(t.TempDir(), "data"))
	managed, _ := u.console(t)
	u.Signal(t, syscall.SIGKILL)
	u.Exit(t)
	awaitGone(t, "runner", u.RunnerPID)
	awaitGone(t, "control plane", u.PlanePID)
	awaitGone(t, "managed runner", managed)
}

func TestUpThatCannotStart(t *testing.T) {
	home, dir := t.TempDir(), filepath.Join(t.TempDir(), "data")
	u := startUp(t, home, dir, "--no-runner", "--http", stack.FreeAddress(t, "127.0.0.1:0")) // which nobody else is given afterwards
	if u.RunnerPID != 0 {
		t.Error("there is a runner")
	}
	context := filepath.Join(home, ".config", "runink", "context.json")
	before, err := os.ReadFile(context)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	const free = "127.0.0.1:0"
	api, bus := strings.TrimPrefix(u.HTTP, "http://"), strings.TrimPrefix(u.NATS, "tls://")
	for name, c := range map[string]struct {
		dir, http, nats string
		text, hint      string
	}{
		"second on the folder": {dir, free, free, "is in use by another control plane", "--data-dir"},
		"HTTP port":            {"", api, free, api, "--http"},
		"NATS port":            {"", free, bus, bus + " is already in use", "address"},
		"folder":               {filepath.Join(file, "x"), free, free, "data folder", "--data-dir"},
		"beyond loopback":      {"", "0.0.0.0:0", free, "in the clear", ""},
		"not an address":       {"", "7100", free, "not host:port", ""},
	} {
		t.Run(name, func(t *testing.T) {
			folder := c.dir
			if folder == "" {
				folder = filepath.Join(t.TempDir(), "data")
			}
			r := run(t, u.bin.Runink, u.env, "up", "--json", "--log-file", filepath.Join(t.TempDir(), "log"), "--data-dir", folder, "--http", c.http, "--nats", c.nats)
			_, message, hint := r.failure(t)
			if r.status == 0 || r.stdout != "" || !strings.Contains(message, c.text) || !strings.Contains(hint, c.hint) {
				t.Errorf("status %d, %q, %q", r.status, message, hint)
			}
			if after, err := os.ReadFile(context); err != nil || string(after) != string(before) {
				t.Errorf("the context file changed (%v)", err)
			}
			if c.dir == "" && c.text != "in the clear" && c.text != "not host:port" { // what is there is whole: the next start takes it
				again := startUp(t, t.TempDir(), folder, "--no-runner")
				again.Stop(t)
			}
		})
	}
	u.Stop(t)
	l, err := net.Listen("tcp", api)
	if err != nil {
		t.Fatalf("the port is still taken: %v", err)
	}
	_ = l.Close()
}

// What completion offers is there, and the scripts of the shells that are installed are valid.
func TestCompletion(t *testing.T) {
	bin := binaries(t)
	if r := run(t, bin.Runink, nil, "fetch", "run", "--so", "--generate-bash-completion"); !strings.Contains(r.stdout, "--source") {
		t.Errorf("%+v", r)
	}
	script := run(t, bin.Runink, nil, "completion", "bash").stdout
	ask := script + "\nPATH=" + filepath.Dir(bin.Runink) + ":$PATH; COMP_WORDS=(runink fe); COMP_CWORD=1; _runink; echo \"${COMPREPLY[*]}\""
	out, err := exec.Command("bash", "-c", ask).CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != "fetch" {
		t.Errorf("%s %v", out, err)
	}
	for _, shell := range []string{"zsh", "fish"} {
		if r := run(t, bin.Runink, nil, "completion", shell); r.status != 0 || !strings.Contains(r.stdout, "runink") {
			t.Errorf("%s: %+v", shell, r)
		}
	}
}
