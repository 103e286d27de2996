// Command core-runner is the runner of a customer's host: it enrols at a control plane and runs the fetches that it is
// assigned. It holds no source configuration and no stored credentials.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/agent"
	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/internal/selfguard"
	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
)

func main() {
	selfguard.Main()
	_ = process.HideLogins()
	err := identity.RefuseArgument(os.Args[1:])
	switch {
	case err != nil:
		err = &runner.ExitError{Code: runner.ExitConfig, Err: err}
	case isToken(os.Args[1:]):
		err = errTokenOnCommandLine
	default:
		err = app().Run(fileLast(os.Args))
	}
	os.Exit(report(os.Stderr, err, process.WantsJSON(os.Args[1:])))
}

// report prints err, unless it was said already, and returns the exit status.
func report(w io.Writer, err error, asJSON bool) int {
	switch {
	case err == nil || errors.Is(err, errDenied) || errors.Is(err, errUsageShown):
	case asJSON:
		_, _ = w.Write(process.ErrorJSON(err))
	default:
		_, _ = fmt.Fprintln(w, process.Text(err))
	}
	return runner.ExitCode(err)
}

func app() *cli.App {
	return &cli.App{
		Name:  "core-runner",
		Usage: "run fetches inside a private network for a Runbus control plane",
		Description: `A runner that dials out: set RUNNER_ENROLL_ADDR to the control plane's host:port and RUNNER_ENROLL_TOKEN to a
service-account token (a key that an ORG_ADMIN mints with "runink key create NAME"), then start "core-runner serve".

A runner that is dialled: "runink runner create --address HOST:PORT NAME" prints the command to start it with.`,
		HideHelpCommand: true,
		Version:         runner.BuildVersion(),
		ExitErrHandler:  func(*cli.Context, error) {}, // main prints once and chooses the status
		OnUsageError:    usage,
		Action:          unknown,
		Commands: []*cli.Command{serveCommand(), doctorCommand(), policyCommand(), journalCommand(), {
			Name: "version", Usage: "print the version", Action: func(c *cli.Context) error {
				_, err := fmt.Fprintln(c.App.Writer, runner.BuildVersion())
				return err
			},
		}},
	}
}

func serveCommand() *cli.Command {
	return &cli.Command{
		Name:         "serve",
		Usage:        "enrol and run what is assigned, until SIGTERM",
		OnUsageError: usage,
		Description: `With RUNNER_ENROLL_ADDR it dials its control plane, else it listens for it.

Environment of a runner that is dialled:
  CORE_RUNNER_TICKET    the ticket that enrols it, once; never on the command line
  CORE_RUNNER_TICKET_FILE  instead: a regular file of mode 0600 or 0400 with the ticket in it
  CORE_RUNNER_LISTEN    as --listen

Environment of one that dials:
  RUNNER_ENROLL_ADDR    control plane, host:port or a tls://, wss://, nats:// URL; several separated by commas
  RUNNER_ENROLL_TOKEN   service-account token; never on the command line
  RUNNER_ENROLL_TOKEN_FILE  instead: a file of mode 0600 or 0400 with the token in it
  RUNNER_ENROLL_CA      PEM file trusted beside the system roots
  RUNNER_ENROLL_TLS     false turns TLS off (default true)
  HTTPS_PROXY, NO_PROXY HTTP proxy on the way to the control plane, and what is dialled directly all the same; never for sources
  RUNNER_ID             stable id, 1-64 of A-Z a-z 0-9 - _ . (default: generated, kept in the state folder)

Environment of both:
  RUNNER_NAME, RUNNER_VERSION   for display
  RUNNER_FILE_ROOTS     folders that the file and sqlite sources may read, a list as in PATH (default: none)
  RUNNER_POLICY         file of the local policy, read again at SIGHUP (default: none, everything but cloud metadata is allowed)
  RUNNER_JOURNAL        on or off (default: on if the state folder can be written)
  RUNNER_CONCURRENCY    works at once (default 4)
  RUNNER_DRAIN_GRACE    how long running works may go on after SIGTERM (default 10m)
  LOG_LEVEL, LOG_FORMAT debug|info|warn|error, text|json

Exit status: 0 drained, or told of its revocation (one that is dialled), 1 failed, 2 configuration, 10 replaced by another process, 11 credential refused for good.`,
		Flags: []cli.Flag{
			listenFlag(),
			stateDirFlag(),
			policyFlag(),
		},
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return usageError("serve takes no arguments: settings belong into the environment (see core-runner serve --help)")
			}
			log, err := process.NewLog(os.Stderr, os.Getenv)
			if err != nil {
				return usageError(err.Error())
			}
			return agent.Run(context.Background(), log, os.Stdout, func(cfg *runner.Config) {
				cfg.StateDir, cfg.Policy, cfg.Listen = c.String("state-dir"), c.String("policy"), c.String("listen")
			})
		},
	}
}

func listenFlag() *cli.StringFlag {
	return &cli.StringFlag{Name: "listen", Usage: "`ADDRESS` where a runner that is dialled listens (default " + runner.DefaultListen + ")", EnvVars: []string{"CORE_RUNNER_LISTEN"}}
}

func policyFlag() *cli.StringFlag {
	return &cli.StringFlag{Name: "policy", Usage: "file of the local policy: what this runner may reach", EnvVars: []string{"RUNNER_POLICY"}}
}

// errTokenOnCommandLine refuses a token that everybody on this host can see in the list of processes. It does not repeat it.
var errTokenOnCommandLine = usageError("a token on the command line is refused: everybody on this host can read it there. " +
	"Put it into RUNNER_ENROLL_TOKEN, or into a file of mode 0600 that RUNNER_ENROLL_TOKEN_FILE names, and revoke this one (runink key revoke)")

// isToken reports whether a word is, or has, a token.
func isToken(args []string) bool {
	return slices.ContainsFunc(args, func(arg string) bool {
		return strings.Contains(arg, schemas.ServiceTokenPrefix) || strings.Contains(arg, schemas.SessionTokenPrefix)
	})
}

func unknown(c *cli.Context) error {
	if c.Args().Present() {
		return usageError(fmt.Sprintf("no such command: %q (see core-runner --help)", c.Args().First()))
	}
	return cli.ShowAppHelp(c)
}

// errUsageShown is the exit status of a usage that was printed.
var errUsageShown = usageError("a command is missing")

// incomplete is for a command that only holds others: without one of them it prints its usage, and that is an error.
func incomplete(c *cli.Context) error {
	if c.Args().Present() {
		return usageError(fmt.Sprintf("no such command: %q (see %s --help)", c.Args().First(), c.Command.HelpName))
	}
	c.App.Writer = c.App.ErrWriter
	if err := cli.ShowSubcommandHelp(c); err != nil {
		return err
	}
	return errUsageShown
}

func usage(_ *cli.Context, err error, _ bool) error { return usageError(err.Error()) }

func usageError(text string) error {
	return &runner.ExitError{Code: runner.ExitConfig, Err: schemas.Errorf("usage", "%s", text)}
}
