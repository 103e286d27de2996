// Package leak looks for goroutines that tests leave behind.
package leak

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// patience is how long goroutines that were told to end may take to. goleak itself looks for less than half a second, which is
// not enough on a machine that does much else.
const patience = 30 * time.Second

// Main runs the tests of a package and ends the process, with a failure if goroutines are left at the end.
func Main(m *testing.M, options ...goleak.Option) {
	code := m.Run()
	if code == 0 {
		if err := Find(options...); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// Find returns nil as soon as no goroutines are left but the caller's and those that options ignore; half a minute later it
// returns an error that shows them.
func Find(options ...goleak.Option) error { return find(patience, options) }

func find(within time.Duration, options []goleak.Option) error {
	for give := time.Now().Add(within); ; {
		err := goleak.Find(options...) // takes a while itself when there is something
		if err == nil || time.Now().After(give) {
			return err
		}
	}
}
