package main

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// A flag's value that can't be read is told with the flag as one types it, and what kind of value it takes.
func TestAValueThatAFlagDoesNotTake(t *testing.T) {
	for args, want := range map[string]struct{ text, hint string }{
		"fetch run --max-bytes 1k":    {`invalid value "1k" for flag --max-bytes`, "a whole number is wanted, such as 1000000"},
		"fetch list --limit many":     {`invalid value "many" for flag --limit`, "a whole number is wanted, such as 1000000"},
		"fetch run --timeout 2":       {`invalid value "2" for flag --timeout`, "a time has a unit, such as 90s or 5m"},
		"fetch list --json=perhaps":   {`invalid boolean value "perhaps" for -json: parse error`, "runink fetch list --help"},
		"fetch run --no-such-flag 10": {"runink fetch run has no flag --no-such-flag", "runink fetch run --help"},
	} {
		t.Run(args, func(t *testing.T) {
			app := newApp()
			app.Writer, app.ErrWriter = io.Discard, io.Discard
			var said *schemas.Error
			if err := app.Run(append([]string{"runink"}, strings.Fields(args)...)); !errors.As(err, &said) || said.Message != want.text || said.Hint != want.hint {
				t.Errorf("%v", err)
			}
		})
	}
}
