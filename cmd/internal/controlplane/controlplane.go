// Package controlplane runs a control plane as the work of a process: from its environment to its end. It is what face and
// runink start.
package controlplane

import (
	"context"
	"io"
	"log/slog"
	"os"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/cmd/internal/telemetry"
	"github.com/org-runink/runbus/cp"
)

// Ready is the line that a control plane writes on standard output when runners can enrol.
type Ready struct {
	Ready bool `json:"ready"`
	cp.Endpoints
}

// Run serves until SIGTERM or SIGINT (nil), until a part fails, or ctx ends. change may adjust what the environment said.
func Run(ctx context.Context, log *slog.Logger, stdout io.Writer, change func(*cp.Config)) error {
	cfg, err := cp.ConfigFromEnv(os.Getenv)
	if err != nil {
		return err
	}
	if err := process.HideLogins(); err != nil {
		log.Warn("logins in this process's environment may still be seen in its /proc/…/environ", "error", err)
	}
	cfg.Log = log
	if change != nil {
		change(&cfg)
	}
	tracing, stopTracing, err := telemetry.Start(ctx, os.Getenv, "runbus-control-plane", cfg.Version, log)
	if err != nil {
		return err
	}
	defer stopTracing()
	cfg.Tracing = tracing
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer process.RelaxMemory()()
	release := process.OnStop(cancel, func() { log.Warn("stopping already") })
	defer release()
	c, err := cp.Start(ctx, cfg)
	if err != nil {
		return err
	}
	process.Announce(stdout, Ready{Ready: true, Endpoints: c.Endpoints()})
	failed := make(chan error, 1)
	go func() { failed <- c.Wait() }()
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	c.Stop()
	return err
}
