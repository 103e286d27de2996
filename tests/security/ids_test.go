package security

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
	"github.com/org-runink/runbus/tests/stack"
)

// badIDs are ids that the grammar refuses, each with a part of the text that says why.
var badIDs = []struct{ name, id, text string }{
	{"65 characters", strings.Repeat("x", 65), "the runner id has 65 characters: at most 64 of A-Z a-z 0-9 - _ . are allowed"},
	{"star", "*", `the runner id has '*' at position 1: only A-Z a-z 0-9 - _ . are allowed`},
	{"greater", ">", `the runner id has '>' at position 1: only A-Z a-z 0-9 - _ . are allowed`},
	{"star inside", "a.*", `the runner id has '*' at position 3`},
	{"space", "a b", `the runner id has ' ' at position 2`},
	{"newline", "a\nb", `the runner id has '\n' at position 2`},
	{"control character", "a\x01b", `the runner id has '\x01' at position 2`},
	{"unicode", "läufer", `the runner id has 'ä' at position 2`},
	{"slash", "a/b", `the runner id has '/' at position 2`},
	{"escape", "a=2Eb", `the runner id has '=' at position 2`},
}

func TestCoreRunnerRefusesABadID(t *testing.T) {
	plane := stack.StartPlane(t, true, nil)
	_, token := plane.Admin.MintKey(t, "edge")
	for _, c := range badIDs {
		t.Run(c.name, func(t *testing.T) {
			r := stack.Start(t, "core-runner", plane.Bin.CoreRunner, plane.RunnerEnv(c.id, token), "serve")
			if status := r.Exit(t); status != 2 {
				t.Errorf("exit status %d, want 2", status)
			}
			if !r.Stderr.Has("RUNNER_ID: " + c.text) {
				t.Errorf("it says %q, want %q", r.Stderr, c.text)
			}
		})
	}
	if runners := plane.Admin.Runners(t); len(runners) > 0 {
		t.Errorf("runners are known: %v", runners)
	}
}

// Clients with a valid key whose CONNECT name has no valid id are told why, and no permission has a part of that id.
func TestABadIDInTheNameOfTheConnection(t *testing.T) {
	plane := stack.StartPlane(t, true, nil)
	b := benchOf(plane)
	_, token := plane.Admin.MintKey(t, "edge")
	before := readStreams(t, b.privileged(t, "sec"))
	const empty = "the runner id is empty: set RUNNER_ID to 1-64 of A-Z a-z 0-9 - _ ."
	const jailed = "invalid" // the fixed id of those who gave no valid one
	for _, c := range append(badIDs, struct{ name, id, text string }{"empty", "", empty}) {
		t.Run(c.name, func(t *testing.T) {
			dial := func() *runner {
				nonce := schemas.NewID()
				r, err := b.dialRunner(t, token, jailed, nonce, schemas.ConnectName(c.id, nonce))
				if err != nil {
					t.Fatal(err)
				}
				return r
			}
			r, answer := toldWhy(t, c.id, dial)
			if e := answer.GetError(); !strings.Contains(e.GetMessage(), c.text) || e.GetCode() != string(schemas.CodeInvalid) || !answer.GetFatal() {
				t.Errorf("the answer is %v, want %q", answer, c.text)
			}
			if answer.GetSession() != "" || answer.GetTenantId() != "" {
				t.Errorf("it was enrolled: %v", answer)
			}
			r.quiet(t, "hello as the jailed")
			r.closedIn(t, c.id, dial)
		})
	}
	for _, name := range []string{"", "edge", "edge/", "edge/no.nce", "/", "edge/*"} {
		t.Run("name "+name, func(t *testing.T) {
			dial := func() *runner {
				r, err := b.dialRunner(t, token, jailed, schemas.NewID(), name)
				if err != nil {
					t.Fatal(err)
				}
				return r
			}
			r, answer := toldWhy(t, "edge", dial)
			if e := answer.GetError(); e.GetMessage() != "the name of the connection must be <runner id>/<process nonce>" || !answer.GetFatal() {
				t.Errorf("the answer is %v", answer)
			}
			r.closedIn(t, "edge", dial)
		})
	}
	sameBuckets(t, before, readStreams(t, b.privileged(t, "sec")))
	if runners := plane.Admin.Runners(t); len(runners) > 0 {
		t.Errorf("runners are known: %v", runners)
	}
}

