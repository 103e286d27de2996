package runner

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	chain "github.com/org-runink/runbus/runner/journal"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// policyFile writes one and returns its name.
func policyFile(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policy.yaml")
	must(t, os.WriteFile(file, []byte("version: 1\n"+text), 0o600))
	return file
}

func under(file string) func(*Config) { return func(c *Config) { c.Policy = file } }

// get assigns a fetch of a URL.
func (p *process) get(url string, more ...string) *call {
	return p.assign(func(m *runbusv1.RunnerWorkAssignment) {
		settings := map[string]string{"url": url, "format": "jsonl"}
		for i := 0; i+1 < len(more); i += 2 {
			settings[more[i]] = more[i+1]
		}
		m.Request.Source = &runbusv1.Source{Kind: "http", Settings: settings}
	})
}

// denied waits for a refusal by the policy with this text.
func (c *call) denied(text string) {
	c.t.Helper()
	if r := c.fails(schemas.CodeForbiddenHop); !strings.Contains(r.GetError().GetMessage(), text) || r.GetError().GetHint() == "" {
		c.t.Errorf("%v, want %q", r.GetError(), text)
	}
}

// records are those of the journal, which must be whole.
func (p *process) records() []chain.Record {
	p.t.Helper()
	dir := JournalDir(p.cfg.StateDir)
	report, err := chain.Verify(dir, chain.VerifyOptions{})
	must(p.t, err)
	if !report.OK {
		p.t.Errorf("the journal is broken at %v", report.Break)
	}
	var all []chain.Record
	must(p.t, chain.List(dir, func(r chain.Record, _ chain.Anchor) error { all = append(all, r); return nil }))
	return all
}

func TestThePolicyHoldsOnEveryDialAndRedirect(t *testing.T) {
	rows := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("{\"n\":1}\n")) }))
	defer rows.Close()
	_, port, err := net.SplitHostPort(rows.Listener.Addr().String())
	must(t, err)
	redirect := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, r.URL.Query().Get("to"), http.StatusFound)
	}))
	defer redirect.Close()
	other := httptest.NewServer(http.NotFoundHandler())
	defer other.Close()
	_, otherPort, err := net.SplitHostPort(other.Listener.Addr().String())
	must(t, err)

	p := newControlPlane(t).start(t, under(policyFile(t, `
deny:
  - {name: not-that-port, cidrs: [127.0.0.0/8], ports: [`+otherPort+`]}
  - {name: not-by-name, hosts: [localhost]}
  - {name: not-that-net, cidrs: [127.0.0.8/29]}
allow:
  - {name: loopback, kinds: [http], cidrs: [127.0.0.0/8]}
`)), nil)
	p.get(rows.URL).completes()
	p.get(redirect.URL+"?to="+rows.URL, "crossOrigin", "anonymous").completes()
	p.get(redirect.URL+"?to="+other.URL, "crossOrigin", "anonymous").denied(`:` + otherPort + `: rule "not-that-port"`)
	p.get(redirect.URL+"?to=http://169.254.169.254/latest", "crossOrigin", "anonymous").denied("169.254.0.0/16")
	p.get("http://localhost:" + port).denied(`("localhost"): rule "not-by-name"`)
	p.get("http://[::ffff:127.0.0.9]:" + port).denied(`127.0.0.9:` + port)
	p.get("http://[::ffff:169.254.169.254]/").denied("169.254.0.0/16")
	p.get("http://192.0.2.1:81").denied("192.0.2.1:81: default deny")
	p.assign(func(m *runbusv1.RunnerWorkAssignment) {
		m.Request.Source = &runbusv1.Source{Kind: "sqlite", Settings: map[string]string{"path": "/srv/a.db"}}
	}).denied("kind sqlite: default deny")

	outcomes := map[string]int{}
	for _, r := range p.records() {
		if r.Event == chain.EventEnd {
			outcomes[r.Outcome]++
		}
	}
	if outcomes["completed"] != 2 || outcomes["egress_denied"] != 7 || len(outcomes) != 2 {
		t.Errorf("recorded outcomes %v", outcomes)
	}
}

// TestANameThatResolvesToADeniedAddress has one that the host itself resolves.
func TestANameThatResolvesToADeniedAddress(t *testing.T) {
	rows := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("{\"n\":1}\n")) }))
	defer rows.Close()
	_, port, err := net.SplitHostPort(rows.Listener.Addr().String())
	must(t, err)
	p := newControlPlane(t).start(t, under(policyFile(t, "default: allow\ndeny:\n  - {name: no-loopback, cidrs: [127.0.0.0/8, '::1']}\n")), nil)
	p.get("http://localhost:" + port).denied(`rule "no-loopback"`)
}

