package security

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/stack"
)

// natsCLI is the stock CLI, at the pinned version: RUNBUS_NATS_CLI, or the one that scripts/setup installed.
func natsCLI(t testing.TB) string {
	t.Helper()
	path := os.Getenv("RUNBUS_NATS_CLI")
	if path == "" {
		path = filepath.Join("..", "..", "bin", "nats")
	}
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), path, "--version").CombinedOutput()
	if err != nil {
		t.Fatalf("the stock nats CLI can't be run: %v: run scripts/setup, or set RUNBUS_NATS_CLI", err)
	}
	if v := strings.TrimPrefix(strings.TrimSpace(string(out)), "v"); v != "0.5.0" {
		t.Fatalf("the nats CLI has version %q, want 0.5.0", v)
	}
	return path
}

// installation is `runink up` in a home of its own, with the contexts that `runink nats context` wrote.
type installation struct {
	bench
	cli     string
	bin     stack.Binaries
	env     map[string]string
	up      *stack.Process
	api     *stack.API
	session string // of the runner `local`
}

func newInstallation(t *testing.T) *installation {
	t.Helper()
	bin, err := stack.Build(true)
	if err != nil {
		t.Fatal(err)
	}
	home := t.TempDir()
	i := &installation{cli: natsCLI(t), bin: bin, env: map[string]string{
		"HOME": home, "XDG_CONFIG_HOME": filepath.Join(home, ".config"), "PATH": filepath.Dir(bin.Runink) + string(os.PathListSeparator) + os.Getenv("PATH"),
		"GORACE": "atexit_sleep_ms=0", // the CLI starts a translator for each message: a second each, at its end, by default
	}}
	i.up = stack.Start(t, "runink up", bin.Runink, i.env, "up", "--json", "--http", "127.0.0.1:0", "--nats", "127.0.0.1:0", "--data-dir", filepath.Join(home, "data"))
	t.Cleanup(func() { i.up.Stop(t) })
	i.up.Stdout.Must(t, "}")
	var e stack.Endpoints
	if err := json.Unmarshal([]byte(i.up.Stdout.String()), &e); err != nil {
		t.Fatalf("%v in %s", err, i.up.Stdout)
	}
	i.bench = bench{url: e.NATS, ca: e.CA, dataDir: e.DataDir}
	i.api = &stack.API{URL: e.HTTP, Token: stack.ReadToken(t, e.AdminToken)}
	i.api.AwaitRunner(t, "local", true)
	made := stack.Start(t, "runink nats context", bin.Runink, i.env, "nats", "context")
	if status := made.Exit(t); status != 0 {
		t.Fatalf("runink nats context: %d %s", status, made.Stderr)
	}
	i.awaitMirrors(t)
	i.session = i.record(t, "local").Session
	return i
}

// awaitMirrors returns when ops can see what there was in SEC when it was called. It is a state, not an event, so it is asked for again
// after each answer.
func (i *installation) awaitMirrors(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stack.Patience)
	defer cancel()
	last := func(c *client, name string) uint64 {
		js, err := natsjs.New(c.Conn)
		if err != nil {
			t.Fatal(err)
		}
		st, err := js.Stream(ctx, name)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return st.CachedInfo().State.LastSeq
	}
	sec, ops := i.privileged(t, "sec"), i.privileged(t, "ops")
	for _, name := range []string{"KV_runbus_heartbeats", "RUNBUS_AUDIT"} {
		for want := last(sec, name); last(ops, name) < want; {
			<-time.After(20 * time.Millisecond)
		}
	}
}

// record is what the mirror of the heartbeats says of a runner.
func (i *installation) record(t *testing.T, id string) (record struct{ Session string }) {
	t.Helper()
	out := i.must(t, "ops", "kv", "get", "runbus_heartbeats", "local."+id, "--raw")
	if err := json.Unmarshal([]byte(out), &record); err != nil || record.Session == "" {
		t.Fatalf("kv get: %v in %s", err, out)
	}
	return record
}

// nats starts the CLI with one of the contexts.
func (i *installation) nats(t *testing.T, context string, args ...string) *stack.Process {
	t.Helper()
	return i.natsWithin(t, time.Minute, context, args...)
}

