package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/org-runink/runbus/tests/bench/plane"
	"github.com/org-runink/runbus/tests/bench/proc"
)

// TestMain lets the test's own program be the children too.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && roles[os.Args[1]] != nil {
		if err := roles[os.Args[1]](); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestFleetComesBack is the benchmark in small, for its outcomes alone: all runners enrol, and after the control plane was killed
// and started again on its data all are back, and none has given up.
func TestFleetComesBack(t *testing.T) {
	s := settings{runners: 200, sites: 4, together: 64}
	if _, err := proc.RaiseFiles(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	p, err := plane.Start(filepath.Join(dir, "plane"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	}()
	fleet, err := startRunners(t.Context(), s, p, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := fleet.Kill(); err != nil {
			t.Error(err)
		}
	}()
	var first outcome
	if err := fleet.Ask("connect 64", &first); err != nil {
		t.Fatal(err)
	}
	if first.Enrolled != s.runners || len(first.Closed) > 0 {
		t.Fatalf("%d of %d enrolled; ended: %v", first.Enrolled, s.runners, first.Closed)
	}
	var f figures
	if err := f.recover(s, p, fleet); err != nil {
		t.Fatal(err)
	}
	if f.back.Enrolled != s.runners || len(f.back.Closed) > 0 {
		t.Fatalf("%d of %d came back; ended: %v", f.back.Enrolled, s.runners, f.back.Closed)
	}
	if err := p.AwaitRunners(t.Context(), s.runners); err != nil {
		t.Fatal(err)
	}
}
