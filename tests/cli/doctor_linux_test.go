package cli

import (
	"crypto/rand"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// The doctor prints a line per check, what to do below a bad one, and what it could not look at in one line; JSON has each.
func TestDoctorsReport(t *testing.T) {
	bin := binaries(t)
	env := map[string]string{
		"RUNNER_ENROLL_ADDR": "127.0.0.1:1", "RUNNER_ENROLL_TOKEN": "rsk1.acme.SUhunter2", "RUNNER_ID": "edge", "CORE_RUNNER_STATE_DIR": t.TempDir(),
		"HTTPS_PROXY": "http://me:hunter2@proxy.test",
	}
	r := run(t, bin.CoreRunner, env, "doctor")
	for _, line := range []string{
		"ok    configuration 1 address(es), runner id \"edge\" (RUNNER_ID)\n",
		"fail  tcp           127.0.0.1:1  dial tcp 127.0.0.1:1: connect: connection refused\n                    → nothing listens there",
		"skip  -             127.0.0.1:1  proxy, tls not looked at: no connection\n",
		"fail  token         127.0.0.1:1  the seed in the service-account token is damaged\n",
		"skip  -             127.0.0.1:1  clock, permissions, payload, rtt not looked at: no connection\n",
		"ok    policy        ",
	} {
		if !strings.Contains(r.stdout, line) {
			t.Errorf("no %q in\n%s", line, r.stdout)
		}
	}
	if r.status != 1 || strings.TrimSpace(r.stderr) != "2 of 14 checks failed" || strings.ContainsAny(r.stdout, "\x1b\r") {
		t.Errorf("status %d, %q", r.status, r.stderr)
	}
	j := run(t, bin.CoreRunner, env, "doctor", "--json")
	var d struct {
		Verdict string
		Checks  []struct{ Name, Address, Verdict, Saw, Todo string }
	}
	if err := json.Unmarshal([]byte(j.stdout), &d); err != nil || j.status != 1 || d.Verdict != "fail" || len(d.Checks) != 14 {
		t.Errorf("status %d, %v: %s", j.status, err, j.stdout)
	}
	if strings.Contains(r.stdout+r.stderr+j.stdout+j.stderr, "hunter2") {
		t.Error("a secret is shown")
	}
	bad := run(t, bin.CoreRunner, map[string]string{"RUNNER_ENROLL_ADDR": "127.0.0.1:1", "RUNNER_CONCURRENCY": "four"}, "doctor")
	if bad.status != 1 || !strings.Contains(bad.stdout, "fail  configuration RUNNER_CONCURRENCY") {
		t.Errorf("status %d, %q", bad.status, bad.stdout)
	}
	for _, args := range [][]string{{"x"}, {"--timeout", "0s"}, {"--timeout", "soon"}, {"--loud"}, {"rsk1.acme.SUhunter2"}} {
		if u := run(t, bin.CoreRunner, env, append([]string{"doctor"}, args...)...); u.status != 2 || u.stdout != "" || strings.Contains(u.stderr, "hunter2") {
			t.Errorf("%v: status %d, %q, %q", args, u.status, u.stdout, u.stderr)
		}
	}
}

// Of a runner that is dialled the ticket is looked at, as a start does and in its words, and this host; the ticket is not shown.
func TestDoctorLooksAtATicket(t *testing.T) {
	bin := binaries(t)
	file := filepath.Join(t.TempDir(), "ticket")
	ticket := schemas.Ticket{RunnerID: schemas.NewRunnerID(), Name: "edge", ExpiresAt: time.Now().Add(-time.Minute).UTC().Truncate(time.Second)}
	_, _ = rand.Read(ticket.Token[:])
	_, _ = rand.Read(ticket.CASHA256[:])
	late := ticket.Encode()
	if err := os.WriteFile(file, []byte(late), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(file, 0o644); err != nil { // whatever the umask is
		t.Fatal(err)
	}
	for what, env := range map[string]map[string]string{
		"none":                {},
		"no ticket":           {"CORE_RUNNER_TICKET": late[:60]},
		"expired":             {"CORE_RUNNER_TICKET": late},
		"both":                {"CORE_RUNNER_TICKET": late, "CORE_RUNNER_TICKET_FILE": file},
		"others can read it":  {"CORE_RUNNER_TICKET_FILE": file},
		"the file is missing": {"CORE_RUNNER_TICKET_FILE": file + "s"},
	} {
		env["CORE_RUNNER_STATE_DIR"] = filepath.Join(t.TempDir(), "state")
		r, start := run(t, bin.CoreRunner, env, "doctor"), run(t, bin.CoreRunner, env, "serve")
		clock := regexp.MustCompile(`the clock here says \S+`) // when each is asked
		r.stdout, start.stderr = clock.ReplaceAllString(r.stdout, "the clock"), clock.ReplaceAllString(start.stderr, "the clock")
		_, hint, _ := strings.Cut(strings.TrimSpace(start.stderr), "\n  → ")
		_, found, _ := strings.Cut(r.stdout, "fail  ticket        ")
		said, todo, _ := strings.Cut(found, "\n                    → ")
		todo, rest, _ := strings.Cut(todo, "\n")
		if said == "" || !strings.Contains(start.stderr, said) || todo == "" || todo != hint || !strings.Contains(rest, "ok    files") {
			t.Errorf("%s: serve says\n%s\nand the doctor\n%s", what, start.stderr, r.stdout)
		}
		if r.status != 1 || start.status != 2 || strings.TrimSpace(r.stderr) != "1 of 6 checks failed" {
			t.Errorf("%s: status %d (%q), and of serve %d", what, r.status, r.stderr, start.status)
		}
		if all := r.stdout + r.stderr + start.stderr; strings.Contains(all, late[8:24]) {
			t.Errorf("%s: the ticket is shown", what)
		}
	}
}

// On a terminal the check that is being made is shown, and Ctrl-C ends it.
func TestDoctorOnATerminal(t *testing.T) {
	bin := binaries(t)
	env := map[string]string{"RUNNER_ENROLL_ADDR": "127.0.0.1:1", "RUNNER_ID": "edge", "CORE_RUNNER_STATE_DIR": t.TempDir()}
	p := onTerminal(t, env, bin.CoreRunner, "doctor")
	if status := p.exit(t); status != 1 || !strings.Contains(p.seen.String(), "…     tcp           127.0.0.1:1\r\x1b[Kfail  tcp ") {
		t.Errorf("status %d, %q", status, p.seen.String())
	}
	env["RUNNER_ENROLL_ADDR"] = mute(t)
	p = onTerminal(t, env, bin.CoreRunner, "doctor", "--timeout", "10m")
	p.await(t, "…     tls ")
	if _, err := p.keyboard.WriteString("\x03"); err != nil {
		t.Fatal(err)
	}
	if status := p.exit(t); status != 1 || !strings.Contains(p.seen.String(), "interrupted") {
		t.Errorf("status %d, %q", status, p.seen.String())
	}
}

// mute takes connections and says nothing: its kernel does.
func mute(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String()
}
