// Package bench measures what the requirements set goals for, on the real processes. It has no tests: `go test` alone runs
// nothing here, and no figure is ever asserted, since it depends on the machine. scripts/bench runs it and prints the figures.
package bench

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

func TestMain(m *testing.M) {
	stack.Measure()
	code := m.Run()
	stack.Remove()
	os.Exit(code)
}

// median is the middle of d, or the mean of the middle two.
func median(d []time.Duration) time.Duration {
	d = slices.Sorted(slices.Values(d))
	if len(d) == 0 {
		return 0
	}
	return (d[(len(d)-1)/2] + d[len(d)/2]) / 2
}