// natsWithin is nats with the time it waits for answers.
func (i *installation) natsWithin(t *testing.T, wait time.Duration, context string, args ...string) *stack.Process {
	t.Helper()
	return stack.Start(t, "nats "+strings.Join(args, " "), i.cli, i.env, append([]string{"--context", "runbus-" + context, "--timeout", wait.String()}, args...)...)
}

// notConnected is what the CLI shows when the server was too slow for it to connect: it tries once.
var notConnected = regexp.MustCompile(`(?i)expected 'PONG', got 'PING'|authentication timeout|authorization violation|no servers available|i/o timeout`)

// must runs the CLI to its end and returns what it shows; again while it does not come to connect.
func (i *installation) must(t *testing.T, context string, args ...string) string {
	t.Helper()
	for again := 0; ; again++ {
		p := i.nats(t, context, args...)
		status := p.Exit(t)
		if status == 0 {
			return p.Stdout.String()
		}
		if again == mostAgain || !notConnected.MatchString(p.Stdout.String()+p.Stderr.String()) {
			t.Fatalf("%s: status %d: %s %s", p.Name, status, p.Stdout, p.Stderr)
		}
		t.Logf("run again: %s: %s %s", p.Name, p.Stdout, p.Stderr)
	}
}

// shows starts the CLI with the ops context, which goes on, and returns when await has: again while it ends before that because it did
// not come to connect.
func (i *installation) shows(t *testing.T, await func(p *stack.Process) bool, args ...string) *stack.Process {
	t.Helper()
	for again := 0; ; again++ {
		p := i.nats(t, "ops", args...)
		if await(p) {
			return p
		}
		if again == mostAgain || !notConnected.MatchString(p.Stdout.String()+p.Stderr.String()) {
			t.Fatalf("%s: %s %s", p.Name, p.Stdout, p.Stderr)
		}
		t.Logf("run again: %s: %s %s", p.Name, p.Stdout, p.Stderr)
	}
}

