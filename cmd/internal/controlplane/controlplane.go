// Package controlplane runs a control plane as the work of a process: from its environment to its end. It is what face and
// runink start.
package controlplane

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/cmd/internal/telemetry"
	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/runner/policy"
	"github.com/org-runink/runbus/runner/source/all"
	"github.com/org-runink/runbus/schemas"
)

// Ready is the line that a control plane writes on standard output when runners can enrol.
type Ready struct {
	Ready bool `json:"ready"`
	cp.Endpoints
}

// ExitStatus is what a process ends with after Run: ExitUsage for a setting, or a file that one names, that must be mended first,
// ExitFailed for what another start may mend.
func ExitStatus(err error) int {
	var wrong *settingError
	switch {
	case err == nil:
		return process.ExitDone
	case errors.As(err, &wrong):
		return process.ExitUsage
	}
	return process.ExitFailed
}

// settingError is why a control plane did not start: something that it was told.
type settingError struct{ error }

func (e *settingError) Unwrap() error { return e.error }

// badSetting marks an error of a start that says so by its code.
func badSetting(err error) error {
	if schemas.CodeOf(err) == schemas.CodeInvalid {
		return &settingError{err}
	}
	return err
}

// checkPolicy reads the policy of the managed runners, which would refuse to start with one that is wrong.
func checkPolicy(cfg *cp.Config) error {
	if cfg.ManagedEndpoint != cp.ManagedLocal || cfg.Managed.Policy == "" {
		return nil
	}
	if _, err := policy.ReadFile(cfg.Managed.Policy, all.Kinds()); err != nil {
		return schemas.Errorf(schemas.CodeInvalid, "MANAGED_RUNNER_POLICY: %w", err).
			WithHint("`core-runner policy check` tells what is wrong with a policy; docs/policy.md has its format")
	}
	return nil
}

// version is what a build tells as its version, as a NATS service has it: without the v; empty if the build has none, as "(devel)".
func version(build string) string {
	v, ok := strings.CutPrefix(build, "v")
	if !ok {
		return ""
	}
	return v
}

// Run serves until SIGTERM or SIGINT (nil), until a part fails, or ctx ends; ExitStatus tells what its error is. change may adjust what the environment said.
func Run(ctx context.Context, log *slog.Logger, stdout io.Writer, change func(*cp.Config)) error {
	cfg, err := cp.ConfigFromEnv(os.Getenv)
	if err != nil {
		return badSetting(err)
	}
	if err := process.HideLogins(); err != nil {
		log.Warn("logins in this process's environment may still be seen in its /proc/…/environ", "error", err)
	}
	cfg.Log = log
	cfg.Version = version(runner.BuildVersion()) // empty: cp has a default
	if change != nil {
		change(&cfg)
	}
	if err := checkPolicy(&cfg); err != nil {
		return badSetting(err)
	}
	tracing, stopTracing, err := telemetry.Start(ctx, os.Getenv, "runbus-control-plane", cfg.Version, log)
	if err != nil {
		return badSetting(err)
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
		return badSetting(err)
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
