package dispatch

import (
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// What the managed runner refuses names what its operator can set.
func TestTheHintsOfTheManagedRunner(t *testing.T) {
	for _, c := range []struct {
		err  *schemas.Error
		want []string // in the hint
		not  string
	}{
		{&schemas.Error{Code: schemas.CodeForbidden, Hint: "set RUNNER_FILE_ROOTS on the runner to the folders it may read"}, []string{"MANAGED_RUNNER_FILE_ROOTS", "`--files` of `runink up`"}, " RUNNER_FILE_ROOTS"},
		{&schemas.Error{Code: schemas.CodeForbiddenHop, Hint: "the owner of the runner's host decides this, in the file that RUNNER_POLICY names there"}, []string{"MANAGED_RUNNER_POLICY", "`--managed-policy` of `runink up`", "built-in rules of a shared control plane"}, " RUNNER_POLICY"},
		{schemas.ErrRunnerBusy("console", 4), []string{"try again", "MANAGED_RUNNER_CONCURRENCY"}, " RUNNER_CONCURRENCY"},
		{&schemas.Error{Code: schemas.CodeSource, Hint: "the runner sees files below RUNNER_FILE_ROOTS only"}, []string{"the runner sees files below MANAGED_RUNNER_FILE_ROOTS", "--files"}, " RUNNER_FILE_ROOTS"},
		{&schemas.Error{Code: schemas.CodeSource, Hint: "set MANAGED_RUNNER_POLICY"}, []string{"set MANAGED_RUNNER_POLICY"}, "--"},
		{&schemas.Error{Code: schemas.CodeSource, Hint: "ask the database"}, []string{"ask the database"}, "MANAGED"},
		{&schemas.Error{Code: schemas.CodeSource}, nil, "M"},
	} {
		got := managedHint(c.err)
		for _, want := range c.want {
			if !strings.Contains(got, want) {
				t.Errorf("%q became %q", c.err.Hint, got)
			}
		}
		if strings.Contains(got, c.not) {
			t.Errorf("%q became %q", c.err.Hint, got)
		}
	}
}