// What an operator sees of a whole dispatch with the stock CLI: each message in readable form, with its type; no row of the
// result and no secret.
func TestOpsSeeADispatchAndNoRow(t *testing.T) {
	i := newInstallation(t)
	const cell, secret = "cell-8f1e0c7a-of-the-result", "secret-51b7d2-of-the-source"
	source := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+secret {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		_, _ = fmt.Fprintf(w, "{\"n\":1,\"text\":%q}\n{\"n\":2,\"text\":%q}\n", cell, cell)
	}))
	t.Cleanup(source.Close)

	watch := i.shows(t, func(p *stack.Process) bool { return i.awaitSubscribed(t, "runbus.v1.>", p) }, "sub", "runbus.v1.>", "--translate", "runink decode")
	_, token := i.api.MintKey(t, "edge")
	env := map[string]string{
		"RUNNER_ENROLL_ADDR": strings.TrimPrefix(i.url, "tls://"), "RUNNER_ENROLL_CA": i.ca, "RUNNER_ENROLL_TOKEN": token, "RUNNER_ID": "edge",
		"CORE_RUNNER_STATE_DIR": t.TempDir(), // the default is the host's
	}
	edge := stack.Start(t, "edge", i.bin.CoreRunner, env, "serve")
	i.api.AwaitRunner(t, "edge", true)
	fetch := i.api.Fetch(t, map[string]any{
		"runnerId": "edge", "secrets": map[string]string{"token": secret},
		"source": map[string]any{"kind": "http", "settings": map[string]string{"url": source.URL, "format": "jsonl", "auth": "bearer"}},
	})
	end := fetch.End()
	if end.Outcome != "completed" || end.Rows != 2 {
		t.Fatalf("the fetch ended with %+v", end)
	}
	if row := fetch.Lines[slices.IndexFunc(fetch.Lines, func(l stack.Line) bool { return l.Type == "row" })]; !strings.Contains(string(row.Row), cell) {
		t.Fatalf("the caller got %s", row.Row)
	}
	// Its credit is the last that is shown of it: later it might come together with another's.
	watch.Stdout.Must(t, `RunnerWorkCredit {"dispatchId":"`+fetch.Dispatch+`"`)
	// One without credentials may come in one frame, rows and all, which ops is told of without them.
	open := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, "{\"n\":1,\"text\":%q}\n", cell)
	}))
	t.Cleanup(open.Close)
	small := i.api.Fetch(t, map[string]any{
		"runnerId": "edge", "source": map[string]any{"kind": "http", "settings": map[string]string{"url": open.URL, "format": "jsonl"}},
	})
	if end := small.End(); end.Outcome != "completed" || end.Rows != 1 {
		t.Fatalf("the small fetch ended with %+v", end)
	}
	edge.Stop(t)

	// The goodbye is the last that the runner says. What the control plane sends is copied by a task of its own.
	watch.Stdout.Must(t, "RunnerGoodbye {")
	id := fetch.Dispatch
	// A frame is a message of its own, or one of several in one.
	frameOf := func(id, name, field string) string {
		return `(` + name + ` |"` + field + `":)\{"dispatchId":"` + id + `"`
	}
	frame := func(name, field string) string { return frameOf(id, name, field) }
	for what, pattern := range map[string]string{
		"hello":                       `RunnerHello \{"runnerId":"edge"`,
		"heartbeat":                   `RunnerHeartbeat \{"session":"[0-9a-f]{32}"`,
		"assignment":                  `RunnerWorkAssignment \{"dispatchId":"` + id + `".*"request":\{"source":\{"kind":"http"`,
		"credentials":                 `RunnerWorkCredentials \{"dispatchId":"` + id + `".*"sealed":\{"suite":"MLKEM768-X25519/HKDF-SHA256/AES-256-GCM"`,
		"accepted":                    frame("RunnerWorkAccepted", "accepted"),
		"progress":                    frame("RunnerWorkProgress", "progress") + `.*"phase":"PHASE_`,
		"credit":                      `RunnerWorkCredit \{"dispatchId":"` + id + `"`,
		"result":                      frame("RunnerWorkResult", "result") + `.*"response":\{"rows":"2"`,
		"acceptance of the small one": frameOf(small.Dispatch, "RunnerWorkAccepted", "accepted"),
		"result of the small one":     frameOf(small.Dispatch, "RunnerWorkResult", "result") + `.*"response":\{"rows":"1"`,
		"goodbye":                     `RunnerGoodbye \{"session":"[0-9a-f]{32}"`,
		"subject":                     `Received on "runbus\.v1\.local\.runner\.edge\.work\.[0-9a-f]{32}"`,
		"type header":                 `Runbus-Type: RunnerWork(Result|Frames)`,
	} {
		if err := watch.Stdout.Match(regexp.MustCompile(pattern)); err != nil {
			t.Errorf("no %s (%s) is shown: %v", what, pattern, err)
		}
	}
	shown := watch.Stdout.String()
	for what, absent := range map[string]string{
		"a cell": cell, "the secret": secret, "the runner's token": token, "the admin's token": i.api.Token, "a chunk": "RunnerWorkChunk", "a dispatch with its rows": "RunnerWorkWhole", "a chunk among others": `"chunk":{`, "a subject of chunks": ".data\"",
		"an undecoded body": "that are no message of this version",
	} {
		if strings.Contains(shown, absent) {
			t.Errorf("%s is shown", what)
		}
	}
	if t.Failed() {
		t.Logf("shown:\n%s", shown)
	}
	watch.Signal(t, syscall.SIGKILL) // it takes no interrupt where tests run in the background of a shell
	watch.Exit(t)
}

