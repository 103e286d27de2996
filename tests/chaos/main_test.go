// Package chaos breaks the running product on purpose: runners that lie, links that fail, processes that stop, callers that hang.
package chaos

import (
	"os"
	"testing"

	"github.com/org-runink/runbus/tests/stack"
)

func TestMain(m *testing.M) {
	code := m.Run()
	stack.Remove()
	os.Exit(code)
}