// toldWhy is what a jailed client, which dial makes, is told when it says hello as id. Another one asks when the ten seconds of one are
// over before that.
func toldWhy(t *testing.T, id string, dial func() *runner) (*runner, *runbusv1.EnrollmentAccepted) {
	t.Helper()
	for give := time.Now().Add(stack.Patience); ; {
		r := dial()
		answer, err := r.asked(t, schemas.HelloSubject(r.ref), r.signedHello(t, id))
		if err == nil {
			return r, answer
		}
		if !r.IsClosed() || time.Now().After(give) {
			t.Fatalf("hello as %q: %v", id, err)
		}
	}
}

// closedIn shows that a jailed client has neither what a permission built from its id would give it, nor anything of a runner. dial makes
// another one like it, for the time when the ten seconds of this one are over.
func (r *runner) closedIn(t *testing.T, id string, dial func() *runner) {
	t.Helper()
	refused := func(try func(r *runner) error) {
		t.Helper()
		for give := time.Now().Add(stack.Patience); ; r = dial() {
			err := try(r)
			if err == nil {
				return
			}
			if expired := errors.Is(err, nats.ErrAuthExpired) || r.IsClosed(); !expired || time.Now().After(give) {
				t.Fatal(err)
			}
		}
	}
	var subscribe, publish []string
	for _, as := range []string{id, "x", r.ref.Runner} {
		if strings.ContainsAny(as, " \n\x01") || as == "" {
			continue // nats.go itself sends no such subject
		}
		p := "runbus.v1." + r.ref.Tenant + ".runner." + as + "."
		subscribe = append(subscribe, p+"work.*", p+"control.*", p+"credit.*", p+"hello")
		publish = append(publish, p+"heartbeat", p+"goodbye", p+"result.c.d.ctl")
		if as != r.ref.Runner {
			subscribe = append(subscribe, p+"inbox.>")
			publish = append(publish, p+"hello")
		}
	}
	for _, subject := range append(subscribe, "runbus.v1.*.runner.*.inbox.>", "runbus.v1.*.runner.>", ">") {
		refused(func(r *runner) error {
			sub, err := r.SubscribeSync(subject)
			if err != nil {
				return err
			}
			err = r.violated("Subscription to", subject)
			_ = sub.Unsubscribe()
			return err
		})
	}
	for _, subject := range publish {
		refused(func(r *runner) error {
			if err := r.Publish(subject, nil); err != nil {
				return err
			}
			return r.violated("Publish to", subject)
		})
	}
}

// A runner that was let in under a valid id and says another in its hello is answered in its inbox, and nothing is bound.
func TestABadIDInTheHello(t *testing.T) {
	plane := stack.StartPlane(t, true, nil)
	b := benchOf(plane)
	_, token := plane.Admin.MintKey(t, "edge")
	nonce := schemas.NewID()
	r, err := b.dialRunner(t, token, "edge", nonce, schemas.ConnectName("edge", nonce))
	if err != nil {
		t.Fatal(err)
	}
	sec := b.privileged(t, "sec")
	before := readStreams(t, sec)
	bad := append(slices.Clone(badIDs), struct{ name, id, text string }{"empty", "", "the runner id is empty"},
		struct{ name, id, text string }{"another", "other", `the hello names the runner id "other" on the subject of "edge"`})
	for _, c := range bad {
		answer := r.hello(t, r.signedHello(t, c.id))
		if e := answer.GetError(); !strings.Contains(e.GetMessage(), c.text) || e.GetCode() != string(schemas.CodeInvalid) || !answer.GetFatal() || answer.GetSession() != "" {
			t.Errorf("%s: the answer is %v, want %q", c.name, answer, c.text)
		}
	}
	sameBuckets(t, before, readStreams(t, sec))
	if runners := plane.Admin.Runners(t); len(runners) > 0 {
		t.Errorf("runners are known: %v", runners)
	}
	if answer := r.trueHello(t); answer.GetError() != nil {
		t.Errorf("its true id is refused: %v", answer)
	}
}

// sameBuckets is sameStreams but for the audit, where refusals are recorded.
func sameBuckets(t *testing.T, before, after contents) {
	t.Helper()
	delete(before, "RUNBUS_AUDIT")
	delete(after, "RUNBUS_AUDIT")
	sameStreams(t, before, after)
}

