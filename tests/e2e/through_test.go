package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/runner/tunnel/tunneltest"
	"github.com/org-runink/runbus/tests/stack"
)

// doctor runs `core-runner doctor --json` with a runner's environment.
func doctor(t *testing.T, plane *stack.Plane, env map[string]string, status int) runner.Diagnosis {
	t.Helper()
	p := stack.Start(t, "doctor", plane.Bin.CoreRunner, env, "doctor", "--json")
	if got := p.Exit(t); got != status {
		t.Fatalf("exit status %d, want %d: %s%s", got, status, p.Stdout, p.Stderr)
	}
	var d runner.Diagnosis
	if err := json.Unmarshal([]byte(p.Stdout.String()), &d); err != nil {
		t.Fatalf("%v: %s", err, p.Stdout)
	}
	if token := env["RUNNER_ENROLL_TOKEN"]; token != "" && p.Stdout.Has(token) {
		t.Error("the token is shown")
	}
	return d
}

// well reports whether d found nothing, but for a machine that may be too busy to answer pings at once.
func well(d runner.Diagnosis) bool {
	want := runner.CheckOK
	for _, c := range d.Checks {
		switch {
		case c.Name == "rtt" && c.Verdict == runner.CheckWarn:
			want = runner.CheckWarn
		case c.Verdict == runner.CheckWarn || c.Verdict == runner.CheckFail:
			return false
		}
	}
	return d.Verdict == want
}

// finds checks that d has one failed check, of this name, and that it says text.
func finds(t *testing.T, d runner.Diagnosis, name, text string) {
	t.Helper()
	for _, c := range d.Checks {
		if c.Verdict == runner.CheckFail && (c.Name != name || !strings.Contains(c.Saw+"\n"+c.Todo, text)) {
			t.Errorf("%+v, want %s: %q", c, name, text)
		}
	}
	if d.Verdict != runner.CheckFail {
		t.Errorf("nothing failed: %+v", d)
	}
}

// A doctor beside a runner that works finds nothing and takes nothing from it; what is wrong with a credential or an id it says in
// the control plane's own words.
func TestDoctorBesideALiveRunner(t *testing.T) {
	t.Parallel()
	plane := stack.StartPlane(t, true, nil)
	src := newSource(t)
	id, token := plane.Admin.MintKey(t, "edge")
	r := plane.StartRunner(t, "edge", map[string]string{"RUNNER_ENROLL_TOKEN": token})
	f := plane.Admin.Fetch(t, src.body("edge"))
	await(t, "the request", src.opened)

	env := plane.RunnerEnv("edge", token)
	if d := doctor(t, plane, env, 0); !well(d) {
		t.Errorf("%+v", d)
	}
	env["RUNNER_ENROLL_ADDR"] = plane.WebSocket
	if d := doctor(t, plane, env, 0); !well(d) {
		t.Errorf("over WebSocket: %+v", d)
	}
	src.let()
	if end := f.End(); end.Type != "result" {
		t.Errorf("the fetch that ran meanwhile ends with %+v", end)
	}
	if r.Stderr.Has("REPLACED") || r.Stderr.Has("is down") {
		t.Errorf("the runner noticed: %s", r.Stderr)
	}

	finds(t, doctor(t, plane, plane.RunnerEnv("edge", plane.Admin.Token), 1), "token", "a user session token cannot enrol a runner")
	_, other := plane.Admin.MintKey(t, "other")
	finds(t, doctor(t, plane, plane.RunnerEnv("edge", other), 1), "token", "is bound to another service-account key")
	if d := doctor(t, plane, plane.RunnerEnv("edge-2", other), 0); d.Verdict == runner.CheckFail {
		t.Errorf("%+v", d)
	}
	if _, known := plane.Admin.Runners(t)["edge-2"]; known {
		t.Error("the doctor enrolled")
	}
	plane.Admin.Must(t, http.MethodDelete, "/api/service-account-keys/"+id, nil, nil)
	if status := r.Exit(t); status != 11 {
		t.Errorf("the runner ends with %d", status)
	}
	finds(t, doctor(t, plane, plane.RunnerEnv("edge", token), 1), "token", `the service-account key "sa-edge" was revoked`)
}

// A host whose only way out is a proxy with a login that lets nothing but one name on 443 through. The source is dialled directly.
func TestARunnerBehindAProxy(t *testing.T) {
	t.Parallel()
	const name = "control-plane.test"
	plane := stack.StartPlane(t, true, map[string]string{"RUNBUS_HOSTS": name})
	proxy := tunneltest.Start(t, &tunneltest.Proxy{
		Knows: map[string]string{name + ":443": strings.TrimPrefix(plane.WebSocket, "wss://")}, User: "me", Password: "hunter2",
	}, nil)
	way := "http://me:hunter2@" + proxy.Addr()
	through := map[string]string{"RUNNER_ENROLL_ADDR": "wss://" + name, "HTTPS_PROXY": way, "HTTP_PROXY": way}
	r := plane.StartRunner(t, "edge", through)
	src := newSource(t)
	src.let()
	f := plane.Admin.Fetch(t, src.body("edge"))
	if end := f.End(); end.Type != "result" {
		t.Errorf("a fetch ends with %+v", end)
	}
	for _, url := range []string{"http://source.test/", "https://source.test/"} {
		body := map[string]any{"runnerId": "edge", "source": map[string]any{"kind": "http", "settings": map[string]string{"url": url, "format": "jsonl"}}}
		if end := plane.Admin.Fetch(t, body).End(); end.Type != "error" {
			t.Errorf("a name that nobody knows gives %+v", end)
		}
	}
	for _, asked := range proxy.Asked() {
		if asked != name+":443" {
			t.Errorf("the proxy was asked for %s", asked)
		}
	}
	if env, err := os.ReadFile("/proc/" + strconv.Itoa(r.PID) + "/environ"); err != nil || strings.Contains(string(env), "hunter2") {
		t.Errorf("the proxy's password can be read off the process: %v", err)
	}
	r.Stop(t)
	if r.Stderr.Has("hunter2") {
		t.Error("the proxy's password is in the log")
	}

	_, token := plane.Admin.MintKey(t, "patient")
	env := plane.RunnerEnv("patient", token)
	for k, v := range through {
		env[k] = v
	}
	if d := doctor(t, plane, env, 0); d.Verdict == runner.CheckFail {
		t.Errorf("%+v", d)
	}
	env["HTTPS_PROXY"] = "http://me:wrong@" + proxy.Addr()
	finds(t, doctor(t, plane, env, 1), "proxy", "407")
}
