package selfguard

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// EnvDebug set to true leaves a process open to debuggers of its own user. Core files stay off.
const EnvDebug = "RUNBUS_DEBUGGABLE"

// Process sees to it that no core file of this process can be made, nor of those that it starts, and that other processes of its user can
// read neither its memory nor its environment (Linux; elsewhere core files alone are off). Call it first in main. getenv is os.Getenv.
func Process(getenv func(string) string) error {
	err := syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{})
	if err != nil {
		err = fmt.Errorf("switch core files off: %w", err)
	}
	if strings.EqualFold(getenv(EnvDebug), "true") {
		return err
	}
	return errors.Join(err, setDumpable(false))
}

// Main is Process for a program: where the kernel refuses, it says so on standard error and the program goes on.
func Main() {
	if err := Process(os.Getenv); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "this process's memory is not shielded from its user's other processes:", err)
	}
}
