package e2e

import (
	"crypto/rand"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/stack"
)

// fetchFrom runs one fetch of the runner to its end.
func fetchFrom(t *testing.T, plane *stack.Plane, src *source, runner string) stack.Line {
	t.Helper()
	end := plane.Admin.Fetch(t, src.body(runner)).End()
	if end.Outcome != "completed" || end.Rows != rowsBefore+rowsAfter {
		t.Fatalf("a fetch ended %+v", end)
	}
	return end
}

// C1, C3–C7, C9, R4, R5: a runner's life with a control plane that dials it. The command that `create` prints is pasted as it is.
func TestALifeOfADialledRunner(t *testing.T) {
	t.Parallel()
	plane := stack.StartPlane(t, true, nil)
	src := newSource(t)
	src.let()
	first := stack.FreeAddress(t, "127.0.0.1:0")
	made := plane.Admin.Create(t, "edge", first)
	if made.Runner.State != "PENDING" || made.Runner.Link != "dialled" || made.Runner.Address != first {
		t.Fatalf("created %+v", made.Runner)
	}
	f := plane.Admin.Fetch(t, src.body("edge"))
	if f.Problem.Code != "runner_offline" || !strings.Contains(f.Problem.Message, "not enrolled yet") {
		t.Errorf("a fetch from a pending runner: %+v", f.Problem)
	}

	pasted := paste(t, plane, made)
	plane.Admin.AwaitRunner(t, made.Runner.ID, true)
	if end := fetchFrom(t, plane, src, "edge"); end.RunnerID != made.Runner.ID {
		t.Errorf("the fetch ran on %q", end.RunnerID)
	}
	if got := plane.Admin.Runners(t)[made.Runner.ID]; got.State != "ACTIVE" {
		t.Errorf("the runner is %s", got.State)
	}

	// The control plane restarts.
	plane.Stop(t)
	again := stack.StartPlane(t, true, map[string]string{"RUNBUS_DATA_DIR": plane.DataDir})
	again.Admin.AwaitRunner(t, made.Runner.ID, true)
	fetchFrom(t, again, src, "edge")

	// The runner restarts, without its ticket.
	pasted.kill(t)
	again.Admin.AwaitRunner(t, made.Runner.ID, false)
	runner := again.RestartDialled(t, made.Runner.ID, "edge", first)
	fetchFrom(t, again, src, "edge")

	// Its address changes: a reconnect, the same certificate.
	identity := read(t, filepath.Join(filepath.Dir(plane.DataDir), "runners", "edge", "identity.pem"))
	runner.Stop(t)
	again.Admin.AwaitRunner(t, made.Runner.ID, false)
	second := stack.FreeAddress(t, "[::1]:0")
	moved := stack.Start(t, "moved runner", again.Bin.CoreRunner, again.DialledEnv("edge", second), "serve")
	moved.Stderr.Must(t, "listening for the control plane")
	again.Admin.Must(t, http.MethodPatch, "/api/runners/"+made.Runner.ID, map[string]string{"address": second}, nil)
	again.Admin.AwaitRunner(t, made.Runner.ID, true)
	fetchFrom(t, again, src, "edge")
	if read(t, filepath.Join(filepath.Dir(plane.DataDir), "runners", "edge", "identity.pem")) != identity {
		t.Error("the certificate changed with the address")
	}

	// It is revoked: told so, it writes that down, exits 0, and never starts again.
	again.Admin.Must(t, http.MethodPost, "/api/runners/"+made.Runner.ID+"/revoke", nil, nil)
	if code := moved.Exit(t); code != 0 {
		t.Errorf("a revoked runner ended with status %d", code)
	}
	if f := again.Admin.Fetch(t, src.body("edge")); f.Problem.Code != "runner_revoked" {
		t.Errorf("a fetch from a revoked runner: %+v", f.Problem)
	}
	refused := stack.Start(t, "revoked runner", again.Bin.CoreRunner, again.DialledEnv("edge", second), "serve")
	if code := refused.Exit(t); code != 11 || !refused.Stderr.Has("this runner was revoked") {
		t.Errorf("a revoked runner that starts again: status %d, %s", code, refused.Stderr)
	}
	for _, p := range []*stack.Process{plane.Process, again.Process, pasted.Process, runner.Process, moved, refused} {
		if p.Stderr.Has(made.Ticket) || p.Stdout.Has(made.Ticket) {
			t.Errorf("%s shows the ticket", p.Name)
		}
	}
}

// command is a shell and what it runs.
type command struct {
	*stack.Process
	pid int // of the runner
}

