package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/schemas"
)

// awaitRunner waits until a runner takes work, and tells on standard error what is in the way meanwhile.
func awaitRunner(c *cli.Context, api *client, id string) error {
	ctx, stop := interruptible(c.Context)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, c.Duration("timeout"))
	defer cancel()
	const again = 250 * time.Millisecond
	told, known := "", runnerRow{ID: id, Name: id}
	for {
		var r runnerRow
		var state string
		switch err := api.call(ctx, http.MethodGet, runnerPath(id), nil, &r); {
		case err == nil:
			known, state = r, r.Health.Detail
		case ctx.Err() != nil:
			state = told
		case notNow(err):
			state = err.Error()
		default:
			return err
		}
		if r.Dial != nil && r.Dial.LastError != "" {
			state += ": " + r.Dial.LastError
		}
		switch {
		case r.Health.Dispatchable:
			if !c.Bool("json") {
				_, err := fmt.Fprintf(c.App.Writer, "runner %s takes work\n", oneLine(r.Name))
				return err
			}
			return nil
		case r.State == "REVOKED":
			return schemas.ErrRunnerRevoked(r.Name)
		case ctx.Err() != nil:
			return errNotUp(known, state, c.Duration("timeout"), errors.Is(ctx.Err(), context.DeadlineExceeded))
		case state != told && !c.Bool("json"):
			_, _ = fmt.Fprintln(c.App.ErrWriter, "waiting: "+oneLine(state))
		}
		told = state
		select {
		case <-ctx.Done():
		case <-time.After(again):
		}
	}
}

// notNow reports whether the control plane said that it can't tell at present.
func notNow(err error) bool {
	var said *schemas.Error
	return errors.As(err, &said) && (said.Code == schemas.CodeUnavailable || said.Message == schemas.ErrRegistryUnavailable(nil).Message)
}

// errNotUp is the end of a wait for a runner that does not take work yet. It has a status of its own: nothing was refused or failed, and
// the runner may still come up.
func errNotUp(r runnerRow, why string, waited time.Duration, timedOut bool) error {
	code, text := schemas.Code("wait_timeout"), fmt.Sprintf("runner %s does not take work after %s", r.Name, waited)
	if !timedOut {
		code, text = "wait_interrupted", fmt.Sprintf("the wait for runner %s was interrupted: it does not take work yet", r.Name)
	}
	if why != "" {
		text += ": " + why
	}
	todo := "on its host look at the log of `core-runner serve`, and run `core-runner doctor` where it is stopped"
	if r.State == "PENDING" {
		todo = "has the command with the ticket been run on its host, as it is and before the ticket's end? `core-runner doctor` there says what is in the way; `runink runner token " +
			r.Name + "` prints a new command"
	}
	return &exitError{process.ExitUnknown, schemas.Errorf(code, "%s", text).WithHint(todo + ". `runink runner show " + r.Name + "` tells how it stands")}
}