// awaitSubscribed returns true when the server has the subscription of a running `nats sub`, which doesn't tell itself, and false when that
// has ended. It is a state, not an event, so the server is asked again after each answer.
func (i *installation) awaitSubscribed(t *testing.T, subject string, cli *stack.Process) bool {
	t.Helper()
	sys := i.privileged(t, "sys")
	give := time.Now().Add(stack.Patience)
	for {
		answer, err := sys.Request("$SYS.REQ.SERVER."+sys.ConnectedServerId()+".CONNZ", []byte(`{"acc":"OPS","subscriptions":true}`), stack.Patience)
		if err != nil {
			t.Fatal(err)
		}
		var page struct {
			Data struct {
				Connections []struct {
					Name          string   `json:"name"`
					Subscriptions []string `json:"subscriptions_list"`
				} `json:"connections"`
			} `json:"data"`
		}
		if err := json.Unmarshal(answer.Data, &page); err != nil {
			t.Fatal(err)
		}
		for _, c := range page.Data.Connections {
			if strings.HasPrefix(c.Name, "NATS CLI") && slices.Contains(c.Subscriptions, subject) {
				return true
			}
		}
		if time.Now().After(give) {
			t.Fatalf("no CLI subscribes %s: %s", subject, answer.Data)
		}
		select {
		case <-cli.Exited():
			return false
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// The services, the heartbeats and the audit, with the stock CLI.
func TestOpsLookAround(t *testing.T) {
	i := newInstallation(t)
	for _, c := range []struct {
		context string
		args    []string
		want    []string
	}{
		{"ops", []string{"micro", "ls"}, []string{"runbus", "Control plane of Runbus"}},
		{"ops", []string{"micro", "info", "runbus"}, []string{"runbus.ops.status", "Control plane of Runbus"}},
		{"ops", []string{"micro", "stats", "runbus"}, []string{"runbus"}},
		{"ops", []string{"kv", "ls"}, []string{"runbus_heartbeats"}},
		{"ops", []string{"kv", "ls", "runbus_heartbeats"}, []string{"local.local"}},
		{"ops", []string{"kv", "get", "runbus_heartbeats", "local.local", "--raw"}, []string{`"runner":"local"`, i.session}},
		{"ops", []string{"stream", "ls", "--all"}, []string{"RUNBUS_AUDIT", "KV_runbus_heartbeats"}},
		{"ops", []string{"stream", "info", "RUNBUS_AUDIT"}, []string{"mirror"}},
		{"ops", []string{"stream", "get", "RUNBUS_AUDIT", "1"}, []string{`"events":[`, `"writer":`}},
		{"ops", []string{"stream", "get", "RUNBUS_AUDIT", "--last-for", "runbus.audit"}, []string{`"previous":`, `"events":[`}},
		{"ops", []string{"stream", "get", "RUNBUS_AUDIT", "1", "--translate", "runink decode"}, []string{`"events":[`, `"writer":`}},
		{"ops", []string{"sub", "--stream", "RUNBUS_AUDIT", "--all", "--count", "1", "--raw", "--translate", "runink decode", "runbus.audit"}, []string{`{"number":"1"`, `"events":[`}},
		{"ops", []string{"sub", "--stream", "RUNBUS_AUDIT", "--all", "--count", "1", "--raw", "runbus.audit"}, []string{`"number":"1"`, `"events":[`}},
		{"ops", []string{"account", "info"}, []string{"OPS"}},
		{"sys", []string{"server", "list"}, []string{"runbus-"}},
		{"sys", []string{"server", "ping", "1"}, []string{"runbus-"}},
		{"sys", []string{"server", "report", "connections"}, []string{"runbus-"}},
		{"sys", []string{"server", "report", "accounts"}, []string{"RUN"}},
		{"sys", []string{"server", "report", "jetstream"}, []string{"runbus-"}},
		{"sys", []string{"server", "report", "health"}, []string{"runbus-"}},
	} {
		t.Run(c.context+" "+strings.Join(c.args, " "), func(t *testing.T) {
			out := i.must(t, c.context, c.args...)
			for _, want := range c.want {
				if !strings.Contains(strings.ToLower(out), strings.ToLower(want)) {
					t.Errorf("%q is not in %s", want, out)
				}
			}
			for _, absent := range []string{"runbus_identities", "runbus_known", "runbus_registry", "runbus_proofs", "runbus_leases"} {
				if c.context == "ops" && strings.Contains(out, absent) {
					t.Errorf("%q is in %s", absent, out)
				}
			}
		})
	}
	t.Run("ops kv watch", func(t *testing.T) {
		watch := i.shows(t, func(p *stack.Process) bool {
			_, _, err := p.Stdout.Await("local.local", 0)
			return err == nil
		}, "kv", "watch", "runbus_heartbeats")
		// Live, not only what was there: a runner that comes now is shown.
		_, token := i.api.MintKey(t, "newcomer")
		r := i.runner(t, token, "newcomer")
		watch.Stdout.Must(t, "local.newcomer: ")
		watch.Stdout.Must(t, r.session)
		watch.Signal(t, syscall.SIGKILL) // it takes no interrupt where tests run in the background of a shell
		watch.Exit(t)
	})
}

// Whatever an operator tries to change with the stock CLI: the violation is seen, and nothing changes.
func TestOpsChangeNothing(t *testing.T) {
	i := newInstallation(t)
	sec, ops := i.privileged(t, "sec"), i.privileged(t, "ops")
	serverID := ops.ConnectedServerId()
	_, token := i.api.MintKey(t, "victim")
	victim := i.runner(t, token, "victim")
	got := make(chan *nats.Msg, 1024)
	for _, rest := range []string{"work.*", "control.*", "credit.*", "inbox.>"} {
		if _, err := victim.ChanSubscribe(own(victim.ref, rest), got); err != nil {
			t.Fatal(err)
		}
	}
	victim.quiet(t, "the victim subscribes")
	i.api.AwaitRunner(t, "victim", true) // its first heartbeat has come
	// Whom kick is tried on.
	cid, err := victim.GetClientID()
	if err != nil {
		t.Fatal(err)
	}
	opsNames := readNames(t, ops)
	before := readStreams(t, sec)
	for _, c := range []struct {
		context string
		subject string // of the violation
		args    []string
	}{
		{"ops", schemas.WorkSubject(victim.ref, victim.session), []string{"pub", schemas.WorkSubject(victim.ref, victim.session), "evil"}},
		{"ops", schemas.ControlSubject(victim.ref, victim.session), []string{"pub", schemas.ControlSubject(victim.ref, victim.session), "evil"}},
		{"ops", schemas.HelloSubject(victim.ref), []string{"request", schemas.HelloSubject(victim.ref), "evil"}},
		{"ops", schemas.ResultCtlSubject(victim.ref, "c", "d"), []string{"pub", schemas.ResultCtlSubject(victim.ref, "c", "d"), "evil"}},
		{"ops", "runbus.sec.$KV.runbus_heartbeats.local.victim", []string{"kv", "put", "runbus_heartbeats", "local.victim", "evil"}},
		{"ops", "runbus.sec.$KV.runbus_heartbeats.local.victim", []string{"kv", "del", "runbus_heartbeats", "local.victim", "-f"}},
		{"ops", "$KV.runbus_identities.x", []string{"pub", "$KV.runbus_identities.x", "evil"}},
		{"ops", "$JS.API.STREAM.CREATE.KV_evil", []string{"kv", "add", "evil"}},
		{"ops", "$JS.API.STREAM.PURGE.RUNBUS_AUDIT", []string{"stream", "purge", "RUNBUS_AUDIT", "-f"}},
		{"ops", "$JS.API.STREAM.DELETE.RUNBUS_AUDIT", []string{"stream", "rm", "RUNBUS_AUDIT", "-f"}},
		{"ops", "$JS.API.STREAM.MSG.DELETE.RUNBUS_AUDIT", []string{"stream", "rmm", "RUNBUS_AUDIT", "1", "-f"}},
		{"ops", "$JS.API.STREAM.CREATE.EVIL", []string{"stream", "add", "EVIL", "--subjects", "evil.>", "--defaults"}},
		{"ops", "$JS.API.STREAM.UPDATE.RUNBUS_AUDIT", []string{"request", "$JS.API.STREAM.UPDATE.RUNBUS_AUDIT", "{}"}},
		{"ops", "$JS.API.CONSUMER.RESET.RUNBUS_AUDIT.ops", []string{"request", "$JS.API.CONSUMER.RESET.RUNBUS_AUDIT.ops", `{"seq":1}`}},
		{"ops", "runbus.sec.CONSUMER.RESET.RUNBUS_AUDIT.ops", []string{"request", "runbus.sec.CONSUMER.RESET.RUNBUS_AUDIT.ops", `{"seq":1}`}},
		{"ops", "runbus.sec.STREAM.DELETE.RUNBUS_AUDIT", []string{"request", "runbus.sec.STREAM.DELETE.RUNBUS_AUDIT", ""}},
		{"ops", "runbus.audit", []string{"pub", "runbus.audit", "evil"}},
		{"ops", "runbus.mirror.RUNBUS_AUDIT", []string{"pub", "runbus.mirror.RUNBUS_AUDIT", "evil"}},
		{"ops", "$SYS.REQ.SERVER.PING.VARZ", []string{"request", "$SYS.REQ.SERVER.PING.VARZ", ""}},
		{"sys", "$SYS.REQ.SERVER." + serverID + ".KICK", []string{"server", "request", "kick", strconv.FormatUint(cid, 10), serverID}},
		{"sys", "$SYS.REQ.SERVER." + serverID + ".RELOAD", []string{"server", "config", "reload", serverID, "-f"}},
		{"sys", "$SYS.REQ.SERVER." + serverID + ".LDM", []string{"request", "$SYS.REQ.SERVER." + serverID + ".LDM", fmt.Sprintf(`{"cid":%d}`, cid)}},
		{"sys", "$SYS.REQ.SERVER." + serverID + ".PROFILEZ", []string{"request", "$SYS.REQ.SERVER." + serverID + ".PROFILEZ", `{"name":"heap"}`}},
		{"sys", "$SYS.REQ.CLAIMS.UPDATE", []string{"request", "$SYS.REQ.CLAIMS.UPDATE", "evil"}},
	} {
		t.Run(c.context+" "+strings.Join(c.args, " "), func(t *testing.T) {
			for wait := time.Second; ; wait *= 3 { // no answer comes; in a second it has connected, but on a busy machine
				victim.beat(t) // who is silent for a minute is forgotten
				p := i.natsWithin(t, wait, c.context, c.args...)
				status := p.Exit(t)
				shown := p.Stdout.String() + p.Stderr.String()
				if strings.Contains(shown, "Permissions Violation for Publish to "+strconv.Quote(c.subject)) {
					break
				}
				if wait > 20*time.Second {
					t.Errorf("it ended with %d and shows %s", status, shown)
					break
				}
			}
			// The server's own word.
			i.up.Stderr.Must(t, fmt.Sprintf(`Publish Violation - Subject "%s"`, c.subject))
		})
	}
	i.deliversNothing(t, victim, got)
	after := readStreams(t, sec)
	sameStreams(t, before, after)
	if names := readNames(t, ops); !slices.Equal(names, opsNames) {
		t.Errorf("the streams in OPS are %q, were %q", names, opsNames)
	}
	victim.quiet(t, "the victim is connected")
}

// deliversNothing makes consumers in OPS that deliver to where runners listen and where SEC writes: they reach OPS alone.
func (i *installation) deliversNothing(t *testing.T, victim *runner, got chan *nats.Msg) {
	t.Helper()
	ops := i.privileged(t, "ops")
	seen := make(chan *nats.Msg, 1<<16)
	targets := []string{
		schemas.WorkSubject(victim.ref, victim.session), schemas.ControlSubject(victim.ref, victim.session), schemas.InboxPrefix(victim.ref) + ".x",
		"$KV.runbus_heartbeats.local.victim", "$KV.runbus_identities.x", "runbus.audit",
	}
	// A push consumer sleeps until somebody in its account listens to its target by name: ops may, under runbus.v1.
	for _, target := range targets[:3] {
		if _, err := ops.ChanSubscribe(target, seen); err != nil {
			t.Fatal(err)
		}
	}
	ops.quiet(t, "ops subscribes")
	for n, target := range targets {
		for _, stream := range []string{"RUNBUS_AUDIT", "KV_runbus_heartbeats"} {
			i.must(t, "ops", "consumer", "add", stream, fmt.Sprintf("evil%d", n), "--target", target, "--ephemeral",
				"--deliver", "all", "--ack", "none", "--replay", "instant", "--defaults")
		}
	}
	// The consumers do deliver: in OPS each of those targets gets an audit event, and a record of a runner.
	timeout := time.After(stack.Patience)
	for got := map[string]bool{}; len(got) < 6; {
		select {
		case m := <-seen:
			if meta, err := m.Metadata(); err == nil {
				got[m.Sub.Subject+" "+meta.Stream] = true
			}
		case <-timeout:
			t.Fatalf("the consumers delivered to %v alone: the test shows nothing", got)
		}
	}
	serve := i.privileged(t, "serve")
	if err := serve.Publish(targets[0], []byte("marker")); err != nil {
		t.Fatal(err)
	}
	select {
	case m := <-got:
		if string(m.Data) != "marker" {
			t.Errorf("the runner got a message on %q before the marker: %.200q", m.Subject, m.Data)
		}
	case <-time.After(stack.Patience):
		t.Error("the marker did not reach the runner")
	}
}
