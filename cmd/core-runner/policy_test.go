package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/runner/journal"
)

// run is one command line, as main has it; failed is what stands on standard error, or why it was said already.
func run(t *testing.T, args ...string) (stdout, failed string, status int) {
	t.Helper()
	var out, stderr bytes.Buffer
	a := app()
	a.Writer = &out
	err := a.RunContext(context.Background(), fileLast(append([]string{"core-runner"}, args...)))
	status = report(&stderr, err, process.WantsJSON(args))
	if stderr.Len() == 0 && err != nil {
		return out.String(), err.Error(), status
	}
	return out.String(), stderr.String(), status
}

// object is the one error object that failed has to be.
func object(t *testing.T, failed string) (code, message string) {
	t.Helper()
	var e struct {
		Error struct{ Code, Message string }
	}
	if err := json.Unmarshal([]byte(failed), &e); err != nil || e.Error.Message == "" {
		t.Errorf("not an error object: %q (%v)", failed, err)
	}
	return e.Error.Code, e.Error.Message
}

func write(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

const somePolicy = `version: 1
deny:
  - {name: no-hr, cidrs: [10.9.0.0/16]}
allow:
  - {name: warehouse, kinds: [postgres], cidrs: [10.0.0.0/8, 127.0.0.0/8], ports: [5432]}
  - {name: reports, kinds: [file], paths: [/srv/reports]}
`

func TestPolicyCheck(t *testing.T) {
	file := write(t, somePolicy)
	out, failed, status := run(t, "policy", "check", file)
	if status != 0 || !strings.Contains(out, `deny   "no-hr" (line 3)  cidrs=10.9.0.0/16`) || !strings.Contains(out, "digest ") {
		t.Errorf("%d %s\n%s", status, failed, out)
	}
	for _, args := range [][]string{{"policy", "check", file, "--json"}, {"policy", "check", "--json", file}} {
		var checked struct {
			Digest string
			Policy struct{ Allow, Deny []map[string]any }
		}
		out, failed, status := run(t, args...)
		if err := json.Unmarshal([]byte(out), &checked); err != nil || status != 0 || len(checked.Digest) != 64 || len(checked.Policy.Allow) != 2 || len(checked.Policy.Deny) != 1 {
			t.Errorf("%v: %d %s %v\n%s", args, status, failed, err, out)
		}
	}
	if _, failed, status := run(t, "policy", "check", write(t, "version: 1\nx: y\n")); status != 2 || !strings.Contains(failed, "line 2: ") {
		t.Errorf("%d %s", status, failed)
	}
	for _, args := range [][]string{{"policy", "check", "--json", write(t, "version: 1\nx: y\n")}, {"policy", "check", write(t, "version: 1\nx: y\n"), "--json"}, {"policy", "check", "--json"}, {"policy", "check", "--jsom", "--json"}} {
		out, failed, status := run(t, args...)
		if code, _ := object(t, failed); code != "usage" || status != 2 || out != "" {
			t.Errorf("%v: %d %q %s", args, status, out, failed)
		}
	}
	for _, args := range [][]string{{"policy", "check"}, {"policy", "check", file, file}, {"policy", "check", "none.yaml"}, {"policy", "chek", file}} {
		if _, failed, status := run(t, args...); status != 2 || failed == "" {
			t.Errorf("%v: %d %s", args, status, failed)
		}
	}
}

func TestPolicyTest(t *testing.T) {
	file := write(t, somePolicy)
	for _, c := range []struct {
		args   string
		out    string
		status int
	}{
		{"--kind postgres --host 10.1.2.3 --port 5432", "10.1.2.3:5432  allowed by warehouse\nallowed by warehouse\n", 0},
		{"--kind postgres --host db.internal --address 10.9.2.3 --port 5432", "10.9.2.3:5432  denied by no-hr\ndenied by no-hr\n", 1},
		{"--kind postgres --host ::ffff:10.9.2.3 --port 5432", "denied by no-hr", 1},
		{"--kind postgres --host 10.1.2.3 --port 5433", "denied by default deny", 1},
		{"--kind postgres --host localhost --port 5432", "127.0.0.1:5432  allowed by warehouse", 0},
		{"--kind http --host 10.1.2.3 --port 5432", "denied by default deny\n", 1},
		{"--kind postgres --host 169.254.169.254 --port 5432", "denied: the runner does not dial 169.254.169.254", 1},
		{"--kind postgres --host metadata.google.internal --address 10.1.2.3 --port 5432", "denied: the runner does not dial metadata.google.internal", 1},
		{"--kind postgres --host x --address 169.254.169.254 --port 5432", "169.254.0.0/16", 1},
		{"--kind file --path /srv/reports/a.csv", "allowed by reports\n", 0},
		{"--kind file --path /srv/reportsx/a.csv", "denied by default deny\n", 1},
		{"--kind sqlite --path /srv/reports/a.db", "denied by default deny\n", 1},
	} {
		out, failed, status := run(t, append([]string{"policy", "test", file}, strings.Fields(c.args)...)...)
		if status != c.status || !strings.Contains(out, c.out) {
			t.Errorf("%s: %d %s\n%s", c.args, status, failed, out)
		}
	}
	out, _, status := run(t, "policy", "test", file, "--kind", "postgres", "--host", "10.9.0.1", "--port", "5432", "--json")
	if want := `{"allowed":false,"rule":"no-hr","addresses":[{"address":"10.9.0.1:5432","allowed":false,"rule":"no-hr"}]}` + "\n"; out != want || status != 1 {
		t.Errorf("%d %s", status, out)
	}
	for _, args := range []string{"", "--kind tape --path /x", "--kind file", "--kind file --path x", "--kind http --host x", "--kind http --host x --port 0", "--kind http --port 80",
		"--kind http --host x --port 80 --path /x", "--kind http --host x --port 80 --address y"} {
		if out, failed, status := run(t, append([]string{"policy", "test", file}, strings.Fields(args)...)...); failed == "" || status != 2 || out != "" {
			t.Errorf("%s: %d %q %s", args, status, out, failed)
		}
	}
	for _, args := range [][]string{
		{}, {"--kind", "http"}, {"--kind"}, {file, "--kind"}, {file, "--bogus"}, {"--kind", "file", "--path", "/x"}, {"--kind", "file", file, "--path", "/x"}, {"none.yaml", "--kind", "file", "--path", "/x"},
	} {
		if out, failed, status := run(t, append([]string{"policy", "test"}, args...)...); failed == "" || status != 2 || strings.Contains(out, "denied") {
			t.Errorf("%v: %d %q %s", args, status, out, failed)
		}
	}
}

func TestJournalCommands(t *testing.T) {
	state := t.TempDir()
	j, err := journal.Open(runner.JournalDir(state), 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []journal.Record{
		{Event: journal.EventStart, Dispatch: "d1", Caller: &journal.Caller{Person: "ada"}, Kind: "http", Target: "https://h/\x1b[2J", Query: journal.DescribeQuery("SELECT 1", false)},
		{Event: journal.EventEnd, Dispatch: "d1", Outcome: "completed", Rows: 3, BytesOut: 99, Rules: []string{"web"}},
		{Event: journal.EventStart, Dispatch: "d2"},
	} {
		if err := j.Append(t.Context(), r, true); err != nil {
			t.Fatal(err)
		}
	}
	head := j.Head()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	out, failed, status := run(t, "journal", "verify", "--state-dir", state, "--expect", head.String())
	if status != 0 || out != "whole: 3 records in 1 files, last "+head.String()+"\n" {
		t.Errorf("%d %s\n%s", status, failed, out)
	}
	out, _, _ = run(t, "journal", "list", "--state-dir", state)
	if strings.Count(out, "\n") != 3 || !strings.Contains(out, "by ada  http") || !strings.Contains(out, "completed  3 rows, 99 bytes out  by web") || strings.Contains(out, "\x1b") {
		t.Errorf("%q", out)
	}
	var list []map[string]any
	out, _, _ = run(t, "journal", "list", "--state-dir", state, "--json", "--dispatch", "d1", "--limit", "1")
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list) != 1 || list[0]["seq"] != 2.0 || len(list[0]["hash"].(string)) != 64 {
		t.Errorf("%v: %s", err, out)
	}
	file := filepath.Join(runner.JournalDir(state), "00000000000000000001.jsonl")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, bytes.Replace(text, []byte(`"rows":3`), []byte(`"rows":4`), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{"", "--limit 1", "--dispatch d2"} {
		out, failed, status := run(t, append([]string{"journal", "list", "--state-dir", state}, strings.Fields(args)...)...)
		if status != 1 || !strings.Contains(failed, "BROKEN at 00000000000000000001.jsonl:2: record 2: it was changed") || !strings.Contains(out, "d2") || strings.Contains(out, "completed") {
			t.Errorf("list %s: %d %s\n%s", args, status, failed, out)
		}
	}
	out, failed, status = run(t, "journal", "list", "--state-dir", state, "--json")
	if _, message := object(t, failed); status != 1 || !strings.Contains(message, "BROKEN at") || json.Unmarshal([]byte(out), &list) != nil || len(list) != 2 {
		t.Errorf("%d %s\n%s", status, failed, out)
	}
	out, failed, status = run(t, "journal", "verify", "--dir", runner.JournalDir(state))
	if status != 1 || failed == "" || !strings.Contains(out, "BROKEN at 00000000000000000001.jsonl:2: record 2: it was changed") {
		t.Errorf("%d %s\n%s", status, failed, out)
	}
	var report journal.Report
	out, _, status = run(t, "journal", "verify", "--state-dir", state, "--json")
	if err := json.Unmarshal([]byte(out), &report); err != nil || status != 1 || report.OK || report.Break == nil || report.Break.Line != 2 {
		t.Errorf("%d %v: %s", status, err, out)
	}
	for args, want := range map[string]int{
		"journal verify --dir " + filepath.Join(state, "none"): 1, "journal verify x": 2, "journal verify --expect x --state-dir " + state: 2, "journal verfy": 2,
		"journal list --dir " + filepath.Join(state, "none"): 1, "journal list x": 2, "journal list --after x --state-dir " + state: 2,
	} {
		if _, failed, status := run(t, strings.Fields(args)...); status != want || failed == "" {
			t.Errorf("%s: %d %s", args, status, failed)
		}
	}
}
