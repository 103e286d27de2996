package security

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/stack"
)

// Nobody else is the managed runner of a tenant, while it is up: not a key of that tenant, not a dialled runner, not who knows its name.
func TestNobodyElseIsTheManagedRunner(t *testing.T) {
	plane := stack.StartPlane(t, true, map[string]string{"MANAGED_RUNNER_ENDPOINT": "local"})
	b := benchOf(plane)
	console := func() (pid int, state string) {
		var list []struct {
			ID, State string
			Claims    struct{ Pid int }
			Health    struct{ Dispatchable bool }
		}
		plane.Admin.Must(t, http.MethodGet, "/api/runners", nil, &list)
		if list[0].ID != "console" {
			t.Fatalf("%+v", list)
		}
		if !list[0].Health.Dispatchable {
			return 0, list[0].State
		}
		return list[0].Claims.Pid, list[0].State
	}
	up := func() int {
		for give := time.Now().Add(stack.Patience); ; <-time.After(20 * time.Millisecond) {
			pid, state := console()
			if state == "RUNNING" && pid != 0 {
				return pid
			}
			if time.Now().After(give) {
				t.Fatalf("the managed runner is not up: process %d, %s", pid, state)
			}
		}
	}
	pid := up()
	_, token := plane.Admin.MintKey(t, "edge")

	// By the program that everybody has: refused before it dials.
	p := stack.Start(t, "core-runner", plane.Bin.CoreRunner, plane.RunnerEnv("console", token), "serve")
	if status := p.Exit(t); status != 2 || !p.Stderr.Has(`"console" is reserved for the managed runner`) {
		t.Errorf("status %d, %s", status, p.Stderr)
	}
	// By a client of one's own: jailed, told why, and closed in.
	dial := func() *runner {
		nonce := schemas.NewID()
		r, err := b.dialRunner(t, token, "console", nonce, schemas.ConnectName("console", nonce))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r, answer := toldWhy(t, "console", dial)
	if e := answer.GetError(); e.GetMessage() != `the runner id "console" is reserved` || !answer.GetFatal() || answer.GetSession() != "" {
		t.Errorf("the answer is %v", answer)
	}
	r.closedIn(t, "edge", dial)
	// As an enrolled runner of the tenant, on the subjects of console.
	honest := b.runner(t, token, "edge")
	victim := schemas.RunnerRef{Tenant: honest.ref.Tenant, Runner: "console"}
	for _, subject := range []string{schemas.HelloSubject(victim), schemas.HeartbeatSubject(victim), schemas.GoodbyeSubject(victim)} {
		if err := honest.Publish(subject, nil); err != nil {
			t.Fatal(err)
		}
		honest.violation(t, "Publish to", subject)
	}
	for _, subject := range []string{own(victim, "work.*"), own(victim, "control.*"), own(victim, "inbox.>")} {
		sub, err := honest.SubscribeSync(subject)
		if err != nil {
			t.Fatal(err)
		}
		honest.violation(t, "Subscription to", subject)
		_ = sub.Unsubscribe()
	}
	// By a link token that nobody signed, on the port.
	for _, password := range []string{"rlt1.x", "rlt1." + strings.Repeat("A", 100) + ".AAAA"} {
		if _, err := b.connect(t, nats.Name(schemas.ConnectName("console", schemas.NewID())), nats.UserInfo("local/console", password)); !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("with a token of one's own: %v", err)
		}
	}
	// By a name that people give to a runner, or to a key.
	for path, body := range map[string]any{
		"/api/runners":              map[string]any{"name": "console", "address": "127.0.0.1:7443"},
		"/api/service-account-keys": map[string]any{"name": "console"},
	} {
		if status, text := plane.Admin.Call(t, http.MethodPost, path, body); status != http.StatusBadRequest || !strings.Contains(string(text), "reserved") {
			t.Errorf("%s: %d %s", path, status, text)
		}
	}
	if status, text := plane.Admin.Call(t, http.MethodPost, "/api/runners/console/release", nil); status < 400 {
		t.Errorf("its id is released: %d %s", status, text)
	}
	if now := up(); now != pid {
		t.Errorf("it was process %d and is %d", pid, now)
	}
	plane.Stop(t)
}