func TestTheBudgetIsThatOfWhatLeaves(t *testing.T) {
	rows := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("{\"n\":1}\n")) }))
	defer rows.Close()
	cp := newControlPlane(t)
	state := t.TempDir()
	start := func() *process {
		file := policyFile(t, "default: allow\nallow:\n  - {name: web, kinds: [http], budget: {perDay: 1000}}\n")
		return cp.start(t, func(c *Config) { c.Policy, c.StateDir = file, state }, nil)
	}
	p, left := start(), int64(1000)
	for left > 0 {
		r := p.get(rows.URL).result()
		if e := r.GetError(); e != nil {
			if schemas.Code(e.GetCode()) != schemas.CodeForbiddenHop || !strings.Contains(e.GetMessage(), "more than 1000 bytes a day") {
				t.Fatalf("%v", e)
			}
			break
		}
		left -= r.GetResponse().GetWireBytes()
	}
	if left < 0 || left == 1000 {
		t.Errorf("%d bytes of 1000 are left", left)
	}
	p.Drain()
	_ = p.exit(ExitOK)
	p = start() // a restart does not begin a new day
	p.get(rows.URL).denied("more than 1000 bytes a day")
}

func TestThePolicyIsReadAgain(t *testing.T) {
	cp := newControlPlane(t)
	file := policyFile(t, "default: allow\n")
	p := cp.start(t, under(file), playing(func(_ context.Context, _ source.Request, out *source.Output) error { return oneRow(out) }))
	first := receive(t, cp.hellos, "hello").GetPolicy()
	if first.GetDigest() == "" || first.GetDefaultVerdict() != "allow" || !first.GetJournal() || len(first.GetJournalHead()) != 64 {
		t.Errorf("the hello tells %v", first)
	}
	p.assign(nil).completes()

	must(t, os.WriteFile(file, []byte("version: 1\nalow: []\n"), 0o600))
	p.ReloadPolicy()
	p.log.await(t, "the policy in force stays")
	p.assign(nil).completes()

	must(t, os.WriteFile(file, []byte("version: 1\n"), 0o600))
	p.ReloadPolicy()
	again := receive(t, cp.hellos, "hello").GetPolicy()
	if again.GetDigest() == first.GetDigest() || again.GetDefaultVerdict() != "deny" || again.GetJournalSeq() != 4 {
		t.Errorf("the hello tells %v", again)
	}
	receive(t, p.enrolled, "second enrolment")
	p.assign(nil).denied("kind test: default deny")
}

func TestWithoutAPolicyTheLogSaysSo(t *testing.T) {
	cp := newControlPlane(t)
	p := cp.start(t, nil, nil)
	p.log.await(t, "no local policy")
	p.ReloadPolicy() // nothing to read
	if s := receive(t, cp.hellos, "hello").GetPolicy(); s.GetDigest() != "" || s.GetDefaultVerdict() != "allow" {
		t.Errorf("the hello tells %v", s)
	}
}

// A runner starts with a journal that somebody changed, says where, and goes on.
func TestABrokenJournalIsWarnedOf(t *testing.T) {
	state := t.TempDir()
	dir := JournalDir(state)
	j, err := chain.Open(dir, 0)
	must(t, err)
	for _, id := range []string{"d1", "d2", "d3"} {
		must(t, j.Append(t.Context(), chain.Record{Event: chain.EventStart, Dispatch: id}, true))
	}
	must(t, j.Close())
	file := filepath.Join(dir, "00000000000000000001.jsonl")
	text, err := os.ReadFile(file)
	must(t, err)
	must(t, os.WriteFile(file, []byte(strings.Replace(string(text), `"d2"`, `"dx"`, 1)), 0o600))
	p := newControlPlane(t).start(t, func(c *Config) { c.StateDir = state }, playing(func(_ context.Context, _ source.Request, out *source.Output) error {
		return oneRow(out)
	}))
	p.log.awaitTimes(t, 1, "the journal is not whole", "00000000000000000001.jsonl:2: record 2: it was changed")
	p.assign(nil).completes()
}

func TestTheJournalTellsWhatWhenByWhom(t *testing.T) {
	p := newControlPlane(t).start(t, under(policyFile(t, "default: allow\n")), func(a *Agent) {
		playing(func(_ context.Context, _ source.Request, out *source.Output) error { return oneRow(out) })(a)
		a.waits.credentials = patience
	})
	c := p.assign(func(m *runbusv1.RunnerWorkAssignment) {
		m.CredentialsFollow = true
		m.Request.Query = "select 'a secret' from t"
		m.Request.Source.Settings = map[string]string{"host": "db.internal", "port": "5432", "database": "sales"}
	}).accepted()
	c.send(&runbusv1.CredentialBundle{
		Secrets: map[string]string{"password": "another secret"},
		Caller:  &runbusv1.CallerSession{Tenant: edge.Tenant, Person: "ada", Role: "WRITER", ExpiresAt: timestamppb.New(time.Now().Add(time.Hour))},
	}, nil)
	done := c.completes()
	all := p.records()
	if len(all) != 2 {
		t.Fatalf("%d records", len(all))
	}
	start, end := all[0], all[1]
	if start.Event != chain.EventStart || start.Dispatch != c.id || start.Caller == nil || start.Caller.Person != "ada" || start.Kind != "test" ||
		start.Target != "db.internal:5432/sales" || start.Query == nil || start.Query.Word != "SELECT" || start.Query.Text != "" || start.Policy == "" ||
		start.Tenant != edge.Tenant || start.Runner != edge.Runner || time.Since(start.At) > time.Hour {
		t.Errorf("start %+v %+v %+v", start, start.Caller, start.Query)
	}
	if end.Event != chain.EventEnd || end.Dispatch != c.id || end.Outcome != "completed" || end.Rows != 1 || end.Bytes != done.GetBytes() || end.BytesOut != done.GetWireBytes() {
		t.Errorf("end %+v", end)
	}
	names, err := filepath.Glob(filepath.Join(JournalDir(p.cfg.StateDir), "*"))
	must(t, err)
	for _, name := range names {
		b, err := os.ReadFile(name)
		must(t, err)
		if strings.Contains(string(b), "secret") {
			t.Errorf("a secret in %s", filepath.Base(name))
		}
	}
}

