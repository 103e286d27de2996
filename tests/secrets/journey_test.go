package secrets

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/canary"
	"github.com/org-runink/runbus/tests/stack"
)

// What opens a source, a proxy and a collector: in no other place, so that each is found wherever it comes out.
const (
	rightSecret   = "right-c4nary-of-the-source-7Qx"
	wrongSecret   = "wrong-c4nary \"of the\" source+%/é"
	formSecret    = "c4nary-in-a-call-of-the-wrong-form"
	proxySecret   = "c4nary-of-the-proxy"
	headerSecret  = "c4nary-of-the-collector"
	exportHeaders = "x-key=" + headerSecret
)

// journey is a control plane with everybody who may look at it.
type journey struct {
	t       *testing.T
	plane   *stack.Plane
	source  string        // opens with rightSecret; shows whoever comes with another one what they brought
	opened  chan struct{} // a value for each request for /held, which is answered when released
	release chan struct{}
	traced  map[string]string
}

// Tokens, tickets, seeds, keys and credentials go all their ways, also the wrong ones, and come out nowhere.
func TestNothingComesOut(t *testing.T) {
	j := &journey{t: t, opened: make(chan struct{}, 1), release: make(chan struct{})}
	j.source = j.hostileSource()
	j.traced = map[string]string{
		"OTEL_EXPORTER_OTLP_ENDPOINT": collector(t), "OTEL_EXPORTER_OTLP_HEADERS": exportHeaders, "OTEL_BSP_SCHEDULE_DELAY": "100",
		"HTTPS_PROXY": "http://me:" + proxySecret + "@127.0.0.1:9", "NO_PROXY": "127.0.0.1", "GOTRACEBACK": "crash",
	}
	j.plane = stack.StartPlane(t, !*plain, j.traced)
	j.listenOnTheBus()
	edge := j.plane.StartRunner(t, "edge", j.traced)
	far := j.plane.StartDialled(t, "far", j.traced)
	for _, runner := range []string{"edge", "far"} {
		j.fetches(runner)
	}
	j.people()
	j.commandLine()
	j.doctor()
	j.wrongCredentials()
	edge.Stop(t)
	j.plane.Sweep(t)
	for _, p := range []*stack.Process{far.Process, j.plane.Process} { // both have all that could be in a core file
		p.Signal(t, syscall.SIGABRT)
		p.Exit(t)
	}
	want := []string{"runner token", "session token", "ticket", canary.ProofKey, "private key", "seed", "source secret", "proxy login", "collector header"}
	for _, kind := range want {
		if !slices.Contains(stack.Secrets.Kinds(), kind) {
			t.Errorf("no %s came up: %q", kind, stack.Secrets.Kinds())
		}
	}
}

// hostileSource answers who comes with the wrong secret with what they brought, in many forms.
func (j *journey) hostileSource() string {
	j.t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		brought := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
		if brought == rightSecret {
			if r.URL.Path == "/held" {
				j.opened <- struct{}{}
				select {
				case <-j.release:
				case <-r.Context().Done():
				}
			}
			_, _ = io.WriteString(w, `{"n":1}`+"\n")
			return
		}
		w.Header().Set("Location", "/"+brought)
		w.WriteHeader(http.StatusForbidden)
		quoted, _ := json.Marshal(brought)
		_, _ = fmt.Fprintf(w, "no entry for %s, %s, %s, %s, %q, %s", brought, quoted, hex.EncodeToString([]byte(brought)),
			base64.StdEncoding.EncodeToString([]byte("me:"+brought)), brought, strings.ToUpper(brought))
	}))
	j.t.Cleanup(s.Close)
	return s.URL
}

