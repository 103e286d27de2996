package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// loopbackPolicy lets managed runners of all tenants reach the sources of a test, and nothing else.
func loopbackPolicy(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policy.yaml")
	text := "version: 1\nallow:\n  - name: tests\n    kinds: [http]\n    cidrs: [\"127.0.0.1\"]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// managedPlane starts a control plane with its managed runner on this host.
func managedPlane(t *testing.T, env map[string]string) *stack.Plane {
	t.Helper()
	all := map[string]string{"MANAGED_RUNNER_ENDPOINT": "local", "MANAGED_RUNNER_POLICY": loopbackPolicy(t)}
	maps.Copy(all, env)
	return stack.StartPlane(t, true, all)
}

// console is the managed runner as a tenant sees it.
type console struct {
	ID, Name, DisplayName, Kind, Address, State, Description, Link string
	ComputeUnits                                                   int
	Claims                                                         struct {
		Pid    int
		Policy *struct{ RuleNames []string }
	}
	Health struct {
		Connected, Dispatchable, LimitEnforced bool
		Detail                                 string
		Limit                                  int
		CertNotAfter                           *time.Time
	}
}

func consoleOf(t *testing.T, api *stack.API) console {
	t.Helper()
	var list []console
	api.Must(t, http.MethodGet, "/api/runners", nil, &list)
	if len(list) == 0 || list[0].ID != "console" || list[0].DisplayName != "Runink managed" || list[0].Kind != "managed" || list[0].Link != "local" || list[0].Address != "" ||
		list[0].ComputeUnits != 0 {
		t.Fatalf("the managed runner is not the first of %+v", list)
	}
	return list[0]
}

// awaitConsole asks until it is in this state: the list is a state, not an event.
func awaitConsole(t *testing.T, api *stack.API, state string) console {
	t.Helper()
	give := time.Now().Add(stack.Patience)
	for {
		c := consoleOf(t, api)
		if c.State == state && c.Health.Dispatchable == (state == "RUNNING") {
			return c
		}
		if time.Now().After(give) {
			t.Fatalf("the managed runner is not %s: %+v", state, c)
		}
		<-time.After(20 * time.Millisecond)
	}
}

// awaitEnd asks until a process that is nobody's child here has ended.
func awaitEnd(t *testing.T, what string, pid int) {
	t.Helper()
	give := time.Now().Add(stack.Patience)
	for running(t, pid) {
		if time.Now().After(give) {
			t.Fatalf("%s, process %d, is still there", what, pid)
		}
		<-time.After(20 * time.Millisecond)
	}
}

func running(t *testing.T, pid int) bool {
	t.Helper()
	state, _ := stat(t, pid)
	return state != "" && state != "Z" && state != "X" // ended, and its parent has not asked yet, or is about to
}

// stat is the state and the parent of a process; "" when there is none.
func stat(t *testing.T, pid int) (state string, parent int) {
	t.Helper()
	if pid <= 1 {
		t.Fatalf("%d is no process of a stack", pid)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", 0
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	fields := strings.Fields(rest)
	parent, err = strconv.Atoi(fields[1])
	if err != nil {
		t.Fatal(err)
	}
	return fields[0], parent
}

// newTenant makes a tenant and returns the API as its admin.
func newTenant(t *testing.T, plane *stack.Plane, name string) *stack.API {
	t.Helper()
	operator := &stack.API{URL: plane.HTTP, Token: stack.ReadToken(t, filepath.Join(plane.DataDir, "operator.token"))}
	var made struct {
		Token string `json:"token"`
	}
	operator.Must(t, http.MethodPost, "/api/tenants", map[string]string{"name": name}, &made)
	return &stack.API{URL: plane.HTTP, Token: made.Token}
}

// rowsOn runs one fetch on console, and returns the process that ran it.
func rowsOn(t *testing.T, api *stack.API, src *source) int {
	t.Helper()
	f := api.Fetch(t, src.body("console"))
	end := f.End()
	if end.Outcome != "completed" || end.Rows != rowsBefore+rowsAfter || end.RunnerID != "console" {
		t.Fatalf("a fetch on console ended %+v", end)
	}
	return int(end.RunnerPID)
}

// M1, R2, R7, D8: the managed runner is a child of the control plane, one for each tenant that uses it.
func TestTheManagedRunnerOnThisHost(t *testing.T) {
	t.Parallel()
	plane := managedPlane(t, map[string]string{"AWS_SECRET_ACCESS_KEY": "an-operators-secret", "MANAGED_RUNNER_CONCURRENCY": "3"})
	plane.Stderr.Must(t, `forwards fetches to the dedicated runner at local (never runs them here).`)
	own := awaitConsole(t, plane.Admin, "RUNNING")
	if own.Description != "" || !own.Health.LimitEnforced || own.Health.Limit != 3 || own.Health.CertNotAfter != nil || own.Claims.Policy == nil || !slices.Equal(own.Claims.Policy.RuleNames, []string{"tests"}) {
		t.Errorf("it is %+v", own)
	}
	if _, parent := stat(t, own.Claims.Pid); parent != plane.Process.PID {
		t.Errorf("process %d is the child of %d, not of the control plane, %d", own.Claims.Pid, parent, plane.Process.PID)
	}
	src := newSource(t)
	src.let()
	if pid := rowsOn(t, plane.Admin, src); pid != own.Claims.Pid {
		t.Errorf("process %d ran the fetch", pid)
	}
	var health struct {
		RunnerID, Source        string
		Limit                   int
		MemoryBytes, Goroutines int64
		Unmeasured              []string
	}
	plane.Admin.Must(t, http.MethodGet, "/api/runners/console/health", nil, &health)
	if health.RunnerID != "console" || health.Source != "runner claim" || health.Limit != 3 || health.MemoryBytes < 1<<20 || health.Goroutines < 5 || !slices.Contains(health.Unmeasured, "cpu") {
		t.Errorf("its health is %+v", health)
	}
	// Another tenant has a process of its own, from its first fetch on, and never the other's.
	acme := newTenant(t, plane, "acme")
	if c := consoleOf(t, acme); c.State != "UNKNOWN" || !strings.Contains(c.Description, "liveness was not observed") || c.Claims.Pid != 0 ||
		c.Health.Detail != "starts with its tenant's first fetch" {
		t.Errorf("before its first fetch acme's is %+v", c)
	}
	if status, body := acme.Call(t, http.MethodGet, "/api/runners/console/health", nil); status != http.StatusConflict || !strings.Contains(string(body), "starts with its tenant's first fetch") || strings.Contains(string(body), "start the runner") {
		t.Errorf("its health before its first fetch: %d %s", status, body)
	}
	theirs := newSource(t)
	theirs.let()
	pid := rowsOn(t, acme, theirs)
	if c := awaitConsole(t, acme, "RUNNING"); c.Claims.Pid != pid || pid == own.Claims.Pid {
		t.Errorf("acme's fetch ran in process %d, its runner is %d, the other tenant's %d", pid, c.Claims.Pid, own.Claims.Pid)
	}
	if src.requests() != 1 || theirs.requests() != 1 {
		t.Errorf("the sources were asked %d and %d times", src.requests(), theirs.requests())
	}
	if f := acme.Fetch(t, theirs.body("local/console")); f.Problem.Code != "invalid" || !strings.Contains(f.Problem.Message, "not a runner name") {
		t.Errorf("another tenant's by its whole name: %+v", f.Problem)
	}
	for _, tenant := range []string{"local", "acme"} { // their lines in the one log can be told apart
		plane.Stderr.Must(t, "managed="+tenant)
	}
	// The policy that was handed on is in force.
	elsewhere := plane.Admin.Fetch(t, map[string]any{"runnerId": "console", "source": map[string]any{"kind": "http", "settings": map[string]string{"url": "http://127.0.0.2:9/", "format": "jsonl"}}}).End()
	if elsewhere.Code != "egress_denied" {
		t.Errorf("beyond its policy: %+v", elsewhere)
	}
	for _, pid := range []int{own.Claims.Pid, pid} {
		wantBareProcess(t, pid)
	}
	journals, err := filepath.Glob(filepath.Join(plane.DataDir, "managed", "*", "journal"))
	if err != nil || len(journals) != 2 {
		t.Errorf("the journals are %q (%v)", journals, err)
	}
	// It is the platform's own: nobody changes it, and a session of a person is not asked for one.
	for _, call := range [][2]string{{"POST", "/revoke"}, {"POST", "/connect"}, {"POST", "/token"}, {"PATCH", ""}, {"DELETE", ""}} {
		var body any
		if call[0] == "PATCH" {
			body = map[string]string{"address": "127.0.0.1:1"}
		}
		if status, b := plane.Admin.Call(t, call[0], "/api/runners/console"+call[1], body); status != http.StatusForbidden {
			t.Errorf("%s %s: %d %s", call[0], call[1], status, b)
		}
	}
	plane.Stop(t)
	for _, pid := range []int{own.Claims.Pid, pid} {
		if running(t, pid) {
			t.Errorf("process %d is there after the control plane", pid)
		}
	}
}

// wantBareProcess looks at what the kernel shows of a managed runner: nothing of the control plane's, and no credential.
func wantBareProcess(t *testing.T, pid int) {
	t.Helper()
	for _, file := range []string{"cmdline", "environ"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
		if file == "environ" && errors.Is(err, os.ErrPermission) && os.Getuid() != 0 {
			continue // its own user can't read it: better still, and what is in it the tests of cp/managed see
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, secret := range []string{"rsk1.", "rst1.", "crt1.", "rlt1.", "SU", "an-operators-secret"} {
			if strings.Contains(string(b), secret) {
				t.Errorf("its %s has %q", file, secret)
			}
		}
		if file == "cmdline" {
			continue
		}
		allowed := []string{
			"CORE_RUNNER_STATE_DIR", "GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT", "GORACE", "LOG_FORMAT", "LOG_LEVEL", "RUNNER_CONCURRENCY", "RUNNER_DRAIN_GRACE",
			"RUNNER_LIFELINE", "RUNNER_POLICY", "SERVICE_ROLE", "SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "TZ",
		}
		for entry := range strings.SplitSeq(strings.TrimRight(string(b), "\x00"), "\x00") {
			if name, _, _ := strings.Cut(entry, "="); !slices.Contains(allowed, name) {
				t.Errorf("its environment has %s", name)
			}
		}
	}
}

// D11, D13: a managed runner that is killed is away, what it ran is lost, and it comes back.
func TestTheManagedRunnerIsKilled(t *testing.T) {
	t.Parallel()
	bin, err := stack.Build(true)
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "core-runner")
	if err := os.Symlink(bin.CoreRunner, program); err != nil {
		t.Fatal(err)
	}
	plane := managedPlane(t, map[string]string{"MANAGED_RUNNER_BINARY": program, "RUNNER_GRACE": "1h"}) // no loss by the end of the grace
	first := awaitConsole(t, plane.Admin, "RUNNING").Claims.Pid
	src := newSource(t)
	f := plane.Admin.Fetch(t, src.body("console"))
	f.Await("accepted")
	await(t, "the request", src.opened)
	if err := os.Rename(program, program+".away"); err != nil { // so that it can't come back at once
		t.Fatal(err)
	}
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if c := awaitConsole(t, plane.Admin, "UNKNOWN"); !strings.Contains(c.Description, "liveness was not observed") {
		t.Errorf("it is %+v", c)
	}
	refused := plane.Admin.Fetch(t, src.body("console"))
	if refused.Problem.Code != "runner_offline" || refused.Status != http.StatusConflict || strings.Contains(refused.Problem.Message, "core-runner") ||
		!strings.HasPrefix(refused.Problem.Message, "Analysis failed: dedicated runner unreachable — fetch does not run on the control plane: the managed runner ") {
		t.Errorf("a fetch meanwhile: %d %+v", refused.Status, refused.Problem)
	}
	if end := f.End(); end.Outcome != "runner_lost" {
		t.Errorf("what it ran ended %+v", end)
	}
	if err := os.Rename(program+".away", program); err != nil {
		t.Fatal(err)
	}
	second := awaitConsole(t, plane.Admin, "RUNNING").Claims.Pid
	src.let()
	if pid := rowsOn(t, plane.Admin, src); pid != second || pid == first {
		t.Errorf("the fetch after ran in process %d; the first was %d, the second is %d", pid, first, second)
	}
	// What is killed again comes back for the fetch that waits for it.
	if err := syscall.Kill(second, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for give := time.Now().Add(stack.Patience); ; <-time.After(5 * time.Millisecond) { // a state, and perhaps a short one
		if c := consoleOf(t, plane.Admin); c.State != "RUNNING" || c.Claims.Pid != second {
			break
		}
		if time.Now().After(give) {
			t.Fatal("a dead process is shown as the managed runner")
		}
	}
	if pid := rowsOn(t, plane.Admin, src); pid == second {
		t.Error("a dead process ran it")
	}
	plane.Stop(t)
}

// D16: what runs on the managed runner goes on over another link of the same process when its link is cut.
func TestTheLinkOfTheManagedRunnerIsCut(t *testing.T) {
	t.Parallel()
	plane := managedPlane(t, nil)
	before := awaitConsole(t, plane.Admin, "RUNNING").Claims.Pid
	src := newSource(t)
	f := plane.Admin.Fetch(t, src.body("console"))
	f.Await("accepted")
	await(t, "the request", src.opened)
	sys := asUser(t, plane, "sys")
	ask := func(call, query string, into any) {
		t.Helper()
		msg, err := sys.Request("$SYS.REQ.SERVER."+sys.ConnectedServerId()+"."+call, []byte(query), stack.Patience)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(msg.Data, into); err != nil {
			t.Fatalf("%s: %v in %s", call, err, msg.Data)
		}
	}
	var found struct {
		Data struct {
			Connections []struct {
				CID  int
				User string `json:"authorized_user"`
				Type string
				IP   string
			}
		}
	}
	ask("CONNZ", `{"acc":"RUN","auth":true}`, &found)
	cut := 0
	for _, c := range found.Data.Connections {
		if c.User == "local/console" {
			if c.IP != "" && c.IP != "pipe" {
				t.Errorf("its link comes from %s", c.IP)
			}
			var answer struct{ Error any }
			ask("KICK", fmt.Sprintf(`{"cid":%d}`, c.CID), &answer)
			if answer.Error != nil {
				t.Fatal(answer.Error)
			}
			cut++
		}
	}
	if cut != 1 {
		t.Fatalf("it has %d links: %+v", cut, found)
	}
	plane.Stderr.Must(t, "the link of the managed runner has ended")
	src.let()
	if end := f.End(); end.Outcome != "completed" || end.Rows != rowsBefore+rowsAfter || int(end.RunnerPID) != before {
		t.Errorf("the fetch over the cut ended %+v", end)
	}
	if c := awaitConsole(t, plane.Admin, "RUNNING"); c.Claims.Pid != before || src.requests() != 0 {
		t.Errorf("after the cut it is process %d, was %d; the source was asked again: %v", c.Claims.Pid, before, src.requests())
	}
	plane.Stop(t)
}

// The managed runner ends with its control plane, however that ends, and comes back with it.
func TestTheManagedRunnerEndsWithItsControlPlane(t *testing.T) {
	t.Parallel()
	plane := managedPlane(t, nil)
	acme := newTenant(t, plane, "acme")
	src := newSource(t)
	held := acme.Fetch(t, src.body("console"))
	other := int(held.Await("accepted").RunnerPID)
	await(t, "the request", src.opened)
	own := awaitConsole(t, plane.Admin, "RUNNING").Claims.Pid
	plane.Signal(t, syscall.SIGKILL)
	plane.Exit(t)
	awaitEnd(t, "the managed runner", own)
	awaitEnd(t, "that of another tenant, which was at work", other)
	await(t, "the end of its request", src.gone)

	again := managedPlane(t, map[string]string{"RUNBUS_DATA_DIR": plane.DataDir})
	next := awaitConsole(t, again.Admin, "RUNNING").Claims.Pid
	src.let()
	if pid := rowsOn(t, again.Admin, src); pid != next || pid == own {
		t.Errorf("process %d ran the fetch", pid)
	}
	// What runs when the control plane is told to stop may end.
	late := newSource(t)
	f := again.Admin.Fetch(t, late.body("console"))
	f.Await("accepted")
	await(t, "the request", late.opened)
	again.Signal(t, syscall.SIGTERM)
	again.Stderr.Must(t, "control plane stops")
	late.let()
	if end := f.End(); end.Outcome != "completed" {
		t.Errorf("a fetch over the stop ended %+v", end)
	}
	if code := again.Exit(t); code != 0 {
		t.Errorf("the control plane ended with status %d", code)
	}
	if running(t, next) {
		t.Error("the managed runner is there after the control plane")
	}
}

// Without a policy of the operator's, the managed runner of another tenant reaches nothing of this host.
func TestTheManagedRunnerOfAnotherTenantReachesNothingHere(t *testing.T) {
	t.Parallel()
	plane := managedPlane(t, map[string]string{"MANAGED_RUNNER_POLICY": "", "MANAGED_RUNNER_FILE_ROOTS": t.TempDir()})
	src := newSource(t)
	src.let()
	rowsOn(t, plane.Admin, src) // the operator's own does
	acme := newTenant(t, plane, "acme")
	for name, settings := range map[string]map[string]string{
		"this source":          {"url": src.URL, "format": "jsonl"},
		"the API":              {"url": plane.HTTP + "/metrics", "format": "jsonl"},
		"a name of this host":  {"url": strings.Replace(src.URL, "127.0.0.1", "localhost", 1), "format": "jsonl"},
		"a private network":    {"url": "http://10.1.2.3/", "format": "jsonl"},
		"in the form of IPv6":  {"url": "http://[::ffff:127.0.0.1]:80/", "format": "jsonl"},
		"no address of a host": {"url": "http://0.0.0.0:80/", "format": "jsonl"},
	} {
		if end := acme.Fetch(t, map[string]any{"runnerId": "console", "source": map[string]any{"kind": "http", "settings": settings}}).End(); end.Code != "egress_denied" {
			t.Errorf("%s: %+v", name, end)
		}
	}
	if end := acme.Fetch(t, map[string]any{"runnerId": "console", "source": map[string]any{"kind": "file", "settings": map[string]string{"path": filepath.Join(plane.DataDir, "operator.token")}}}).End(); end.Code != "egress_denied" {
		t.Errorf("a file: %+v", end)
	}
	// The hints name what the operator of the control plane can set.
	outside := map[string]any{"runnerId": "console", "source": map[string]any{"kind": "file", "settings": map[string]string{"path": filepath.Join(plane.DataDir, "operator.token"), "format": "csv"}}}
	if end := acme.Fetch(t, outside).End(); !strings.Contains(end.Hint, "MANAGED_RUNNER_POLICY") || !strings.Contains(end.Hint, "built-in rules") {
		t.Errorf("a refusal by policy: %+v", end)
	}
	if end := plane.Admin.Fetch(t, outside).End(); end.Code != "forbidden" || !strings.Contains(end.Hint, "MANAGED_RUNNER_FILE_ROOTS") || !strings.Contains(end.Hint, "--files") {
		t.Errorf("a file outside the roots: %+v", end)
	}
	if src.requests() != 1 {
		t.Errorf("the source was asked %d times", src.requests())
	}
	plane.Stop(t)
}

// A setting that is wrong ends face at its start, with its name and the status for that; so does a managed runner that can't be started.
func TestASettingThatIsWrong(t *testing.T) {
	t.Parallel()
	bin, err := stack.Build(true)
	if err != nil {
		t.Fatal(err)
	}
	wrong := filepath.Join(t.TempDir(), "wrong.yaml")
	if err := os.WriteFile(wrong, []byte("version: 2\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		env  map[string]string
		want string
	}{
		"no program": {map[string]string{"MANAGED_RUNNER_BINARY": filepath.Join(t.TempDir(), "core-runner")}, "MANAGED_RUNNER_BINARY"},
		"no policy":  {map[string]string{"MANAGED_RUNNER_POLICY": filepath.Join(t.TempDir(), "p.yaml")}, "MANAGED_RUNNER_POLICY"},
		"no number":  {map[string]string{"MANAGED_RUNNER_MAX": "many"}, "MANAGED_RUNNER_MAX"},
		"bad policy": {map[string]string{"MANAGED_RUNNER_POLICY": wrong}, "MANAGED_RUNNER_POLICY: "},
		"no folder":  {map[string]string{"MANAGED_RUNNER_FILE_ROOTS": wrong + ".none"}, "MANAGED_RUNNER_FILE_ROOTS: "},
		"a file":     {map[string]string{"MANAGED_RUNNER_FILE_ROOTS": wrong}, "MANAGED_RUNNER_FILE_ROOTS: "},
		"no place":   {map[string]string{"MANAGED_RUNNER_ENDPOINT": "lcal"}, "MANAGED_RUNNER_ENDPOINT is \"lcal\""},
		"no time":    {map[string]string{"CORE_RUNNER_LEAF_LIFE": "1d"}, "CORE_RUNNER_LEAF_LIFE is \"1d\""},
		"a moment":   {map[string]string{"CORE_RUNNER_LEAF_LIFE": "1s"}, "CORE_RUNNER_LEAF_LIFE is 1s"},
		"in clear":   {map[string]string{"RUNBUS_HTTP": "0.0.0.0:0"}, "RUNBUS_HTTP_TLS"},
		"no tracing": {map[string]string{"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is"},
		"no role":    {map[string]string{"SERVICE_ROLE": "foo"}, "SERVICE_ROLE is"},
	} {
		env := map[string]string{"RUNBUS_DATA_DIR": filepath.Join(t.TempDir(), "data"), "RUNBUS_HTTP": "127.0.0.1:0", "RUNBUS_NATS": "127.0.0.1:0", "MANAGED_RUNNER_ENDPOINT": "local"}
		maps.Copy(env, c.env)
		p := stack.Start(t, "face", bin.Face, env)
		if code := p.Exit(t); code != 2 || !p.Stderr.Has(c.want) {
			t.Errorf("%s: status %d, %s", name, code, p.Stderr)
		}
	}
	// A runner that nobody started as a child.
	for fd, want := range map[string]string{"9": "RUNNER_LIFELINE", "x": "RUNNER_LIFELINE is", "0": "RUNNER_LIFELINE is"} {
		p := stack.Start(t, "core-runner", bin.CoreRunner, map[string]string{"RUNNER_LIFELINE": fd, "CORE_RUNNER_STATE_DIR": t.TempDir()}, "serve")
		if code := p.Exit(t); code != 2 || !p.Stderr.Has(want) {
			t.Errorf("RUNNER_LIFELINE=%s: status %d, %s", fd, code, p.Stderr)
		}
	}
}
