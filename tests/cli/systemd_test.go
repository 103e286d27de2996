package cli

import (
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coreos/go-systemd/v22/unit"

	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/stack"
)

// TestRunnerTellsItsServiceManager plays systemd: the runner says that it is up before it has reached anybody, that it is alive
// as often as it must, and that it stops.
func TestRunnerTellsItsServiceManager(t *testing.T) {
	p, told := managed(t, map[string]string{"WATCHDOG_USEC": "300000"})
	told("READY=1")
	told("WATCHDOG=1")
	told("WATCHDOG=1")
	p.Signal(t, syscall.SIGTERM)
	told("STOPPING=1")
	if status := p.Exit(t); status != 0 {
		t.Fatalf("exit status %d: %s", status, p.Stderr)
	}
}

// A service manager may reload or stop what says that it is up, at once.
func TestRunnerThatIsUpHeedsSignals(t *testing.T) {
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(policy, []byte("version: 1\ndefault: allow\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, reload := range []bool{true, false} {
		p, told := managed(t, map[string]string{"RUNNER_POLICY": policy})
		told("READY=1")
		signals := []syscall.Signal{syscall.SIGTERM}
		if reload {
			signals = []syscall.Signal{syscall.SIGHUP, syscall.SIGTERM}
		}
		for _, s := range signals {
			if err := syscall.Kill(p.PID, s); err != nil { // p.Signal takes a moment
				t.Fatal(err)
			}
		}
		told("STOPPING=1")
		if status := p.Exit(t); status != 0 {
			t.Errorf("reloaded: %v; exit status %d: %s", reload, status, p.Stderr)
		}
	}
}

// managed starts a runner that reaches nobody, with a service manager. told waits until that was told of a state.
func managed(t *testing.T, env map[string]string) (p *stack.Process, told func(state string)) {
	t.Helper()
	token, _, err := schemas.NewServiceToken("acme")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "s")
	manager, err := new(net.ListenConfig).ListenPacket(t.Context(), "unixgram", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = manager.Close() })
	all := map[string]string{
		"RUNNER_ENROLL_ADDR": "127.0.0.1:1", "RUNNER_ENROLL_TOKEN": token, "CORE_RUNNER_STATE_DIR": t.TempDir(), "NOTIFY_SOCKET": path,
	}
	maps.Copy(all, env)
	return stack.Start(t, "core-runner", binaries(t).CoreRunner, all, "serve"), func(state string) {
		t.Helper()
		if err := manager.SetReadDeadline(time.Now().Add(stack.Patience)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 256)
		for {
			n, _, err := manager.ReadFrom(b)
			if err != nil {
				t.Fatalf("waiting for %s: %v", state, err)
			}
			if string(b[:n]) == state {
				return
			}
		}
	}
}

// TestUnitSaysWhatTheRunnerDoes holds deploy/systemd to the runner's exit statuses and times.
func TestUnitSaysWhatTheRunnerDoes(t *testing.T) {
	f, err := os.Open("../../deploy/systemd/core-runner.service")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	options, err := unit.DeserializeOptions(f)
	if err != nil {
		t.Fatal(err)
	}
	service := make(map[string]string)
	for _, o := range options {
		if o.Section == "Service" && o.Name != "SystemCallFilter" {
			if _, twice := service[o.Name]; twice {
				t.Errorf("%s is set twice", o.Name)
			}
			service[o.Name] = o.Value
		}
	}
	final := fmt.Sprint(runner.ExitConfig, runner.ExitReplaced, runner.ExitRefused)
	if got := service["RestartPreventExitStatus"]; got != final {
		t.Errorf("RestartPreventExitStatus is %s, not %s", got, final)
	}
	stop, err := time.ParseDuration(strings.TrimSuffix(service["TimeoutStopSec"], "in"))
	if err != nil || stop <= runner.DefaultDrainGrace {
		t.Errorf("TimeoutStopSec is %s (%v): a drain may take %s", service["TimeoutStopSec"], err, runner.DefaultDrainGrace)
	}
	if got := "/var/lib/" + service["StateDirectory"]; got != runner.DefaultStateDir {
		t.Errorf("the state folder is %s, not %s", got, runner.DefaultStateDir)
	}
	for name, want := range map[string]string{
		"Type": "notify", "Restart": "on-failure", "StateDirectoryMode": "0700", "NoNewPrivileges": "yes", "ProtectHome": "yes",
		"ProtectSystem": "strict", "LimitCORE": "0", "CapabilityBoundingSet": "",
	} {
		if got, ok := service[name]; !ok || got != want {
			t.Errorf("%s is %q, not %q", name, got, want)
		}
	}
	if words := strings.Fields(service["ExecStart"]); !slices.Equal(words[1:], []string{"serve"}) {
		t.Errorf("ExecStart is %q", words)
	}
}
