package crash

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
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

// scene is one dialled runner, and one control plane after the other on the same data folder.
type scene struct {
	t       *testing.T
	name    string // of the runner
	bin     stack.Binaries
	data    string // folder of the control plane
	state   string // folder of the runner
	address string // where the runner listens
	id      string
	runner  *stack.Process
}

func newScene(t *testing.T) *scene {
	t.Helper()
	bin, err := stack.Build(false)
	if err != nil {
		t.Fatal(err)
	}
	return &scene{
		t: t, name: "edge", bin: bin, data: filepath.Join(t.TempDir(), "data"), state: filepath.Join(t.TempDir(), "state"),
		address: stack.FreeAddress(t, "127.0.0.1:0"),
	}
}

// plane starts a control plane that goes on.
func (s *scene) plane(leafLife string) *stack.Plane {
	s.t.Helper()
	return stack.StartPlane(s.t, false, map[string]string{"RUNBUS_DATA_DIR": s.data, "CORE_RUNNER_LEAF_LIFE": leafLife})
}

// doomed starts one that is killed at a step, which may be before it is ready.
func (s *scene) doomed(step, leafLife string) *stack.Process {
	s.t.Helper()
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	return stack.Start(s.t, "control plane to be killed", self, map[string]string{
		envKill: step, "RUNBUS_DATA_DIR": s.data, "RUNBUS_HTTP": "127.0.0.1:0", "RUNBUS_NATS": "127.0.0.1:0", "CORE_RUNNER_LEAF_LIFE": leafLife,
	})
}

// killed waits until a process has been killed at its step.
func (s *scene) killed(p *stack.Process) {
	s.t.Helper()
	if code := p.Exit(s.t); code != -1 {
		s.t.Fatalf("the %s ended by itself, with status %d", p.Name, code)
	}
}

// create registers the runner and starts it with its ticket.
func (s *scene) create(admin *stack.API) {
	s.t.Helper()
	made := admin.Create(s.t, s.name, s.address)
	s.id = made.Runner.ID
	s.start(made.Ticket)
	s.dial(admin)
}

// start starts the runner's process, with a ticket or without.
func (s *scene) start(ticket string) {
	s.t.Helper()
	s.runner = stack.Start(s.t, "runner", s.bin.CoreRunner, s.env(ticket), "serve")
	s.runner.Stderr.Must(s.t, "listening for the control plane")
}

// enrolled waits until the runner that was started last says that it has a session.
func (s *scene) enrolled() {
	s.t.Helper()
	var ready struct{ RunnerID string }
	if stack.ReadyLine(s.t, s.runner, &ready); ready.RunnerID != s.id {
		s.t.Errorf("the runner %s says that it is %s", s.id, ready.RunnerID)
	}
}

// doomedRunner starts one that is killed at a change of its folder, which may be before it listens.
func (s *scene) doomedRunner(step int, ticket string) *stack.Process {
	s.t.Helper()
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	env := s.env(ticket)
	env[envKillRunner] = strconv.Itoa(step)
	return stack.Start(s.t, "runner to be killed", self, env)
}

func (s *scene) env(ticket string) map[string]string {
	env := map[string]string{"CORE_RUNNER_LISTEN": s.address, "CORE_RUNNER_STATE_DIR": s.state}
	if ticket != "" {
		env["CORE_RUNNER_TICKET"] = ticket
	}
	return env
}

// dial asks the control plane to dial at once; it may die of that before it answers.
func (s *scene) dial(admin *stack.API) {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, admin.URL+"/api/runners/"+s.name+"/connect", nil)
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+admin.Token)
	if resp, err := http.DefaultClient.Do(req); err == nil {
		_ = resp.Body.Close()
	}
}

// fingerprint is of the certificate in the runner's folder, which must be whole; "" without one.
func (s *scene) fingerprint() string {
	s.t.Helper()
	return fingerprintOf(s.leaf())
}

func fingerprintOf(leaf *x509.Certificate) string {
	if leaf == nil {
		return ""
	}
	sum := sha256.Sum256(leaf.Raw)
	return hex.EncodeToString(sum[:])
}

