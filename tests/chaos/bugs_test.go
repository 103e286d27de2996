package chaos

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// bug is one planted on purpose, to show that the harness bites: bugs/<name>.patch, whose head says what it does, which drill
// catches it, and by which invariant.
type bug struct {
	name, text, drill, invariant, file string
}

// quickBugs are those of a normal run.
var quickBugs = []string{"seen-ids", "slot-leak"}

var bugHead = regexp.MustCompile(`(?m)\A# (.*)\n# Drill: (.*)\n# Breaks: ([a-z-]+)\n\n--- a/`)

func bugs(t testing.TB) (all []bug) {
	t.Helper()
	names, err := filepath.Glob("bugs/*.patch")
	if err != nil {
		t.Fatal(err)
	}
	if len(names) < 8 {
		t.Fatalf("only %d bugs", len(names))
	}
	for _, file := range names {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		head := bugHead.FindStringSubmatch(string(b))
		if head == nil {
			t.Fatalf("%s does not begin with what it does, its drill and its invariant", file)
		}
		if !slices.Contains(bugTests, head[2]) && !drillNamed(head[2]) {
			t.Fatalf("%s: there is no drill %q", file, head[2])
		}
		absolute, err := filepath.Abs(file)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, bug{strings.TrimSuffix(filepath.Base(file), ".patch"), head[1], head[2], head[3], absolute})
	}
	return all
}

// bugTests are the drills that are tests of their own.
var bugTests = []string{"TestLyingRunners", "TestCutInAFetch", "TestNothingLeaks"}

// copyModule copies what the programs are built of.
func copyModule(t testing.TB) (dir string) {
	t.Helper()
	dir = t.TempDir()
	if err := stack.CopyModule(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Every bug can still be planted: the patches don't rot.
func TestBugsApply(t *testing.T) {
	dir := copyModule(t)
	for _, b := range bugs(t) {
		if err := stack.Patch(dir, "--check", b.file); err != nil {
			t.Errorf("%s: %v", b.name, err)
		}
	}
}

// The harness catches the bugs that are planted: for each, its drill fails by its invariant on the programs that have it.
func TestPlantedBugsAreCaught(t *testing.T) {
	dir := copyModule(t)
	var table strings.Builder
	for _, b := range bugs(t) {
		if !*longFlag && !slices.Contains(quickBugs, b.name) {
			continue
		}
		t.Run(b.name, func(t *testing.T) {
			began := time.Now()
			caught, out := plant(t, dir, b)
			verdict := "caught"
			if !slices.Contains(caught, b.invariant) {
				verdict = "MISSED"
				t.Errorf("%s (%s) is not caught by %q but by %q:\n%s", b.name, b.text, b.invariant, caught, out)
			}
			fmt.Fprintf(&table, "  %-17s %-22s %s by %-15s (all: %s) in %s\n", b.name, b.drill, verdict, b.invariant, strings.Join(caught, ", "), time.Since(began).Round(time.Second))
		})
	}
	say("chaos: planted bugs\n%s", table.String())
}

var patched = regexp.MustCompile(`(?m)^--- a/([a-z]+)/`)

// programs builds the programs that the patch changes; the others are those of the tests.
func programs(t *testing.T, dir string, b bug) (bin string) {
	t.Helper()
	text, err := os.ReadFile(b.file)
	if err != nil {
		t.Fatal(err)
	}
	runner, plane := false, false
	for _, m := range patched.FindAllStringSubmatch(string(text), -1) {
		runner = runner || m[1] != "cp"
		plane = plane || m[1] != "runner"
	}
	bin = t.TempDir()
	good, err := stack.Build(false)
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"build", "-buildvcs=false", "-o", bin + string(filepath.Separator)}
	for _, p := range []struct {
		changed bool
		good    string
	}{{runner, good.CoreRunner}, {plane, good.Face}} {
		if p.changed {
			args = append(args, "./cmd/"+filepath.Base(p.good))
		} else if err := os.Symlink(p.good, filepath.Join(bin, filepath.Base(p.good))); err != nil {
			t.Fatal(err)
		}
	}
	build := exec.Command("go", args...)
	build.Dir = dir
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build with %s: %v\n%s", b.name, err, out)
	}
	return bin
}

// plant applies the patch, builds the programs, runs the bug's drill on them in a process of its own, and returns the invariants
// that it found broken. It takes the patch out again.
func plant(t *testing.T, dir string, b bug) (caught []string, out string) {
	t.Helper()
	if err := stack.Patch(dir, b.file); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := stack.Patch(dir, "-R", b.file); err != nil {
			t.Fatal(err)
		}
	}()
	bin := programs(t, dir, b)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	pattern := "^TestDrills$/^" + strings.ReplaceAll(string(stack.OverTLS), " ", "_") + "$/^" + strings.ReplaceAll(b.drill, " ", "_") + "$"
	if slices.Contains(bugTests, b.drill) {
		pattern = "^" + b.drill + "$"
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	drill := exec.CommandContext(ctx, self, "-test.run", pattern, "-test.v", "-test.timeout", "4m")
	drill.Env = append(os.Environ(), stack.BinariesEnv+"="+bin)
	drill.WaitDelay = time.Minute // for what it printed last
	var text bytes.Buffer
	drill.Stdout, drill.Stderr = &text, &text
	if drill.Run() == nil {
		return nil, "the drill passed"
	}
	for _, m := range brokenLine.FindAllStringSubmatch(text.String(), -1) {
		if !slices.Contains(caught, m[1]) {
			caught = append(caught, m[1])
		}
	}
	return caught, text.String()
}
