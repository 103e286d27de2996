// Command face is the backend image of the platform: a control plane or a runner, as SERVICE_ROLE says. It is configured
// by its environment alone; docs/configuration.md lists the variables.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/org-runink/runbus/cmd/internal/agent"
	"github.com/org-runink/runbus/cmd/internal/controlplane"
	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/internal/selfguard"
	"github.com/org-runink/runbus/runner"
)

func main() {
	selfguard.Main()
	_ = process.HideLogins()
	os.Exit(run())
}

const usage = `face is configured by its environment alone: SERVICE_ROLE=control-plane (the default) or SERVICE_ROLE=runner, and the variables
in docs/configuration.md.
`

func run() int {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "--help", "-h":
			_, _ = io.WriteString(os.Stdout, usage)
			return process.ExitDone
		case "--version", "-v":
			_, _ = fmt.Fprintln(os.Stdout, runner.BuildVersion())
			return process.ExitDone
		}
		fmt.Fprint(os.Stderr, "face takes no arguments. ", usage) // what was given is not repeated: it may be a secret
		return process.ExitUsage
	}
	log, err := process.NewLog(os.Stderr, os.Getenv)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return process.ExitUsage
	}
	switch role := os.Getenv("SERVICE_ROLE"); role {
	case "runner":
		err = agent.Run(context.Background(), log, os.Stdout, nil)
		if err != nil {
			fmt.Fprintln(os.Stderr, process.Text(err))
		}
		return runner.ExitCode(err)
	case "", "control-plane":
		err = controlplane.Run(context.Background(), log, os.Stdout, managedBySelf)
		if err != nil {
			fmt.Fprintln(os.Stderr, process.Text(err))
		}
		return controlplane.ExitStatus(err)
	default:
		fmt.Fprintf(os.Stderr, "SERVICE_ROLE is %q: use control-plane or runner\n", role)
		return process.ExitUsage
	}
}

// managedBySelf has this program, as a runner, be the managed runner if it is to be on this host and no other is named.
func managedBySelf(cfg *cp.Config) {
	if self, err := os.Executable(); err == nil && len(cfg.Managed.Command) == 0 {
		cfg.Managed.Command, cfg.Managed.Env = []string{self}, map[string]string{"SERVICE_ROLE": "runner"}
	}
}
