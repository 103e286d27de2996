// Command runink is the operator's command line of Runbus: a local stack for a first look, and everything that the HTTP API
// can do.
package main

import (
	"context"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/internal/selfguard"
	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/schemas"
)

func main() {
	selfguard.Main()
	_, _ = envToken(), process.HideLogins() // where that fails, the shell that set them shows them too
	app := newApp()
	err := app.RunContext(context.Background(), os.Args)
	os.Exit(report(os.Stderr, err, process.WantsJSON(os.Args)))
}

func newApp() *cli.App {
	return &cli.App{
		Name:    "runink",
		Usage:   "dispatch data fetches to runners inside private networks",
		Version: runner.BuildVersion(),
		Description: `Try "runink demo" first: it runs one fetch on a data set of its own and leaves nothing behind. "runink up" keeps such a
stack running.

Server and token come from the current context (runink context list), or from RUNINK_URL, RUNINK_TOKEN and RUNINK_CA.
Exit status: 0 done, 1 failed, 2 usage, 3 refused, 4 outcome unknown, or the time of --wait is over.`,
		HideHelpCommand:           true,
		EnableBashCompletion:      true,
		DisableSliceFlagSeparator: true,                         // a setting may have commas
		ExitErrHandler:            func(*cli.Context, error) {}, // main reports once and chooses the status
		OnUsageError:              onUsage,
		Action:                    noCommand,
		Flags:                     []cli.Flag{globalContextFlag()},
		Commands: []*cli.Command{
			demoCommand(), upCommand(),
			tenantCommand(), userCommand(), keyCommand(), runnerCommand(), fetchCommand(), auditCommand(),
			contextCommand(), natsCommand(), decodeCommand(), completionCommand(), serveCommand(),
		},
	}
}

// jsonFlag is on every command that prints something.
func jsonFlag() cli.Flag {
	return &cli.BoolFlag{Name: "json", Usage: "print one JSON object or array; errors as JSON on standard error", DisableDefaultText: true}
}

// contextFlag is on every command that talks to a server.
func contextFlag() *cli.StringFlag {
	return &cli.StringFlag{Name: "context", Usage: "use the context of this `NAME` instead of the current one"}
}

// globalContextFlag alone takes the variable: a command's that took it as well would put it before a --context that was typed ahead of
// the command.
func globalContextFlag() cli.Flag {
	f := contextFlag()
	f.EnvVars = []string{"RUNINK_CONTEXT"}
	return f
}

func noCommand(c *cli.Context) error {
	if err := noSecret(c.Args().Slice()); err != nil {
		return err
	}
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
			if err := noSecret(c.Args().Slice()); err != nil {
				return err
			}
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

// remote is a command that talks to a server.
func remote(name, text, args string, flags []cli.Flag, action func(*cli.Context) error) *cli.Command {
	return command(name, text, args, append(flags, contextFlag()), action)
}

// oneArg is the command's single argument.
func oneArg(c *cli.Context, what string) (string, error) {
	args := c.Args().Slice()
	if err := noSecret(args); err != nil {
		return "", err
	}
	if len(args) > 1 {
		if i := slices.IndexFunc(args[1:], func(a string) bool { return isFlag(a) && !hasFlag(c.Command, a) && !isNumber(a) }); i >= 0 {
			return "", usageHint(c.Command.HelpName+" --help", "%s has no flag %s", c.Command.HelpName, flagOf(args[1+i]))
		}
		if i := slices.IndexFunc(args[1:], isFlag); i >= 0 {
			return "", usageHint(strings.Join(append(append([]string{c.Command.HelpName}, args[1:]...), args[0]), " "),
				"the flag %s stands behind the argument %q, and flags come before arguments", args[1+i], args[0])
		}
	}
	if len(args) != 1 {
		return "", usageHint(c.Command.HelpName+" --help", "%s takes one argument, %s, and got %d", c.Command.HelpName, what, len(args))
	}
	return args[0], nil
}

// noSecret refuses a token or ticket that stands where a name belongs, without repeating it.
func noSecret(args []string) error {
	if slices.ContainsFunc(args, schemas.IsCredential) {
		return usageHint("replace it: whoever can list the processes of this host may have seen it", "there is a token or ticket among the arguments, where a name belongs")
	}
	return nil
}

func noArgs(c *cli.Context) error {
	if err := noSecret(c.Args().Slice()); err != nil {
		return err
	}
	if c.Args().Present() {
		return usageHint(c.Command.HelpName+" --help", "%s takes no arguments, and got %q", c.Command.HelpName, c.Args().First())
	}
	return nil
}

func isFlag(arg string) bool { return len(arg) > 1 && arg[0] == '-' }

// flagOf is a flag of the command line without its value.
func flagOf(arg string) string {
	name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
	return "--" + name
}

func hasFlag(command *cli.Command, arg string) bool {
	return slices.ContainsFunc(command.Flags, func(f cli.Flag) bool { return slices.Contains(f.Names(), strings.TrimPrefix(flagOf(arg), "--")) })
}

// isNumber reports whether what looks like a flag may be the value of one.
func isNumber(arg string) bool {
	_, err := strconv.ParseFloat(arg, 64)
	return err == nil
}

// interruptible is a context that ends at the first Ctrl-C or SIGTERM; a second one ends the process as usual.
func interruptible(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(parent, os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}