// TestNoWorkRunsUnrecorded takes the journal's folder away from a running runner.
func TestNoWorkRunsUnrecorded(t *testing.T) {
	ran := make(chan struct{}, 8)
	p := newControlPlane(t).start(t, nil, playing(func(_ context.Context, _ source.Request, out *source.Output) error {
		ran <- struct{}{}
		return oneRow(out)
	}))
	p.assign(nil).completes()
	receive(t, ran, "fetch")
	dir := JournalDir(p.cfg.StateDir)
	must(t, os.Rename(dir, dir+".away"))
	must(t, os.WriteFile(dir, nil, 0o600))
	if r := p.assign(nil).fails(schemas.CodeFailed); !strings.Contains(r.GetError().GetMessage(), "can't write its journal, so it runs nothing") {
		t.Errorf("%v", r.GetError())
	}
	none(t, ran, "fetch")
	must(t, os.Remove(dir))
	must(t, os.Rename(dir+".away", dir))
	p.assign(nil).completes()
	receive(t, ran, "fetch")
	if n := len(p.records()); n != 4 {
		t.Errorf("%d records", n)
	}
}

// TestAResultIsNotConfirmedUnrecorded takes it away while a fetch runs.
func TestAResultIsNotConfirmedUnrecorded(t *testing.T) {
	g := newGate()
	p := newControlPlane(t).start(t, nil, playing(g.fetch))
	c := p.assign(nil).accepted()
	receive(t, g.started, "fetch")
	dir := JournalDir(p.cfg.StateDir)
	must(t, os.Rename(dir, dir+".away"))
	must(t, os.WriteFile(dir, nil, 0o600))
	close(g.open)
	c.fails(schemas.CodeFailed)
	must(t, os.Remove(dir))
	must(t, os.Rename(dir+".away", dir))
}

func TestWhetherAJournalIsKept(t *testing.T) {
	cp := newControlPlane(t)
	blocked := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(blocked, nil, 0o600))
	p := cp.start(t, func(c *Config) { c.Journal = JournalOff }, playing(func(_ context.Context, _ source.Request, out *source.Output) error { return oneRow(out) }))
	p.assign(nil).completes()
	if _, err := os.Stat(JournalDir(p.cfg.StateDir)); !os.IsNotExist(err) {
		t.Errorf("a journal was kept: %v", err)
	}
	p.Drain()
	_ = p.exit(ExitOK)

	p = cp.start(t, func(c *Config) { c.StateDir = blocked }, nil)
	p.log.await(t, "the state folder can't be written")
	p.Drain()
	_ = p.exit(ExitOK)

	p = cp.run(t, func(c *Config) { c.StateDir, c.Journal = blocked, JournalOn }, nil)
	wantExit(t, receive(t, p.ended, "end"), ExitConfig, "the journal can't be opened")

	damaged := t.TempDir() // is no reason to keep none
	must(t, os.MkdirAll(JournalDir(damaged), 0o700))
	must(t, os.WriteFile(filepath.Join(JournalDir(damaged), "head"), []byte("x"), 0o600))
	p = cp.run(t, func(c *Config) { c.StateDir = damaged }, nil)
	wantExit(t, receive(t, p.ended, "end"), ExitConfig, "is damaged")
}

func TestAPolicyThatIsNotValidStopsTheStart(t *testing.T) {
	cp := newControlPlane(t)
	config := func(policy, journal string) Config {
		return Config{Addrs: []string{cp.URL()}, Token: cp.token, ID: edge.Runner, TLS: true, CA: cp.CAFile, StateDir: t.TempDir(), Policy: policy, Journal: journal}
	}
	_, err := New(config(policyFile(t, "alow: []\n"), ""))
	wantExit(t, err, ExitConfig, `line 2: the policy has no field "alow"`)
	_, err = New(config(filepath.Join(t.TempDir(), "none.yaml"), ""))
	wantExit(t, err, ExitConfig, "RUNNER_POLICY")
	_, err = New(config("", "sometimes"))
	wantExit(t, err, ExitConfig, "RUNNER_JOURNAL")
}
