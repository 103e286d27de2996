package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/mattn/go-isatty"
	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/internal/selfguard"
	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/runner/identity"
)

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name: "doctor", Usage: "tell what keeps this host's runner from working, and what to do about it", OnUsageError: usage,
		Description: `Looks, with the environment and the flags of "core-runner serve" (see its --help), at: configuration; for each address of RUNNER_ENROLL_ADDR the name's
addresses (dns), the connection (tcp), the proxy and why it is used or not, the certificate and who issued it (tls), whether the
token and the runner's id are accepted (token), this host's clock, permissions, payload limit and round-trip time (rtt); and on
this host at the state folder, the journal, the policy and the file roots. Of a runner that is dialled it looks at this host alone, as
serve does when it starts: at the state folder with its certificate, and the ticket, which it does not use up. It may run beside the runner: it takes neither its id
nor its work.

Each check is ok, warn, fail, or skip (one before it failed).
Exit status: 0 nothing failed, 1 something did, 2 usage.`,
		Flags: []cli.Flag{
			listenFlag(), stateDirFlag(), policyFlag(),
			&cli.BoolFlag{Name: "json", Usage: "print one JSON object"},
			&cli.DurationFlag{Name: "timeout", Usage: "how long one step may take", Value: 10 * time.Second},
		},
		Action: diagnose,
	}
}

func diagnose(c *cli.Context) error {
	if c.Args().Present() {
		return usageError("doctor takes no arguments: settings belong into the environment (see core-runner serve --help)")
	}
	if c.Duration("timeout") <= 0 {
		return usageError("--timeout is how long one step may take: use a duration such as 10s")
	}
	ctx, stop := signal.NotifyContext(c.Context, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	var show *checklist
	o := runner.DoctorOptions{Patience: c.Duration("timeout")}
	if !c.Bool("json") {
		show = &checklist{out: c.App.Writer, terminal: isTerminal(c.App.Writer)}
		o.Begin, o.Done = show.begin, show.done
	}
	d := diagnosis(ctx, c, o)
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	if c.Bool("json") {
		if err := printJSON(c, d); err != nil {
			return err
		}
	} else {
		if show.count == 0 { // not even the environment could be read
			for _, check := range d.Checks {
				show.done(check)
			}
		}
		show.flush()
	}
	failed := 0
	for _, check := range d.Checks {
		if check.Verdict == runner.CheckFail {
			failed++
		}
	}
	if failed > 0 {
		return &runner.ExitError{Code: runner.ExitFailed, Err: fmt.Errorf("%d of %d checks failed", failed, len(d.Checks))}
	}
	return nil
}

func diagnosis(ctx context.Context, c *cli.Context, o runner.DoctorOptions) runner.Diagnosis {
	ticket, noTicket := identity.TakeTicket(os.Getenv, func(names ...string) error {
		_ = selfguard.ForgetEnv(names...)
		return nil
	})
	cfg, err := runner.ConfigFromEnv(os.Getenv)
	if err == nil {
		_, err = process.NewLog(io.Discard, os.Getenv) // serve does not start with a wrong LOG_… either
	}
	// What can't be hidden stays in sight while the doctor looks, no longer.
	_ = process.ForgetProxyAnd("RUNNER_ENROLL_TOKEN", identity.EnvTicket)
	if err != nil {
		return runner.DiagnoseError(err)
	}
	cfg.Ticket = ticket
	if errors.Is(noTicket, identity.ErrTicketGone) {
		cfg.TicketGone = noTicket
	} else {
		o.NoTicket = noTicket
	}
	cfg.StateDir, cfg.Policy, cfg.Listen = c.String("state-dir"), c.String("policy"), c.String("listen")
	return runner.Diagnose(ctx, cfg, o)
}

// checklist prints checks as they are made. On a terminal it also shows the one that is being made.
type checklist struct {
	out      io.Writer
	terminal bool
	count    int
	skipped  []runner.Check // of one address, for one reason; not yet printed
}

func (l *checklist) begin(name, address string) {
	if l.terminal {
		_, _ = fmt.Fprint(l.out, process.Printable(fmt.Sprintf("…     %-13s %s", name, address)))
	}
}

func (l *checklist) done(c runner.Check) {
	l.count++
	if l.terminal {
		_, _ = fmt.Fprint(l.out, "\r\x1b[K")
	}
	if c.Verdict == runner.CheckSkip {
		if n := len(l.skipped); n > 0 && (l.skipped[n-1].Address != c.Address || l.skipped[n-1].Saw != c.Saw) {
			l.flush()
		}
		l.skipped = append(l.skipped, c)
		return
	}
	l.flush()
	l.print(c)
}

// flush prints what was skipped as one line.
func (l *checklist) flush() {
	if len(l.skipped) == 0 {
		return
	}
	one := l.skipped[0]
	names := make([]string, len(l.skipped))
	for i, c := range l.skipped {
		names[i] = c.Name
	}
	one.Name, one.Saw = "-", strings.Join(names, ", ")+" "+one.Saw
	l.skipped = nil
	l.print(one)
}

func (l *checklist) print(c runner.Check) {
	where := ""
	if c.Address != "" {
		where = c.Address + "  "
	}
	text := fmt.Sprintf("%-4s  %-13s %s%s\n", c.Verdict, c.Name, where, c.Saw)
	if c.Todo != "" {
		text += fmt.Sprintf("%20s→ %s\n", "", c.Todo)
	}
	_, _ = fmt.Fprint(l.out, process.Printable(text))
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}