func TestAnIDWithADotFetches(t *testing.T) {
	plane := stack.StartPlane(t, true, nil)
	_, token := plane.Admin.MintKey(t, "dotted")
	dir := t.TempDir()
	file := filepath.Join(dir, "a.csv")
	if err := os.WriteFile(file, []byte("n\n1\n2\n3\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := plane.StartRunner(t, "a.b", map[string]string{"RUNNER_ENROLL_TOKEN": token, "RUNNER_FILE_ROOTS": dir})
	fetch := plane.Admin.Fetch(t, map[string]any{"runnerId": "a.b", "source": map[string]any{"kind": "file", "settings": map[string]string{"path": file}}})
	end := fetch.End()
	if end.Type != "result" || end.Outcome != "completed" || end.Rows != 3 || end.RunnerPID != int64(r.PID) {
		t.Errorf("the fetch ended with %+v", end)
	}
	// In subjects its dot is escaped, so that it is one token.
	records := lastValues(t, readStreams(t, benchOf(plane).privileged(t, "sec"))["KV_runbus_heartbeats"].messages)
	if record := records["$KV.runbus_heartbeats.local.a=2Eb"]; record["runner"] != `"a.b"` {
		t.Errorf("the records are %v", records)
	}
	r.Stop(t)
}

// holding is the process that holds an id, and its session.
type holding struct {
	pid     int
	session string
}

// heldBy is who holds the id of a runner of the tenant local, as the list and the last heartbeat say.
func heldBy(t *testing.T, plane *stack.Plane, id string) (h holding) {
	t.Helper()
	var list []struct {
		ID     string
		Claims struct{ Pid int }
	}
	plane.Admin.Must(t, http.MethodGet, "/api/runners", nil, &list)
	for _, r := range list {
		if r.ID == id {
			h.pid = r.Claims.Pid
		}
	}
	records := lastValues(t, readStreams(t, benchOf(plane).privileged(t, "sec"))["KV_runbus_heartbeats"].messages)
	h.session = records["$KV.runbus_heartbeats.local."+id]["session"]
	return h
}

// Another key of the tenant takes neither a live runner's id nor one that is away, until the key that holds it is revoked.
func TestABoundID(t *testing.T) {
	plane := stack.StartPlane(t, true, nil)
	first, firstToken := plane.Admin.MintKey(t, "first")
	_, secondToken := plane.Admin.MintKey(t, "second")
	holder := plane.StartRunner(t, "edge", map[string]string{"RUNNER_ENROLL_TOKEN": firstToken})
	refused := func(when string) {
		t.Helper()
		r := stack.Start(t, "second "+when, plane.Bin.CoreRunner, plane.RunnerEnv("edge", secondToken), "serve")
		if status := r.Exit(t); status != 11 {
			t.Errorf("%s: exit status %d, want 11", when, status)
		}
		if !r.Stderr.Has(`the runner id "edge" is bound to another service-account key`) {
			t.Errorf("%s: it says %q", when, r.Stderr)
		}
	}
	began, before := time.Now(), heldBy(t, plane, "edge")
	if before.pid != holder.PID || before.session == "" {
		t.Errorf("process %d holds it, as %+v", holder.PID, before)
	}
	refused("while the first is live")
	plane.Admin.AwaitRunner(t, "edge", true)
	if after := heldBy(t, plane, "edge"); after != before {
		t.Errorf("%+v holds it, which %+v did", after, before)
	}
	const knockedOff = "the link to the control plane is down"
	if holder.Stderr.Has(knockedOff) && !stack.Excused(t, knockedOff, began, time.Now(), 0) {
		t.Error("the first was knocked off for a moment")
	}
	holder.Stop(t)
	plane.Admin.AwaitRunner(t, "edge", false)
	refused("while the first is away")

	// The same under another tenant is another runner.
	_, tokenB := newTenant(t, plane, "tenant-b").MintKey(t, "first")
	other := benchOf(plane).runner(t, tokenB, "edge")
	if other.ref.Tenant != "tenant-b" {
		t.Errorf("it is %s", other.ref)
	}

	plane.Admin.Must(t, http.MethodDelete, "/api/service-account-keys/"+first, nil, nil)
	plane.StartRunner(t, "edge", map[string]string{"RUNNER_ENROLL_TOKEN": secondToken}).Stop(t)
}
