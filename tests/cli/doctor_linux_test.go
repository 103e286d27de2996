package cli

import (
	"encoding/json"
	"net"
	"strings"
	"testing"
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