// collector takes spans, from who has the key, and looks at them.
func collector(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || r.Header.Get("X-Key") != headerSecret {
			t.Errorf("spans came without the key: %v", err)
		}
		stack.Inspect(t, "exported spans", body, nil)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// listenOnTheBus looks at all that ops may see there.
func (j *journey) listenOnTheBus() {
	j.t.Helper()
	nc, err := j.plane.Connect("ops")
	if err != nil {
		j.t.Fatal(err)
	}
	messages, stop, looked := make(chan *nats.Msg, 1<<16), make(chan struct{}), make(chan int, 1)
	if _, err := nc.ChanSubscribe("runbus.v1.>", messages); err != nil {
		j.t.Fatal(err)
	}
	if err := nc.FlushTimeout(stack.Patience); err != nil {
		j.t.Fatal(err)
	}
	look := func(m *nats.Msg) {
		var text bytes.Buffer
		_, _ = fmt.Fprintln(&text, m.Subject, m.Reply, m.Header)
		_, _ = text.Write(m.Data)
		stack.Inspect(j.t, "a message on the bus", text.Bytes(), nil)
	}
	go func() {
		n := 0
		defer func() { looked <- n }()
		for ; ; n++ {
			select {
			case m := <-messages:
				look(m)
				continue
			default:
			}
			select {
			case m := <-messages:
				look(m)
			case <-stop:
				return
			}
		}
	}()
	j.t.Cleanup(func() {
		nc.Close()
		close(stop)
		if <-looked == 0 {
			j.t.Error("nothing was seen on the bus")
		}
	})
}

func (j *journey) body(runner, secret string) map[string]any {
	return map[string]any{
		"runnerId": runner, "secrets": map[string]string{"token": secret},
		"source": map[string]any{"kind": "http", "settings": map[string]string{"url": j.source, "format": "jsonl", "auth": "bearer"}},
	}
}

// fetches opens the source with the right secret and with a wrong one, which the source shows to everybody.
func (j *journey) fetches(runner string) {
	j.t.Helper()
	if end := j.plane.Admin.Fetch(j.t, j.body(runner, rightSecret)).End(); end.Rows != 1 {
		j.t.Errorf("a fetch ended %+v", end)
	}
	if end := j.plane.Admin.Fetch(j.t, j.body(runner, wrongSecret)).End(); end.Outcome != "failed" {
		j.t.Errorf("a fetch with a wrong secret ended %+v", end)
	}
	stack.Secrets.Add("source secret", "a call", []byte(formSecret), canary.Text)
	for _, wrong := range []any{map[string]any{"token": []string{formSecret}}, formSecret, map[string]string{"": formSecret}, map[string]string{"nosuchsecret": formSecret}} {
		body := j.body(runner, "")
		body["secrets"] = wrong
		if f := j.plane.Admin.Fetch(j.t, body); f.Status == http.StatusOK && f.End().Outcome == "completed" {
			j.t.Errorf("a fetch with the secrets %T ended well", wrong)
		}
	}
}

// people makes a tenant and people, and shows each token once.
func (j *journey) people() {
	j.t.Helper()
	operator := &stack.API{URL: j.plane.HTTP, Token: stack.ReadToken(j.t, filepath.Join(j.plane.DataDir, "operator.token"))}
	operator.Must(j.t, http.MethodPost, "/api/tenants", map[string]string{"name": "umbrella"}, nil)
	var made struct{ Token string }
	j.plane.Admin.Must(j.t, http.MethodPost, "/api/people", map[string]string{"name": "rita", "role": "READER"}, &made)
	rita := &stack.API{URL: j.plane.HTTP, Token: made.Token}
	if status, _ := rita.Call(j.t, http.MethodPost, "/api/people/rita/session", nil); status != http.StatusForbidden {
		j.t.Errorf("a reader renews a session: %d", status)
	}
	j.plane.Admin.Must(j.t, http.MethodPost, "/api/people/rita/session", nil, nil)
	if status, _ := rita.Call(j.t, http.MethodGet, "/api/session", nil); status != http.StatusUnauthorized {
		j.t.Errorf("an ended session: %d", status)
	}
}

// commandLine does with runink what shows a secret, and what must not.
func (j *journey) commandLine() {
	j.t.Helper()
	start := func(name, stdin string, args ...string) *stack.Process {
		j.t.Helper()
		return stack.StartWith(j.t, name, j.plane.Bin.Runink, j.plane.RuninkEnv(), strings.NewReader(stdin), args...)
	}
	ended := func(p *stack.Process) (status int, said string) {
		return p.Exit(j.t), p.Stdout.String() + p.Stderr.String()
	}
	run := func(want int, stdin string, args ...string) {
		j.t.Helper()
		name := "runink " + strings.Join(args[:2], " ")
		var p *stack.Process
		stack.Again(j.t, j.plane.Stderr, func() (int, string) {
			p = start(name, stdin, args...)
			return ended(p)
		})
		if status := p.Exit(j.t); status != want {
			j.t.Errorf("%s: status %d, %s", p.Name, status, p.Stderr)
		}
	}
	fetch := func(secrets, path string) []string {
		return []string{"fetch", "run", "--runner", "edge", "--source", "http", "--set", "url=" + j.source + path, "--set", "format=jsonl", "--set", "auth=bearer", "--secrets-file", secrets}
	}
	file := filepath.Join(j.t.TempDir(), "secrets")
	if err := os.WriteFile(file, []byte("token="+wrongSecret+"\n"), 0o600); err != nil {
		j.t.Fatal(err)
	}
	run(0, "", "key", "create", "spare")
	run(0, "", "user", "create", "--role", "READER", "ada")
	run(0, "", "user", "renew", "ada")
	run(0, "", "runner", "create", "--address", "127.0.0.1:1", "later")
	run(0, "", "runner", "token", "later")
	run(0, "token="+rightSecret+"\n", fetch("-", "")...)
	run(1, "", fetch(file, "")...)
	var held *stack.Process
	stack.Again(j.t, j.plane.Stderr, func() (int, string) {
		held = start("runink held", "token="+rightSecret+"\n", fetch("-", "/held")...)
		select {
		case <-j.opened:
			return 0, ""
		case <-held.Exited():
			return ended(held)
		}
	})
	held.Look()
	close(j.release)
	if status := held.Exit(j.t); status != 0 {
		j.t.Errorf("%s: status %d, %s", held.Name, status, held.Stderr)
	}
	run(0, "", "audit", "list")
	run(0, "", "runner", "show", "later")
	run(0, "", "fetch", "list")

	up := stack.Start(j.t, "runink up", j.plane.Bin.Runink, j.traced, "up", "--data-dir", filepath.Join(j.t.TempDir(), "data"), "--http", "127.0.0.1:0", "--nats", "127.0.0.1:0")
	up.Stdout.Must(j.t, "Ctrl-C stops it.")
	up.Stop(j.t)
}

// doctor looks at a token, through a proxy too that is not there.
func (j *journey) doctor() {
	j.t.Helper()
	_, token := j.plane.Admin.MintKey(j.t, "patient")
	env := j.plane.RunnerEnv("patient", token)
	for k, v := range j.traced {
		env[k] = v
	}
	for addr, want := range map[string]int{env["RUNNER_ENROLL_ADDR"]: 0, "wss://control-plane.test": 1} {
		env["RUNNER_ENROLL_ADDR"] = addr
		for _, args := range [][]string{{"doctor", "--json"}, {"doctor"}} {
			p := stack.Start(j.t, "doctor", j.plane.Bin.CoreRunner, env, args...)
			if status := p.Exit(j.t); status != want {
				j.t.Errorf("%q for %s: status %d, %s%s", args, addr, status, p.Stdout, p.Stderr)
			}
		}
	}
}

// wrongCredentials shows each credential where another one belongs.
func (j *journey) wrongCredentials() {
	j.t.Helper()
	_, token := j.plane.Admin.MintKey(j.t, "misused")
	made := j.plane.Admin.Create(j.t, "misplaced", "127.0.0.1:1")
	for _, c := range []string{token, made.Ticket, token[:len(token)-1], j.plane.Admin.Token + "x"} {
		api := &stack.API{URL: j.plane.HTTP, Token: c}
		if status, _ := api.Call(j.t, http.MethodGet, "/api/runners", nil); status != http.StatusUnauthorized {
			j.t.Errorf("the API answers a wrong credential with %d", status)
		}
		env := j.plane.RuninkEnv()
		env["RUNINK_TOKEN"] = c
		if p := stack.Start(j.t, "runink with a wrong token", j.plane.Bin.Runink, env, "runner", "list"); p.Exit(j.t) == 0 {
			j.t.Error("runink takes a wrong credential")
		}
	}
	for _, c := range []string{j.plane.Admin.Token, made.Ticket, token[:len(token)-1]} {
		env := j.plane.RunnerEnv("misused", c)
		if p := stack.Start(j.t, "runner with a wrong token", j.plane.Bin.CoreRunner, env, "serve"); p.Exit(j.t) == 0 {
			j.t.Error("a runner takes a wrong credential")
		}
	}
	for _, c := range []string{token, made.Ticket[:len(made.Ticket)-5], schemas.TicketPrefix + made.Ticket} {
		env := j.plane.DialledEnv("misplaced", "127.0.0.1:0")
		env["CORE_RUNNER_TICKET"] = c
		if p := stack.Start(j.t, "runner with a wrong ticket", j.plane.Bin.CoreRunner, env, "serve"); p.Exit(j.t) == 0 {
			j.t.Error("a runner takes a wrong ticket")
		}
	}
}