func (s *scene) leaf() *x509.Certificate {
	s.t.Helper()
	body, err := os.ReadFile(filepath.Join(s.state, "identity.pem"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		s.t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(body, body)
	if err != nil {
		s.t.Fatalf("identity.pem: %v", err)
	}
	return pair.Leaf
}

// record is what the registry says of the runner.
type record struct {
	State       string
	Certificate *struct{ Fingerprint string }
	Next        *struct{ Fingerprint string } `json:"nextCertificate"`
	Tokens      []struct{ State string }
	Dial        *struct{ LastError string }
	Health      struct{ Dispatchable bool }
}

func (s *scene) record(p *stack.Plane) (r record) {
	s.t.Helper()
	p.Admin.Must(s.t, http.MethodGet, "/api/runners/"+s.name, nil, &r)
	return r
}

// pinned reports whether the registry takes a certificate.
func (r record) pinned(fingerprint string) bool {
	return r.Certificate != nil && r.Certificate.Fingerprint == fingerprint || r.Next != nil && r.Next.Fingerprint == fingerprint
}

// stopped holds the runner still while the registry is looked at: what the certificate of the moment of the crash is worth, before the
// next control plane has done anything about it.
func (s *scene) stopped(leafLife string, look func(p *stack.Plane, r record)) *stack.Plane {
	s.t.Helper()
	s.runner.Signal(s.t, syscall.SIGSTOP)
	p := s.plane(leafLife)
	r := s.record(p)
	if has := s.fingerprint(); has != "" && !r.pinned(has) {
		s.t.Errorf("no valid certificate: the runner has %.16s…, the registry takes %+v and %+v", has, r.Certificate, r.Next)
	}
	if look != nil {
		look(p, r)
	}
	s.runner.Signal(s.t, syscall.SIGCONT)
	return p
}

// await asks until ok: a state, not an event.
func (s *scene) await(what string, ok func() bool) {
	s.t.Helper()
	for give := time.Now().Add(stack.Patience); !ok(); <-time.After(50 * time.Millisecond) {
		if time.Now().After(give) {
			s.t.Fatalf("waited in vain for %s", what)
		}
	}
}

// one waits until exactly one certificate is valid, which the runner has, and checks all that must then be so. were are those before.
func (s *scene) one(p *stack.Plane, action string, were ...string) {
	s.t.Helper()
	var r record
	var leaf *x509.Certificate
	s.await("the one certificate", func() bool {
		r = s.record(p)
		leaf = s.leaf()
		has := fingerprintOf(leaf)
		return r.State == "ACTIVE" && r.Health.Dispatchable && r.Next == nil && r.Certificate != nil && r.Certificate.Fingerprint == has &&
			!slices.Contains(were, has)
	})
	now := r.Certificate.Fingerprint
	entries, err := os.ReadDir(s.state)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, e := range entries {
		if !slices.Contains([]string{"identity.pem", "ca.pem", "runner.json", "journal"}, e.Name()) {
			s.t.Errorf("the runner's folder has %s left over", e.Name())
		}
	}
	used := 0
	for _, token := range r.Tokens {
		if token.State == "used" {
			used++
		}
	}
	if used != 1 {
		s.t.Errorf("%d tokens were used: %+v", used, r.Tokens)
	}
	var events []struct {
		Action, Subject, Outcome string
		Details                  map[string]string
	}
	recorded := 0
	s.await("the record of "+action, func() bool {
		p.Admin.Must(s.t, http.MethodGet, "/api/audit?limit=1000", nil, &events)
		recorded = 0
		for _, e := range events {
			if e.Action == action && e.Subject == "runner:"+s.id && e.Outcome == "ok" && e.Details["certificate"] == now && e.Details["again"] == "" {
				recorded++
			}
		}
		return recorded > 0
	})
	if recorded != 1 {
		s.t.Errorf("the audit has %s of the certificate %d times: %+v", action, recorded, events)
	}
	s.fetch(p)
	life, err := time.ParseDuration(p.Env["CORE_RUNNER_LEAF_LIFE"])
	if err != nil {
		s.t.Fatal(err)
	}
	changed := func(r record) bool {
		return r.Certificate == nil || r.Certificate.Fingerprint != now || r.Next != nil
	}
	// When two fifths of its life are left the next one is due.
	if r := s.record(p); changed(r) && time.Until(leaf.NotAfter) > life*2/5 {
		s.t.Errorf("the certificate changed once more: %+v", r)
	}
}

// fetch runs one over the link that there is now.
func (s *scene) fetch(p *stack.Plane) {
	s.t.Helper()
	source := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(strings.Repeat("{\"n\":1}\n", 3)))
	}))
	defer source.Close()
	f := p.Admin.Fetch(s.t, map[string]any{"runnerId": s.name, "source": map[string]any{"kind": "http", "settings": map[string]string{"url": source.URL, "format": "jsonl"}}})
	if end := f.End(); end.Outcome != "completed" || end.Rows != 3 || end.RunnerID != s.id || end.RunnerPID != int64(s.runner.PID) {
		s.t.Errorf("a fetch over the link ended %+v", end)
	}
}
