// Command runink is the operator's command line of Runbus: a local stack for a first look, and everything that the HTTP API
// can do.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/runner"
)

func main() {
	app := newApp()
	err := app.RunContext(context.Background(), os.Args)
	os.Exit(report(os.Stderr, err, wantsJSON(os.Args)))
}

func newApp() *cli.App {
	return &cli.App{
		Name:    "runink",
		Usage:   "dispatch data fetches to runners inside private networks",
		Version: runner.BuildVersion(),
		Description: `Try "runink demo" first: it runs one fetch on a data set of its own and leaves nothing behind. "runink up" keeps such a
stack running.

Server and token come from the current context (runink context list), or from RUNINK_URL, RUNINK_TOKEN and RUNINK_CA.
Exit status: 0 done, 1 failed, 2 usage, 3 refused, 4 outcome unknown.`,
		HideHelpCommand:           true,
		EnableBashCompletion:      true,
		DisableSliceFlagSeparator: true,                         // a setting may have commas
		ExitErrHandler:            func(*cli.Context, error) {}, // main reports once and chooses the status
		OnUsageError:              onUsage,
		Action:                    noCommand,
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "context", Usage: "use this context instead of the current one", EnvVars: []string{"RUNINK_CONTEXT"}},
		},
		Commands: []*cli.Command{
			demoCommand(), upCommand(),
			tenantCommand(), userCommand(), keyCommand(), runnerCommand(), fetchCommand(), auditCommand(),
			contextCommand(), natsCommand(), decodeCommand(), serveCommand(),
		},
	}
}

// jsonFlag is on every command that prints something.
func jsonFlag() cli.Flag {
	return &cli.BoolFlag{Name: "json", Usage: "print one JSON object or array; errors as JSON on standard error"}
}

func noCommand(c *cli.Context) error {
	if c.Args().Present() {
		return usagef("no such command: %q (see %s --help)", c.Args().First(), c.App.Name)
	}
	return cli.ShowAppHelp(c)
}

// group is a command that only holds others.
func group(name, text string, commands ...*cli.Command) *cli.Command {
	return &cli.Command{
		Name: name, Usage: text, HideHelpCommand: true, OnUsageError: onUsage, Subcommands: commands,
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return usagef("no such command: %q (see runink %s --help)", c.Args().First(), name)
			}
			return cli.ShowSubcommandHelp(c)
		},
	}
}

// command fills in what every leaf has: --json, usage errors with the status of their own, and that each argument is named.
func command(name, text, args string, flags []cli.Flag, action func(*cli.Context) error) *cli.Command {
	return &cli.Command{
		Name: name, Usage: text, ArgsUsage: args, HideHelpCommand: true, OnUsageError: onUsage,
		Flags: append(flags, jsonFlag()), Action: action,
	}
}

// oneArg is the command's single argument.
func oneArg(c *cli.Context, what string) (string, error) {
	if c.NArg() != 1 {
		return "", usagef("%s takes exactly one argument: %s (flags come before it)", c.Command.FullName(), what)
	}
	return c.Args().First(), nil
}

func noArgs(c *cli.Context) error {
	if c.Args().Present() {
		return usagef("%s takes no arguments, and got %q", c.Command.FullName(), c.Args().First())
	}
	return nil
}

// interruptible is a context that ends at the first Ctrl-C or SIGTERM; a second one ends the process as usual.
func interruptible(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(parent, os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}
