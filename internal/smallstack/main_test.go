package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestCopiesBuild builds the server and the client that go.mod requires, changed, as this module uses them.
func TestCopiesBuild(t *testing.T) {
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
		cmd.Env = append(os.Environ(), "GOFLAGS="+os.Getenv("GOFLAGS")+" '-modfile="+filepath.Join(dir, "go.mod")+"'")
		var said strings.Builder // what it says of downloads is no part of the answer
		cmd.Stderr = &said
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("go %v: %v\n%s%s", args, err, out, said.String())
		}
		return strings.TrimSpace(string(out))
	}
	for _, m := range modules {
		if used := run("list", "-m", "-f", "{{.Dir}}", m.path); !strings.HasPrefix(used, dir) {
			t.Fatalf("the build takes %s from %s", m.path, used)
		}
	}
	run("build", "./bus/embedded")
	if doc := run("doc", client+".Msg.Recycle"); !strings.Contains(doc, "func (m *Msg) Recycle()") { // bus/lent.go finds it by that
		t.Errorf("messages do not come back:\n%s", doc)
	}
}

func TestAnotherVersionIsNotChanged(t *testing.T) {
	for _, c := range slices.Concat(serverChanges, clientChanges) {
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
	for _, m := range modules {
		if err := m.copyChanged(t.TempDir(), t.TempDir()); err == nil {
			t.Errorf("%s: a folder without the files is copied", m.path)
		}
	}
}
