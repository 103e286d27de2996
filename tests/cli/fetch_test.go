package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow/ipc"

	"github.com/org-runink/runbus/tests/stack"
)

// One data set in every format, to standard output and to a file; hostile cells steer no terminal; more rows than a table shows.
func TestFormats(t *testing.T) {
	u := startUp(t, t.TempDir(), filepath.Join(t.TempDir(), "data"))
	defer u.Stop(t)
	const many = 3000
	csv := "n,te\x1b[31mxt\n" + strings.Repeat("1,\"a\x1b]0;x\x07\u009bb\"\n", many)
	file := filepath.Join(u.DataDir, "data", "hostile.csv")
	if err := os.WriteFile(file, []byte(csv), 0o600); err != nil {
		t.Fatal(err)
	}
	fetch := func(args ...string) result {
		t.Helper()
		r := u.runink(t, append([]string{"fetch", "run", "--runner", "local", "--source", "file", "--set", "path=" + file}, args...)...)
		if r.status != 0 {
			t.Fatalf("%q: %+v", args, r)
		}
		return r
	}
	if r := fetch(); strings.ContainsAny(r.stdout, "\x1b\x07\u009b") || !strings.HasSuffix(r.stdout, "… and 2000 more rows") {
		t.Errorf("table: %.300q", r.stdout)
	}
	var rows []map[string]any
	r := fetch("--format", "json")
	if err := json.Unmarshal([]byte(r.stdout), &rows); err != nil || len(rows) != many || strings.ContainsAny(r.stdout, "\x1b\x07\u009b") {
		t.Errorf("json: %d rows, %v", len(rows), err)
	} else if rows[0]["te\x1b[31mxt"] != "a\x1b]0;x\x07\u009bb" {
		t.Errorf("json: %q", rows[0])
	}
	if r := fetch("--format", "csv"); strings.Count(r.stdout, "\n") != many {
		t.Errorf("csv: %d lines", strings.Count(r.stdout, "\n"))
	}
	if r := fetch("--early-id", "--format", "csv"); strings.Count(r.stdout, "\n") != many {
		t.Errorf("csv with an early id: %d lines", strings.Count(r.stdout, "\n"))
	}
	if r := fetch("--max-rows", "2", "--format", "csv"); !strings.Contains(r.stderr, "cut at 2 rows") {
		t.Errorf("no notice: %s", r.stderr)
	}
	out := filepath.Join(t.TempDir(), "out.arrow")
	r = fetch("--early-id", "--format", "arrow", "--out", out, "--json")
	var report struct{ Outcome, Out string }
	if err := json.Unmarshal([]byte(r.stdout), &report); err != nil || report.Outcome != "completed" || report.Out != out {
		t.Errorf("%s: %v", r.stdout, err)
	}
	f, err := os.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	reader, err := ipc.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Release()
	n := int64(0)
	for reader.Next() {
		n += reader.RecordBatch().NumRows()
	}
	if reader.Err() != nil || n != many {
		t.Errorf("arrow: %d rows, %v", n, reader.Err())
	}
}

// What ends a fetch is told by its status; secrets come by standard input, and show nowhere.
func TestOutcomes(t *testing.T) {
	u := startUp(t, t.TempDir(), filepath.Join(t.TempDir(), "data"))
	defer u.Stop(t)
	url, opened, gone := held(t)
	for _, c := range []struct {
		args   []string
		status int
		code   string
	}{
		{[]string{"--source", "file", "--set", "path=/x"}, 3, "no_runner"},
		{[]string{"--runner", "nope", "--source", "file", "--set", "path=/x"}, 3, "runner_unknown"},
		{[]string{"--runner", "local", "--source", "file", "--set", "path=/etc/hostname", "--set", "format=csv"}, 1, "forbidden"},
		{[]string{"--runner", "local", "--source", "file", "--set", "path=/x.csv", "--format", "csv", "--out", filepath.Join(t.TempDir(), "x")}, 1, "forbidden"},
		{[]string{"--runner", "local", "--source", "http", "--set", "url=" + url, "--set", "format=jsonl", "--timeout"}, 1, "deadline"},
	} {
		args := append([]string{"fetch", "run", "--json"}, c.args...)
		var r result
		if c.code != "deadline" {
			r = u.runink(t, args...)
		} else { // which shows nothing when it came before the source was opened
			for limit := 5 * time.Second; len(opened) == 0 && limit < stack.Patience; limit *= 2 {
				r = u.runink(t, append(args, limit.String())...)
			}
		}
		if code, _, _ := r.failure(t); r.status != c.status || code != c.code || r.stdout != "" {
			t.Errorf("%q: %+v", c.args, r)
		}
		id := r.dispatch(t)
		if trace := u.runink(t, "fetch", "trace", id); trace.status != 0 || !strings.Contains(trace.stdout, "dispatch "+id+": ") {
			t.Errorf("%q: its trace: %+v", c.args, trace)
		}
	}
	await(t, "the source's client to go at the deadline", gone)

	// A runner that is not there has no empty list; one that is there may.
	for _, c := range []struct {
		args   string
		status int
		code   string
	}{
		{"fetch list --json --runner nobody", 3, "not_found"},
		{"fetch list --json --outcome bogus", 2, "usage"},
		{"runner remove --json local", 3, "conflict"},
	} {
		r := u.runink(t, strings.Fields(c.args)...)
		if code, _, _ := r.failure(t); r.status != c.status || code != c.code || r.stdout != "" {
			t.Errorf("%s: %+v", c.args, r)
		}
	}
	for _, args := range []string{"--runner local", "--runner console", "--runner local --outcome completed"} {
		if r := u.runink(t, append([]string{"fetch", "list", "--json"}, strings.Fields(args)...)...); r.status != 0 || !strings.HasPrefix(r.stdout, "[") {
			t.Errorf("%s: %+v", args, r)
		}
	}

	const secret = "hunter2-hunter2"
	args := []string{"fetch", "run", "--runner", "local", "--source", "postgres", "--set", "host=127.0.0.1", "--set", "port=1", "--set", "database=d", "--set", "username=u",
		"--query", "SELECT 1", "--secrets-file", "-"}
	var p *stack.Process
	var status int
	stack.Again(t, u.Stderr, func() (int, string) {
		p = stack.StartWith(t, "fetch with a secret", u.bin.Runink, u.env, strings.NewReader("password="+secret+"\n"), args...)
		status = p.Exit(t)
		return status, p.Stdout.String() + p.Stderr.String()
	})
	if status != 1 || strings.Contains(p.Stderr.String(), secret) || strings.Contains(u.Stderr.String(), secret) {
		t.Errorf("status %d, %s", status, p.Stderr)
	}
}
