package e2e

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/org-runink/runbus/tests/stack"
)

// C4: a ticket in a file enrols, and who has enrolled may delete it and leave the variable; who has not is told that it is not there.
func TestATicketFileThatIsGone(t *testing.T) {
	t.Parallel()
	plane := stack.StartPlane(t, true, nil)
	address := stack.FreeAddress(t, "127.0.0.1:0")
	made := plane.Admin.Create(t, "edge", address)
	file := filepath.Join(t.TempDir(), "ticket")
	env := plane.DialledEnv("edge", address)
	env["CORE_RUNNER_TICKET_FILE"] = file

	early := stack.Start(t, "without its ticket", plane.Bin.CoreRunner, env, "serve")
	if code := early.Exit(t); code != 2 || !early.Stderr.Has("CORE_RUNNER_TICKET_FILE: the ticket file "+file+" does not exist") {
		t.Errorf("status %d, %s", code, early.Stderr)
	}
	if err := os.WriteFile(file, []byte(made.Ticket), 0o600); err != nil {
		t.Fatal(err)
	}
	runner := plane.StartListening(t, made.Runner.ID, "edge", env)
	runner.Signal(t, syscall.SIGTERM)
	if code := runner.Exit(t); code != 0 {
		t.Errorf("status %d, %s", code, runner.Stderr)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	again := plane.StartListening(t, made.Runner.ID, "edge", env)
	again.Stderr.Must(t, "the ticket file is gone")
}