// paste runs the command that was printed as a shell runs it.
func paste(t *testing.T, plane *stack.Plane, made stack.Created) command {
	t.Helper()
	if !strings.HasSuffix(made.Command, "core-runner serve --listen "+made.Runner.Address) { // on loopback it listens there alone
		t.Fatalf("the command ends in %q", made.Command[len(made.Command)-60:])
	}
	env := plane.DialledEnv(made.Runner.Name, "")
	delete(env, "CORE_RUNNER_LISTEN")
	env["PATH"] = filepath.Dir(plane.Bin.CoreRunner) + string(os.PathListSeparator) + os.Getenv("PATH")
	shell := stack.StartWith(t, "pasted command", "/bin/sh", env, strings.NewReader(made.Command+"\n"))
	plane.Admin.Must(t, http.MethodPost, "/api/runners/"+made.Runner.ID+"/connect", nil, nil)
	var ready struct {
		PID int `json:"pid"`
	}
	stack.ReadyLine(t, shell, &ready)
	t.Cleanup(func() {
		select {
		case <-shell.Exited(): // and with it the runner: its number may be another's by now
		default:
			_ = syscall.Kill(ready.PID, syscall.SIGKILL)
		}
	})
	return command{shell, ready.PID}
}

// kill ends the runner, not the shell, without a goodbye.
func (c command) kill(t *testing.T) {
	t.Helper()
	if err := syscall.Kill(c.pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.Exit(t)
}

func read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// C4, C1: what mixes both ways, or shows a ticket to everybody, is refused before anything listens.
func TestARunnerThatCannotTellWhichItIs(t *testing.T) {
	t.Parallel()
	bin, err := stack.Build(true)
	if err != nil {
		t.Fatal(err)
	}
	ticket := "crt1.AAAA"
	for name, c := range map[string]struct {
		env  map[string]string
		args []string
		want string
	}{
		"a ticket on the command line":       {args: []string{"serve", ticket}, want: "ticket on the command line"},
		"a ticket and an address to dial":    {env: map[string]string{"RUNNER_ENROLL_ADDR": "127.0.0.1:1", "CORE_RUNNER_TICKET": freshTicket()}, want: "RUNNER_ENROLL_ADDR and a ticket are both set"},
		"a port and an address to dial":      {env: map[string]string{"RUNNER_ENROLL_ADDR": "127.0.0.1:1", "RUNNER_ENROLL_TOKEN": "x", "CORE_RUNNER_LISTEN": "127.0.0.1:0"}, want: "RUNNER_ENROLL_ADDR and CORE_RUNNER_LISTEN"},
		"a token and nobody to dial":         {env: map[string]string{"RUNNER_ENROLL_TOKEN": "x"}, want: "no control plane to enrol at"},
		"an id beside a ticket":              {env: map[string]string{"RUNNER_ID": "edge", "CORE_RUNNER_TICKET": freshTicket()}, want: "RUNNER_ID is set"},
		"neither a certificate nor a ticket": {want: "this runner is not enrolled and has no ticket"},
		"a ticket that is none":              {env: map[string]string{"CORE_RUNNER_TICKET": ticket}, want: "CORE_RUNNER_TICKET"},
		"a port that is none":                {env: map[string]string{"CORE_RUNNER_LISTEN": "7443", "CORE_RUNNER_TICKET": freshTicket()}, want: "CORE_RUNNER_LISTEN"},
	} {
		t.Run(name, func(t *testing.T) {
			env := map[string]string{"CORE_RUNNER_STATE_DIR": filepath.Join(t.TempDir(), "state")}
			for k, v := range c.env {
				env[k] = v
			}
			args := c.args
			if args == nil {
				args = []string{"serve"}
			}
			p := stack.Start(t, "core-runner", bin.CoreRunner, env, args...)
			if code := p.Exit(t); code != 2 || !p.Stderr.Has(c.want) {
				t.Errorf("status %d, %s", code, p.Stderr)
			}
			for _, v := range c.env {
				if strings.HasPrefix(v, "crt1.") && p.Stderr.Has(v) {
					t.Error("the refusal shows the ticket")
				}
			}
		})
	}
}

// freshTicket is a ticket of no control plane.
func freshTicket() string {
	t := schemas.Ticket{RunnerID: schemas.NewRunnerID(), Name: "edge", ExpiresAt: time.Now().Add(time.Hour)}
	_, _ = rand.Read(t.Token[:])
	_, _ = rand.Read(t.CASHA256[:])
	return t.Encode()
}

// D14, C6: a runner that still waits to be enrolled stops as any other does, and goes on at its next start.
func TestARunnerThatWaitsForItsControlPlaneStops(t *testing.T) {
	t.Parallel()
	bin, err := stack.Build(true)
	if err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"CORE_RUNNER_STATE_DIR": filepath.Join(t.TempDir(), "state"), "CORE_RUNNER_LISTEN": "127.0.0.1:0", "CORE_RUNNER_TICKET": freshTicket()}
	for range 2 {
		p := stack.Start(t, "core-runner", bin.CoreRunner, env, "serve")
		if line := p.Stderr.Must(t, "listening for the control plane"); !strings.Contains(line, "state=pending") {
			t.Errorf("it says %s", line)
		}
		if second := stack.Start(t, "a second one", bin.CoreRunner, env, "serve"); second.Exit(t) != 2 {
			t.Errorf("two runners have one state folder: %s", second.Stderr)
		}
		p.Stop(t)
		if p.Stderr.Has(env["CORE_RUNNER_TICKET"]) {
			t.Error("the log shows the ticket")
		}
	}
}
