// Package chaos breaks the running product on purpose: runners that lie, links that fail, processes that stop, callers that hang.
package chaos

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/org-runink/runbus/tests/stack"
)

func TestMain(m *testing.M) {
	// The parallel tests wait for clocks of the product most of the time, whatever the number of processors is.
	if err := flag.Set("test.parallel", "8"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	stack.Remove()
	os.Exit(code)
}
