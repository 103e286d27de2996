// Package agent runs a runner as the work of a process: from its environment to its exit status. It is what face, core-runner
// and runink start, so that a runner is the same everywhere.
package agent

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/cmd/internal/telemetry"
	"github.com/org-runink/runbus/internal/selfguard"
	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/runner/identity"
)

// Ready is the line that a runner writes on standard output once, after its first enrolment.
type Ready struct {
	Ready bool `json:"ready"`
	runner.Enrolled
}

// Run serves until the runner is drained (first SIGTERM), aborted (second), told to stop, or ctx ends. change may adjust
// what the environment said. The exit status is runner.ExitCode of the error.
func Run(ctx context.Context, log *slog.Logger, stdout io.Writer, change func(*runner.Config)) error {
	ticket, gone := identity.TakeTicket(os.Getenv, selfguard.ForgetEnv) // before anything else starts
	if gone != nil && !errors.Is(gone, identity.ErrTicketGone) {
		return &runner.ExitError{Code: runner.ExitConfig, Err: gone}
	}
	cfg, err := runner.ConfigFromEnv(os.Getenv)
	if err != nil {
		return err
	}
	cfg.Ticket, cfg.TicketGone = ticket, gone
	// Token and proxy login are in memory now; nothing that this process starts shall inherit them, and nobody read them off the
	// process.
	if err := errors.Join(process.ForgetProxyAnd("RUNNER_ENROLL_TOKEN", "RUNNER_ENROLL_TOKEN_FILE"), process.HideLogins()); err != nil {
		log.Warn("the enrolment token may still be seen in this process's /proc/…/environ: use RUNNER_ENROLL_TOKEN_FILE", "error", err)
	}
	cfg.Log, cfg.FitProcessors = log, true
	announced := false
	cfg.OnEnrolled = func(e runner.Enrolled) { // called from one goroutine
		if !announced {
			announced = true
			process.Announce(stdout, Ready{Ready: true, Enrolled: e})
		}
	}
	if change != nil {
		change(&cfg)
	}
	tracing, stopTracing, err := telemetry.Start(ctx, os.Getenv, "runbus-runner", cfg.Version, log)
	if err != nil {
		return &runner.ExitError{Code: runner.ExitConfig, Err: err}
	}
	defer stopTracing()
	cfg.Tracing = tracing
	a, err := runner.New(cfg)
	if err != nil {
		return err
	}
	defer process.RelaxMemory()()
	supervisor := process.NewSupervisor(log)
	defer supervisor.Close()
	release := process.OnStop(func() {
		supervisor.Stopping()
		a.Drain()
	}, a.Abort)
	defer release()
	if cfg.Policy != "" { // without, SIGHUP ends the process as ever
		defer process.OnHangup(a.ReloadPolicy)()
	}
	supervisor.Up(a.Alive) // now that its signals do what they mean
	return a.Run(ctx)
}
