// Package security attacks the product's own processes: a runner's real credential, an operator's, and those who have none.
// Whatever an intruder tries, somebody who may listen there says what arrived, and the streams are compared message by message.
package security

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/tests/stack"
)

func TestMain(m *testing.M) {
	code := m.Run()
	stack.Remove()
	if code == 0 {
		if err := leak.Find(
			goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"), // kept-alive connections of the default client
			goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"),
		); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}
