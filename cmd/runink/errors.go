package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
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
	} else if strings.HasSuffix(text, "for flag -timeout: parse error") {
		return usageHint("a time has a unit, such as 90s or 5m", "%s", strings.Replace(text, "flag -", "flag --", 1))
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
	var e *schemas.Error
	if !errors.As(err, &e) {
		e = &schemas.Error{Code: schemas.CodeFailed, Message: err.Error()} // such as a write that failed
	}
	var body struct {
		Error struct {
			Code    schemas.Code `json:"code"`
			Message string       `json:"message"`
			Hint    string       `json:"hint"`
		} `json:"error"`
	}
	body.Error.Code, body.Error.Message, body.Error.Hint = e.Code, e.Message, e.Hint
	var line bytes.Buffer
	encoder := json.NewEncoder(&line)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(body) // three strings
	_, _ = w.Write(escapeControls(line.Bytes()))
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

// wantsJSON looks for --json where the flags could not even be parsed.
func wantsJSON(args []string) bool {
	if i := slices.Index(args, "--"); i >= 0 {
		args = args[:i]
	}
	return slices.ContainsFunc(args, func(a string) bool { return a == "--json" || a == "-json" || a == "--json=true" })
}
