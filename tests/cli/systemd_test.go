package cli

import (
	"fmt"
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
	token, _, err := schemas.NewServiceToken("acme")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "s")
	manager, err := new(net.ListenConfig).ListenPacket(t.Context(), "unixgram", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = manager.Close() }()
	told := func(want string) {
		t.Helper()
		if err := manager.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 256)
		for {
			n, _, err := manager.ReadFrom(b)
			if err != nil {
				t.Fatalf("waiting for %s: %v", want, err)
			}
			if string(b[:n]) == want {
				return
			}
		}
	}
	p := stack.Start(t, "core-runner", binaries(t).CoreRunner, map[string]string{
		"RUNNER_ENROLL_ADDR": "127.0.0.1:1", "RUNNER_ENROLL_TOKEN": token, "CORE_RUNNER_STATE_DIR": t.TempDir(),
		"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "300000",
	}, "serve")
	told("READY=1")
	told("WATCHDOG=1")
	told("WATCHDOG=1")
	p.Signal(t, syscall.SIGTERM)
	told("STOPPING=1")
	if status := p.Exit(t); status != 0 {
		t.Fatalf("exit status %d: %s", status, p.Stderr)
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
