package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/schemas"
)

// exitError gives an error the status that the process ends with.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return &exitError{process.ExitUsage, schemas.Errorf("usage", format, args...)}
}

// usageHint is usagef with what to do about it.
func usageHint(hint, format string, args ...any) error {
	return &exitError{process.ExitUsage, schemas.Errorf("usage", format, args...).WithHint(hint)}
}

// onUsage words what the flag package says about a flag.
func onUsage(c *cli.Context, err error, _ bool) error {
	help := c.App.HelpName
	if c.Command != nil && c.Command.HelpName != "" {
		help = c.Command.HelpName
	}
	text := err.Error()
	if name, ok := strings.CutPrefix(text, "flag provided but not defined: -"); ok {
		text = help + " has no flag --" + strings.TrimPrefix(name, "-")
	} else if value, ok := strings.CutSuffix(text, ": parse error"); ok && strings.HasPrefix(text, "invalid value ") {
		text = strings.Replace(value, "flag -", "flag --", 1) // as it was typed
		if strings.HasSuffix(text, "--timeout") {
			return usageHint("a time has a unit, such as 90s or 5m", "%s", text)
		}
		return usageHint("a whole number is wanted, such as 1000000", "%s", text)
	}
	return usageHint(help+" --help", "%s", text)
}

// report prints err and returns the exit status: the one that it carries, else the one of its code.
func report(w io.Writer, err error, asJSON bool) int {
	if err == nil {
		return process.ExitDone
	}
	status := statusOf(err)
	if errors.Is(err, errSaid) {
		return status
	}
	if !asJSON {
		_, _ = fmt.Fprintln(w, "runink: "+process.Text(err))
		return status
	}
	_, _ = w.Write(process.ErrorJSON(err))
	return status
}

func statusOf(err error) int {
	var exit *exitError
	if errors.As(err, &exit) {
		return exit.code
	}
	var agent *runner.ExitError
	if errors.As(err, &agent) {
		return agent.Code
	}
	switch schemas.CodeOf(err) {
	case schemas.CodeOutcomeUnknown:
		return process.ExitUnknown
	case schemas.CodeNoRunner, schemas.CodeRunnerUnknown, schemas.CodeRunnerRevoked, schemas.CodeRunnerOffline, schemas.CodeRunnerBusy,
		schemas.CodeUnauthorized, schemas.CodeForbidden, schemas.CodeInvalid, schemas.CodeConflict, schemas.CodeNotFound, schemas.CodeLimit,
		schemas.CodeReadOnly, schemas.CodeBadSource:
		return process.ExitRefused
	}
	return process.ExitFailed
}
