package main

import (
	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/agent"
	"github.com/org-runink/runbus/cmd/internal/controlplane"
	"github.com/org-runink/runbus/cmd/internal/process"

	"os"
)

// serveCommand is what `demo` and `up` start as their children: the same control plane and runner as face and core-runner,
// configured by the environment alone.
func serveCommand() *cli.Command {
	leaf := func(name, text string, action cli.ActionFunc) *cli.Command {
		return &cli.Command{Name: name, Usage: text, HideHelpCommand: true, OnUsageError: onUsage, Action: action}
	}
	g := group("serve", "run one process of the local stack",
		leaf("control-plane", "a control plane, as face does", func(c *cli.Context) error {
			log, err := process.NewLog(os.Stderr, os.Getenv)
			if err != nil {
				return usagef("%s", err)
			}
			return controlplane.Run(c.Context, log, os.Stdout, nil)
		}),
		leaf("runner", "a runner, as core-runner does", func(c *cli.Context) error {
			log, err := process.NewLog(os.Stderr, os.Getenv)
			if err != nil {
				return usagef("%s", err)
			}
			return agent.Run(c.Context, log, os.Stdout, nil)
		}),
	)
	g.Hidden = true
	return g
}
