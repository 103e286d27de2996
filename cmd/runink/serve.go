package main

import (
	"log/slog"
	"os"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/agent"
	"github.com/org-runink/runbus/cmd/internal/controlplane"
	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/runner"
)

// serveCommand is what `demo` and `up` start as their children: the same control plane and runner as face and core-runner,
// configured by the environment alone. Why a child ends stands on its standard output, for the parent to report once.
func serveCommand() *cli.Command {
	leaf := func(name, text string, run func(*cli.Context, *slog.Logger) error, status func(error) int) *cli.Command {
		return &cli.Command{Name: name, Usage: text, HideHelpCommand: true, OnUsageError: onUsage, Action: func(c *cli.Context) error {
			log, err := process.NewLog(os.Stderr, os.Getenv)
			code := process.ExitUsage
			if err == nil {
				err = run(c, log)
				code = status(err)
			}
			if err == nil {
				return nil
			}
			process.AnnounceFailure(os.Stdout, err, code)
			return &exitError{code, errSaid}
		}}
	}
	g := group("serve", "run one process of the local stack",
		leaf("control-plane", "a control plane, as face does", func(c *cli.Context, log *slog.Logger) error {
			return controlplane.Run(c.Context, log, os.Stdout, func(cfg *cp.Config) {
				if self, err := os.Executable(); err == nil && len(cfg.Managed.Command) == 0 {
					cfg.Managed.Command = []string{self, "serve", "runner"}
				}
			})
		}, controlplane.ExitStatus),
		leaf("runner", "a runner, as core-runner does", func(c *cli.Context, log *slog.Logger) error {
			return agent.Run(c.Context, log, os.Stdout, nil)
		}, runner.ExitCode),
	)
	g.Hidden = true
	return g
}
