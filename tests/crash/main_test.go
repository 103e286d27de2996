// Package crash kills a control plane, and a runner, each a real process, at every step of the enrolments and renewals that they carry
// out together, and looks at what the next one makes of it: exactly one valid certificate, or a word on what to do.
package crash

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/internal/selfguard"
	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/tests/stack"
)

// envKill has a process of this test be a control plane, whole and configured as face is, that kills itself at a step: `name`, or
// `name#2` for its second time.
const envKill = "RUNBUS_TEST_KILL_AT"

// envKillRunner has it be a runner, as core-runner is one, that kills itself at so many changes of its state folder.
const envKillRunner = "RUNBUS_TEST_KILL_RUNNER_AT"

func TestMain(m *testing.M) {
	if at := os.Getenv(envKill); at != "" {
		fmt.Fprintln(os.Stderr, serve(at))
		os.Exit(1)
	}
	if at := os.Getenv(envKillRunner); at != "" {
		fmt.Fprintln(os.Stderr, run(at))
		os.Exit(1)
	}
	// The tests wait for the clocks of certificates most of the time, whatever the number of processors is.
	if err := flag.Set("test.parallel", "8"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	stack.Remove()
	os.Exit(code)
}

func die() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // the signal is on its way
}

// run is a runner until the step.
func run(at string) error {
	n, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return err
	}
	ticket, err := identity.TakeTicket(os.Getenv, selfguard.ForgetEnv)
	if err != nil {
		return err
	}
	cfg, err := runner.ConfigFromEnv(os.Getenv)
	if err != nil {
		return err
	}
	steps := new(atomic.Int64)
	cfg.Ticket, cfg.Log = ticket, slog.New(slog.NewTextHandler(os.Stderr, nil))
	cfg.Step = func(string) {
		if steps.Add(1) == n {
			die()
		}
	}
	agent, err := runner.New(cfg)
	if err != nil {
		return err
	}
	return agent.Run(context.Background())
}

// serve is a control plane until the step.
func serve(at string) error {
	name, times, _ := strings.Cut(at, "#")
	left := new(atomic.Int64)
	left.Store(1)
	if times != "" {
		n, err := strconv.ParseInt(times, 10, 64)
		if err != nil {
			return err
		}
		left.Store(n)
	}
	cfg, err := cp.ConfigFromEnv(os.Getenv)
	if err != nil {
		return err
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	cfg.Step = func(step string) {
		if step == name && left.Add(-1) == 0 {
			die()
		}
	}
	c, err := cp.Start(context.Background(), cfg)
	if err != nil {
		return err
	}
	ready, err := json.Marshal(struct {
		Ready bool `json:"ready"`
		cp.Endpoints
	}{true, c.Endpoints()})
	if err != nil {
		return err
	}
	if _, err := os.Stdout.Write(append(ready, '\n')); err != nil {
		return err
	}
	return c.Wait()
}
