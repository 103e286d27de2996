// Package secrets takes every secret of the platform along all its ways, on the real processes, and looks wherever it could come out: the
// harness does that for the tests of every other package too (stack.Secrets). Leaks that are planted show that it would be seen.
package secrets

import (
	"flag"
	"fmt"
	"os"
	"syscall"
	"testing"

	"github.com/org-runink/runbus/tests/stack"
)

// plain has the programs be those without the race detector.
var plain = flag.Bool("plain", false, "run the programs without the race detector")

func TestMain(m *testing.M) {
	flag.Parse()
	if err := allowCores(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	stack.Remove()
	os.Exit(code)
}

// allowCores lets what is started here leave core files, as far as this host does: whoever leaves none has seen to it.
func allowCores() error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_CORE, &limit); err != nil {
		return err
	}
	limit.Cur = limit.Max
	return syscall.Setrlimit(syscall.RLIMIT_CORE, &limit)
}
