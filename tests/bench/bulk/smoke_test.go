package main

import (
	"fmt"
	"os"
	"testing"
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

// TestLargeResultArrivesWhole is the benchmark in small, for its outcomes alone: what arrives is what was sent, by checksum, on the
// product's path and on the controls'.
func TestLargeResultArrivesWhole(t *testing.T) {
	const bytes = 64 << 20
	s, err := newScene(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.stop(); err != nil {
			t.Error(err)
		}
	}()
	if err := s.verify(bytes); err != nil {
		t.Error(err)
	}
	if got, err := s.read("bare", bytes, false); err != nil || got.Bytes != bytes {
		t.Errorf("the bare copy: %d bytes of %d: %v", got.Bytes, bytes, err)
	}
}
