package cli

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// A dialled runner on the command line: created, looked at, moved, given another ticket, revoked, removed.
func TestDialledRunners(t *testing.T) {
	u := startUp(t, t.TempDir(), filepath.Join(t.TempDir(), "data"), "--no-runner")
	must := func(args ...string) string {
		t.Helper()
		r := u.runink(t, append([]string{"runner"}, args...)...)
		if r.status != 0 || r.stderr != "" {
			t.Fatalf("%v: %+v", args, r)
		}
		return r.stdout
	}
	// The command stands alone on its line, ready to be pasted.
	out := must("create", "--address", "127.0.0.1:1", "--zone", "eu-1", "--label", "env=prod", "--label", "team=a=b", "warehouse")
	command := ""
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "CORE_RUNNER_TICKET=") {
			command = strings.TrimSuffix(line, "\n")
		}
	}
	quoted, ok := strings.CutSuffix(command, " core-runner serve --listen 127.0.0.1:1")
	ticket := strings.Trim(strings.TrimPrefix(quoted, "CORE_RUNNER_TICKET="), "'")
	if _, err := schemas.ParseTicket(ticket); !ok || err != nil || quoted != "CORE_RUNNER_TICKET='"+ticket+"'" {
		t.Fatalf("the command is %q (%v) in\n%s", command, err, out)
	}

	table := must("list")
	first, last := strings.Index(table, "Runink managed"), strings.Index(table, "warehouse")
	if first < 0 || last < first || !strings.Contains(table, "no: not enrolled yet") || !strings.Contains(table, "127.0.0.1:1") {
		t.Errorf("the list is\n%s", table)
	}
	text := must("show", "warehouse")
	for _, want := range []string{"PENDING", "eu-1", "env=prod team=a=b", "person:owner", "not enrolled yet", "live, until "} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
	if strings.Contains(table+text, ticket[len(schemas.TicketPrefix):]) {
		t.Error("the ticket is shown again")
	}
	var shown struct {
		ID, Address string
		Labels      map[string]string
	}
	decode := func(text string, into any) {
		t.Helper()
		if err := json.Unmarshal([]byte(text), into); err != nil {
			t.Fatalf("%v in %s", err, text)
		}
	}
	decode(must("edit", "--json", "--address", "[::1]:2", "--no-labels", "warehouse"), &shown)
	if shown.Address != "[::1]:2" || len(shown.Labels) != 0 || !schemas.IsDialledID(shown.ID) {
		t.Errorf("edited %+v", shown)
	}
	var next struct{ Ticket, Command, TokenID string }
	decode(must("token", "--json", "warehouse"), &next)
	if next.Ticket == ticket || !strings.HasSuffix(next.Command, "--listen '[::1]:2'") {
		t.Errorf("the next ticket's command is %q", next.Command)
	}
	must("token", "revoke", next.TokenID)
	must("connect", shown.ID)

	for _, c := range []struct{ args, text string }{
		{"create --address 127.0.0.1:1 warehouse", "already"},
		{"create --address 127.0.0.1:1 console", "reserved"},
		{"create --address https://h:1 x", "address"},
		{"health warehouse", "not enrolled yet"},
		{"remove warehouse", "only a REVOKED one"},
		{"revoke console", "can't be changed"},
		{"show nobody", "no runner"},
	} {
		if r := u.runink(t, append([]string{"runner"}, strings.Fields(c.args)...)...); r.status != 3 || !strings.Contains(r.stderr, c.text) {
			t.Errorf("%s: %+v", c.args, r)
		}
	}
	must("revoke", "warehouse")
	if r := u.runink(t, "runner", "token", "warehouse"); r.status != 3 || !strings.Contains(r.stderr, "was revoked") {
		t.Errorf("a ticket for a revoked runner: %+v", r)
	}
	must("remove", "warehouse")
	if table := must("list"); strings.Contains(table, "warehouse") {
		t.Errorf("it is still there:\n%s", table)
	}
	if words := u.runink(t, "runner", "--generate-bash-completion"); !strings.Contains(words.stdout, "create") || !strings.Contains(words.stdout, "connect") {
		t.Errorf("completion gives %q", words.stdout)
	}
}
