package stack

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Endpoints is the line that a control plane writes when it is ready.
type Endpoints struct {
	Ready      bool   `json:"ready"`
	HTTP       string `json:"http"`
	NATS       string `json:"nats"`
	WebSocket  string `json:"webSocket"`
	CA         string `json:"ca"`
	AdminToken string `json:"adminTokenFile"`
	OpsSeed    string `json:"opsSeedFile"`
	OpsSysSeed string `json:"opsSysSeedFile"`
	DataDir    string `json:"dataDir"`
	PID        int    `json:"pid"`
}

// Plane is a running control plane of its own data folder.
type Plane struct {
	*Process
	Endpoints
	Bin Binaries
	Env map[string]string
	// Admin is the API as the local tenant's admin.
	Admin *API
}

// StartPlane starts face as a control plane on free loopback ports, with a fresh data folder unless env names one, and waits
// until it is ready. race chooses the build.
func StartPlane(t testing.TB, race bool, env map[string]string) *Plane {
	t.Helper()
	bin, err := Build(race)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{
		"SERVICE_ROLE": "control-plane", "RUNBUS_DATA_DIR": filepath.Join(t.TempDir(), "data"), "RUNBUS_HTTP": "127.0.0.1:0",
		"RUNBUS_NATS": "127.0.0.1:0", "RUNBUS_WEBSOCKET": "127.0.0.1:0",
	}
	maps.Copy(all, env)
	p := &Plane{Process: Start(t, "control plane", bin.Face, all), Bin: bin, Env: all}
	ReadyLine(t, p.Process, &p.Endpoints)
	p.learnFiles()
	p.Admin = &API{URL: p.HTTP, Token: ReadToken(t, p.AdminToken)}
	t.Cleanup(func() { p.Sweep(t) })
	return p
}

// ReadyLine waits for the line that a process announces itself with.
func ReadyLine(t testing.TB, p *Process, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(p.Stdout.Must(t, `"ready":true`)), into); err != nil {
		t.Fatal(err)
	}
}

// ReadToken reads a token's file, which must be open to its owner alone.
func ReadToken(t testing.TB, file string) string {
	t.Helper()
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("%s has mode %04o", filepath.Base(file), info.Mode().Perm())
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// Runner is a running core-runner.
type Runner struct {
	*Process
	ID string
}

// RunnerEnv is the environment of a runner with this id and token.
func (p *Plane) RunnerEnv(id, token string) map[string]string {
	return map[string]string{
		"RUNNER_ENROLL_ADDR": strings.TrimPrefix(p.NATS, "tls://"), "RUNNER_ENROLL_CA": p.CA, "RUNNER_ENROLL_TOKEN": token, "RUNNER_ID": id,
		"CORE_RUNNER_STATE_DIR": filepath.Join(filepath.Dir(p.DataDir), "runners", id), // the default is the host's
	}
}

// StartRunner starts `core-runner serve` with a key of its own (named as the id, which must be a DNS label then) and waits until it is
// enrolled. env is added to RunnerEnv; RUNNER_ENROLL_TOKEN in it saves the key.
func (p *Plane) StartRunner(t testing.TB, id string, env map[string]string) *Runner {
	t.Helper()
	token := env["RUNNER_ENROLL_TOKEN"]
	if token == "" {
		_, token = p.Admin.MintKey(t, id)
	}
	all := p.RunnerEnv(id, token)
	maps.Copy(all, env)
	r := &Runner{Process: Start(t, "runner "+id, p.Bin.CoreRunner, all, "serve"), ID: id}
	p.awaitEnrolled(t, r)
	return r
}

// awaitEnrolled waits until a runner has said that it is up, under its id, and takes work.
func (p *Plane) awaitEnrolled(t testing.TB, r *Runner) {
	t.Helper()
	var ready struct {
		RunnerID string `json:"runnerId"`
	}
	ReadyLine(t, r.Process, &ready)
	if ready.RunnerID != r.ID {
		t.Fatalf("runner %q says that it is %q", r.ID, ready.RunnerID)
	}
	p.Admin.AwaitRunner(t, r.ID, true)
}

// Runink runs the command line against this control plane as the admin and returns when it ended. A fetch that ended Late is asked for
// again, once; the test fails if that has no excuse.
func (p *Plane) Runink(t testing.TB, args ...string) (stdout, stderr string, status int) {
	t.Helper()
	Again(t, p.Stderr, func() (int, string) {
		stdout, stderr, status = p.runink(t, args)
		return status, stdout + stderr
	})
	return stdout, stderr, status
}

func (p *Plane) runink(t testing.TB, args []string) (stdout, stderr string, status int) {
	t.Helper()
	c := Start(t, "runink "+strings.Join(args, " "), p.Bin.Runink, p.RuninkEnv(), args...)
	status = c.Exit(t)
	return c.Stdout.String(), c.Stderr.String(), status
}

// RuninkEnv is the environment of a command line of the admin.
func (p *Plane) RuninkEnv() map[string]string {
	return map[string]string{"RUNINK_URL": p.HTTP, "RUNINK_TOKEN": p.Admin.Token, "RUNINK_CA": p.CA}
}
