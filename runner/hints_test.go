package runner

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/org-runink/runbus/runner/policy"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
)

// What a caller is told to do about a refusal of a managed runner names what the operator of the control plane can set, and that of any
// other what its own host can.
func TestHintsOfAChild(t *testing.T) {
	p := newParent(t)
	defer func() {
		must(t, p.Close())
		if err := p.end(t); !errors.Is(err, errOrphaned) {
			t.Errorf("it ended with %v", err)
		}
	}()
	for who, a := range map[string]*Agent{"a child": p.child, "another": {cfg: Config{Concurrency: 4}}} {
		child := a.child != nil
		folders, err := source.OpenRoots(t.TempDir())
		must(t, err)
		defer func() { must(t, folders.Close()) }()
		none, err := source.OpenRoots("")
		must(t, err)
		if child {
			folders.Word(childFiles)
			if a.env.Roots.Hints() != childFiles { // New did the same
				t.Errorf("%s hints at %+v", who, a.env.Roots.Hints())
			}
			none = a.env.Roots
		}
		_, noFolder := none.Open("x")
		_, outside := folders.Open("/etc/hostname")
		_, missing := folders.By(func(string, string) error { return nil }).Open("x")
		rules := openPolicy(t)
		if child {
			rules.Word(childPolicy)
		}
		fetch := rules.Begin("http")
		refused := fetch.Start(nil)
		must(t, fetch.End())
		w := &works{agent: a, running: a.cfg.Concurrency}
		for what, c := range map[string]struct {
			err          error
			own, managed string
		}{
			"no folder": {noFolder, "RUNNER_FILE_ROOTS", "`--files` of `runink up`, or MANAGED_RUNNER_FILE_ROOTS"},
			"outside":   {outside, "RUNNER_FILE_ROOTS", "`--files` of `runink up`, or MANAGED_RUNNER_FILE_ROOTS"},
			"missing":   {missing, "of its RUNNER_FILE_ROOTS", "a folder of MANAGED_RUNNER_FILE_ROOTS"},
			"no match":  {schemas.Errorf("x", "x").WithHint(folders.Hints().NoMatch), "below RUNNER_FILE_ROOTS", "below MANAGED_RUNNER_FILE_ROOTS"},
			"policy":    {refused, "RUNNER_POLICY", "`--managed-policy` of `runink up`, or MANAGED_RUNNER_POLICY"},
			"busy":      {w.refusal(), "RUNNER_CONCURRENCY on the runner", "MANAGED_RUNNER_CONCURRENCY on the control plane"},
			"journal":   {a.worded(schemas.Errorf("x", "x").WithHint("RUNNER_JOURNAL=off"), childJournal), "RUNNER_JOURNAL", "the control plane's log"},
		} {
			hint, own := hintOf(c.err), namesOwn(hintOf(c.err))
			if child && (own || !strings.Contains(hint, c.managed)) || !child && (!own || !strings.Contains(hint, c.own)) {
				t.Errorf("%s, %s: %v hints %q", who, what, c.err, hint)
			}
		}
	}
}

func openPolicy(t *testing.T) *policy.Keeper {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policy.yaml")
	must(t, os.WriteFile(file, []byte("version: 1\ndefault: deny\n"), 0o600))
	k, err := policy.Open(file, t.TempDir(), []string{"http"})
	must(t, err)
	return k
}

// namesOwn reports whether a text names a variable that a runner's own host sets: all but a managed runner's begin with RUNNER_.
func namesOwn(text string) bool {
	return strings.Contains(strings.ReplaceAll(text, "MANAGED_RUNNER_", ""), "RUNNER_")
}

// Every hint of the runner's code that names a variable is either one that TestHintsOfAChild is about, or is never part of a result: it is
// about a start or an enrolment, which a child has from its parent. A new one has to be put into one of both.
func TestEveryHintHasItsPlace(t *testing.T) {
	worded := []string{
		childPolicy, childBusy, childJournal, childFolders, childFiles.Missing, childFiles.NoMatch, // a child's
		"set RUNNER_FILE_ROOTS on the runner to the folders it may read", "RUNNER_FILE_ROOTS on the runner lists the folders",
		"the path is one of the runner's host; a relative one begins in a folder of its RUNNER_FILE_ROOTS", "the runner sees files below RUNNER_FILE_ROOTS only",
		"the owner of the runner's host decides this, in the file that RUNNER_POLICY names there",
		"the runner's log has the cause: a full disk, perhaps; RUNNER_JOURNAL=off does without a journal",
	}
	// Files in which no error of a work is made.
	before := []string{
		"agent.go", "config.go", "control.go", "credential.go", "dialer.go", "doctor.go", "doctor_bus.go", "doctor_dialled.go", "doctor_host.go", "doctor_link.go", "link.go",
		"identity/errors.go", "identity/files.go", "identity/ticket.go", "intake/intake.go", "tunnel/dial.go",
	}
	found := map[string]bool{}
	must(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || slices.Contains(before, filepath.ToSlash(path)) {
			return err
		}
		body, err := os.ReadFile(path)
		must(t, err)
		file, err := parser.ParseFile(token.NewFileSet(), path, body, 0)
		must(t, err)
		ast.Inspect(file, func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(lit.Value)
			must(t, err)
			switch {
			case slices.Contains(worded, text):
				found[text] = true
			case !namesOwn(text), logged(text):
			default:
				t.Errorf("%s: %q names a variable of the runner's host: a child must word it itself (child.go)", path, text)
			}
			return true
		})
		return nil
	}))
	for _, text := range worded {
		if !found[text] {
			t.Errorf("%q is in no file any more", text)
		}
	}
}

// logged are texts for the runner's own log, and those of what ends a start.
func logged(text string) bool {
	return slices.Contains([]string{
		"no local policy (RUNNER_POLICY): every source is allowed, but never a cloud-metadata address", "no journal is kept (RUNNER_JOURNAL=off)",
		"the journal can't be opened: %w: mend %s, or set RUNNER_JOURNAL=off",
		"no journal is kept: the state folder can't be written; RUNNER_JOURNAL=on insists on one",
		"RUNNER_FILE_ROOTS: %q is not an absolute path", "RUNNER_FILE_ROOTS: %w", "RUNNER_LIFELINE: %w: it is set by the control plane that starts its managed runner, and by nobody else",
	}, text)
}
