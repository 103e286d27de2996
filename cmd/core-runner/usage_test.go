package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/org-runink/runbus/runner"
)

// A command that only holds others says which, and that one is missing or wrong.
func TestCommandsThatHoldOthers(t *testing.T) {
	for _, c := range []struct {
		args         string
		shown, error string // on standard error, and of what is returned
	}{
		{"journal", "core-runner journal", ""},
		{"policy", "core-runner policy", ""},
		{"journal bogus", "", `no such command: "bogus" (see core-runner journal --help)`},
		{"policy bogus", "", `no such command: "bogus" (see core-runner policy --help)`},
	} {
		t.Run(c.args, func(t *testing.T) {
			a := app()
			var out, shown, told bytes.Buffer
			a.Writer, a.ErrWriter = &out, &shown
			err := a.Run(append([]string{"core-runner"}, strings.Fields(c.args)...))
			if status := report(&told, err, false); status != runner.ExitConfig {
				t.Errorf("status %d: %v", status, err)
			}
			if out.Len() > 0 || !strings.Contains(shown.String(), c.shown) || strings.Contains(shown.String(), "serve") {
				t.Errorf("printed %q and %q", out.String(), shown.String())
			}
			if strings.TrimSpace(told.String()) != c.error {
				t.Errorf("the error is %q", told.String())
			}
		})
	}
}
