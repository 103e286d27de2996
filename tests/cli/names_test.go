package cli

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// What an operator reads in a list is enough to go on with: the names beside the ids.
func TestListsTellNames(t *testing.T) {
	u := startUp(t, t.TempDir(), filepath.Join(t.TempDir(), "data"), "--no-runner")
	must := func(args ...string) string {
		t.Helper()
		r := u.runink(t, args...)
		if r.status != 0 || r.stderr != "" {
			t.Fatalf("%v: %+v", args, r)
		}
		return r.stdout
	}
	var made struct{ Runner struct{ ID string } }
	if err := json.Unmarshal([]byte(must("runner", "create", "--json", "--address", "127.0.0.1:1", "warehouse")), &made); err != nil {
		t.Fatal(err)
	}
	for _, runner := range []string{"warehouse", "nobody"} {
		if r := u.runink(t, "fetch", "run", "--json", "--runner", runner, "--source", "file", "--set", "path=/x.csv"); r.status != 3 {
			t.Fatalf("a fetch on %s: %+v", runner, r)
		}
	}
	list := must("fetch", "list")
	if line := lineWith(t, list, "warehouse"); !strings.Contains(line, made.Runner.ID) || !strings.Contains(line, " file ") || !strings.Contains(line, " owner ") {
		t.Errorf("the line of the fetch is %q in\n%s", line, list)
	}
	if line := lineWith(t, list, "nobody"); !strings.Contains(line, "refused") {
		t.Errorf("the line of a runner that is not there is %q in\n%s", line, list)
	}

	// The audit tells why something was refused, soon: nobody waits for that event, and so it is written with others.
	events := ""
	for give := time.Now().Add(stack.Patience); !strings.Contains(events, "runner_unknown") && time.Now().Before(give); {
		events = must("audit", "list")
	}
	if line := lineWith(t, events, "runner_unknown"); !strings.Contains(line, `runner "nobody" is not registered`) {
		t.Errorf("the line of the audit is %q", line)
	}

	// Two runners at one address may be right, and are told of, when the second is made and when it is moved.
	const shared = `warning: runner "warehouse" has the address 127.0.0.1:1 too`
	if r := u.runink(t, "runner", "create", "--address", "127.0.0.1:1", "second"); r.status != 0 || !strings.Contains(r.stderr, shared) {
		t.Errorf("a second runner at an address: %+v", r)
	}
	must("runner", "edit", "--address", "127.0.0.1:2", "second")
	must("runner", "edit", "--zone", "eu-1", "second")
	if r := u.runink(t, "runner", "edit", "--address", "127.0.0.1:1", "second"); r.status != 0 || !strings.Contains(r.stderr, shared) {
		t.Errorf("a runner that is moved to an address: %+v", r)
	}
	must("runner", "revoke", "second")

	// A wait that is over is neither a refusal nor a failure, and tells what is in the way, if it could ask in time.
	for wait := 5 * time.Second; ; wait *= 2 {
		r := u.runink(t, "runner", "connect", "--json", "--wait", "--timeout", wait.String(), "warehouse")
		code, text, _ := r.failure(t)
		if r.status != 4 || code != "wait_timeout" || !strings.Contains(text, "runner warehouse does not take work after "+wait.String()) {
			t.Fatalf("a runner that does not come up: %+v", r)
		}
		if strings.Contains(text, " after "+wait.String()+": not enrolled yet") {
			break
		}
		if wait > stack.Patience {
			t.Fatalf("a runner that is not enrolled: %+v", r)
		}
	}
}

// lineWith is the one line of text that has word in it.
func lineWith(t *testing.T, text, word string) string {
	t.Helper()
	found := ""
	for line := range strings.Lines(text) {
		if strings.Contains(line, word) {
			if found != "" {
				t.Fatalf("%q is in several lines of\n%s", word, text)
			}
			found = line
		}
	}
	if found == "" {
		t.Fatalf("%q is in no line of\n%s", word, text)
	}
	return found
}
