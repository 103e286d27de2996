package e2e

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/runner/journal"
	"github.com/org-runink/runbus/tests/stack"
)

// claims is what the list shows of a runner's policy.
type claims struct {
	Claims struct {
		Policy *struct {
			Digest, Default, JournalHead string
			AllowRules, DenyRules        int
			RuleNames                    []string
			Journal                      bool
		}
	}
}

func policyOf(t *testing.T, plane *stack.Plane) claims {
	t.Helper()
	var list []claims
	plane.Admin.Must(t, http.MethodGet, "/api/runners", nil, &list)
	if len(list) != 2 || list[1].Claims.Policy == nil { // the first is the managed runner
		t.Fatalf("the list tells no policy: %+v", list)
	}
	return list[1]
}

// E12: what the policy on the runner's host refuses is refused, by the rule's name, before and after a SIGHUP; the control plane sees
// which policy that is; the journal there tells of every fetch and is found out when it was changed.
func TestALocalPolicyAndItsJournal(t *testing.T) { eachLink(t, aLocalPolicyAndItsJournal) }

func aLocalPolicyAndItsJournal(t *testing.T, link stack.Link) {
	plane := stack.StartPlane(t, true, nil)
	rows := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if to := r.URL.Query().Get("to"); to != "" {
			http.Redirect(w, r, to, http.StatusFound)
			return
		}
		_, _ = w.Write([]byte("{\"n\":1}\n"))
	}))
	defer rows.Close()
	port := rows.URL[strings.LastIndexByte(rows.URL, ':')+1:]

	state := filepath.Join(t.TempDir(), "state")
	file := filepath.Join(t.TempDir(), "policy.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte("version: 1\n"+text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("allow:\n  - {name: loopback, kinds: [http], hosts: [127.0.0.1], cidrs: [127.0.0.0/8]}\ndeny:\n  - {name: no-names, hosts: [localhost]}\n")
	runner := plane.StartLinked(t, link, "edge", map[string]string{"RUNNER_POLICY": file, "CORE_RUNNER_STATE_DIR": state})
	fetch := func(url string) stack.Line {
		return plane.Admin.Fetch(t, map[string]any{"runnerId": "edge", "source": map[string]any{
			"kind": "http", "settings": map[string]string{"url": url, "format": "jsonl", "crossOrigin": "anonymous"},
		}}).End()
	}
	denied := func(end stack.Line, rule string) {
		t.Helper()
		if end.Outcome != "failed" || end.Code != "egress_denied" || !strings.Contains(end.Message, rule) || end.Hint == "" {
			t.Errorf("ended %+v, want a refusal by %s", end, rule)
		}
	}
	if end := fetch(rows.URL); end.Outcome != "completed" {
		t.Errorf("ended %+v", end)
	}
	denied(fetch("http://localhost:"+port), `rule "no-names"`)
	denied(fetch(rows.URL+"?to=http://localhost:"+port), `rule "no-names"`) // a redirect
	denied(fetch("http://192.0.2.1/"), "default deny")
	denied(fetch(rows.URL+"?to=http://169.254.169.254/"), "169.254.0.0/16")

	before := policyOf(t, plane).Claims.Policy
	if before.Default != "deny" || before.AllowRules != 1 || before.DenyRules != 1 || strings.Join(before.RuleNames, " ") != "no-names loopback" || !before.Journal {
		t.Errorf("the list tells %+v", before)
	}

	write("alow: []\n")
	runner.Signal(t, syscall.SIGHUP)
	runner.Stderr.Must(t, "the policy in force stays")
	if end := fetch(rows.URL); end.Outcome != "completed" {
		t.Errorf("under the old policy: %+v", end)
	}
	write("deny:\n  - {name: nothing-any-more, kinds: [http]}\n")
	runner.Signal(t, syscall.SIGHUP)
	after := before
	for give := time.Now().Add(stack.Patience); after.Digest == before.Digest; <-time.After(20 * time.Millisecond) { // a state, not an event
		if time.Now().After(give) {
			t.Fatalf("the list still tells %+v", after)
		}
		after = policyOf(t, plane).Claims.Policy
	}
	if strings.Join(after.RuleNames, " ") != "nothing-any-more" {
		t.Errorf("the list tells %+v", after)
	}
	denied(fetch(rows.URL), `rule "nothing-any-more"`)
	if after.JournalHead != "12:"+after.JournalHead[3:] {
		t.Errorf("the list tells the journal's head as %s", after.JournalHead)
	}

	command := func(args ...string) (string, int) {
		c := stack.Start(t, "core-runner "+strings.Join(args, " "), plane.Bin.CoreRunner, map[string]string{"CORE_RUNNER_STATE_DIR": state}, args...)
		status := c.Exit(t)
		return c.Stdout.String() + c.Stderr.String(), status
	}
	if out, status := command("journal", "verify", "--expect", after.JournalHead); status != 0 { // while it runs
		t.Errorf("status %d: %s", status, out)
	}
	runner.Stop(t)
	out, status := command("journal", "list", "--json")
	var records []journal.Record
	if err := json.Unmarshal([]byte(out), &records); err != nil || status != 0 || len(records) != 14 {
		t.Fatalf("status %d, %v, %d records", status, err, len(records))
	}
	if r := records[3]; r.Event != journal.EventEnd || r.Outcome != "egress_denied" || !strings.Contains(r.Reason, "no-names") {
		t.Errorf("%+v", r)
	}

	// A crash in the middle of a line is mended at the next start and recorded; a change is found.
	files, err := filepath.Glob(filepath.Join(state, "journal", "*.jsonl"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%v, %v", files, err)
	}
	text, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(files[0], append(text, `{"seq":15,"prev"`...), 0o600); err != nil {
		t.Fatal(err)
	}
	var again *stack.Runner
	if link == stack.OverDials {
		again = plane.StartListening(t, runner.ID, "edge", map[string]string{"CORE_RUNNER_STATE_DIR": state, "CORE_RUNNER_LISTEN": plane.Admin.Runners(t)[runner.ID].Address})
	} else {
		again = plane.StartLinked(t, link, "again", map[string]string{"CORE_RUNNER_STATE_DIR": state})
	}
	again.Stderr.Must(t, "no local policy")
	again.Stop(t)
	if out, status := command("journal", "verify"); status != 0 || !strings.Contains(out, "whole: 15 records") || !strings.Contains(out, "1 lines") {
		t.Errorf("status %d: %s", status, out)
	}
	if err := os.WriteFile(files[0], []byte(strings.Replace(string(text), `"egress_denied"`, `"completed"`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, status := command("journal", "verify"); status != 1 || !strings.Contains(out, "00000000000000000001.jsonl:4: record 4: it was changed") {
		t.Errorf("status %d: %s", status, out)
	}
	if out, status := command("policy", "test", file, "--kind", "http", "--host", "127.0.0.1", "--port", port); status != 1 || !strings.Contains(out, "denied by nothing-any-more") {
		t.Errorf("status %d: %s", status, out)
	}
}
