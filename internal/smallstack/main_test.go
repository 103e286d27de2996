package main

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestServerBuildsWithSmallStacks builds the server that go.mod requires, changed, as this module uses it.
func TestServerBuildsWithSmallStacks(t *testing.T) {
	const root = "../.."
	dir, err := filepath.Abs(filepath.Join(root, "bin", "smallstack")) // where `make build` has it too: compiled once
	if err != nil {
		t.Fatal(err)
	}
	if err := prepare(root, dir); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) string {
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Dir = root
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("go %v: %v\n%s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	modfile := "-modfile=" + filepath.Join(dir, "go.mod")
	if used := run("list", modfile, "-m", "-f", "{{.Dir}}", server); !strings.HasPrefix(used, dir) {
		t.Fatalf("the build takes the server from %s", used)
	}
	run("build", modfile, "./bus/embedded")
}

func TestAnotherServerIsNotChanged(t *testing.T) {
	for _, c := range changes {
		for name, text := range map[string]string{"gone": "package server\n", "twice": c.before + c.before} {
			if changed, err := c.make([]byte(text)); err == nil {
				t.Errorf("%s: %q", name, changed)
			}
		}
		changed, err := c.make([]byte("a\n" + c.before + "b\n"))
		if err != nil || string(changed) != "a\n"+c.after+"b\n" {
			t.Errorf("%q, %v", changed, err)
		}
	}
	if err := copyChanged(t.TempDir(), t.TempDir()); err == nil {
		t.Error("a folder without the files is copied")
	}
}
