package stack

import (
	"os"
	"syscall"
	"testing"
)

// Whoever stops a process may rest on it doing nothing more.
func TestASignalledStopIsOver(t *testing.T) {
	p := Start(t, "shell", "/bin/sh", nil, "-c", "while :; do :; done")
	for range 20 {
		p.Signal(t, syscall.SIGSTOP)
		if !stopped(p.PID) {
			t.Fatal("the process goes on after it was stopped")
		}
		p.Signal(t, syscall.SIGCONT)
	}
	if stopped(os.Getpid()) {
		t.Error("this process, which runs, is said to have stopped")
	}
}
