package security

import (
	"net/http"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
	"github.com/org-runink/runbus/tests/stack"
)

// The literals of SPEC E3 and E5, as they are written there.
const (
	textTokenMissing = "❌ RUNNER_ENROLL_ADDR is set but RUNNER_ENROLL_TOKEN is empty — a runner enrols with a service-account token issued by IdentityService.GenerateServiceAccountKey; there is no anonymous enrolment"
	textPerson       = "runner enrolment requires a service-account credential; a user session token cannot enrol a runner"
)

func TestAnAddressWithoutATokenRefusesToStart(t *testing.T) {
	bin, err := stack.Build(true)
	if err != nil {
		t.Fatal(err)
	}
	for name, start := range map[string]struct {
		path string
		env  map[string]string
		args []string
	}{
		"core-runner": {bin.CoreRunner, nil, []string{"serve"}},
		"face":        {bin.Face, map[string]string{"SERVICE_ROLE": "runner"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			env := map[string]string{"RUNNER_ENROLL_ADDR": "127.0.0.1:1", "RUNNER_ID": "edge", "CORE_RUNNER_STATE_DIR": t.TempDir()}
			for k, v := range start.env {
				env[k] = v
			}
			p := stack.Start(t, name, start.path, env, start.args...)
			if status := p.Exit(t); status != 2 {
				t.Errorf("exit status %d, want 2", status)
			}
			if !p.Stderr.Has(textTokenMissing) {
				t.Errorf("it says %q", p.Stderr)
			}
		})
	}
}

// A person's session enrols no runner, whatever the role: it prints why, once, and ends.
func TestAPersonCannotEnrol(t *testing.T) {
	plane := stack.StartPlane(t, true, nil)
	var reader struct{ Token string }
	plane.Admin.Must(t, http.MethodPost, "/api/people", map[string]string{"name": "ada", "role": "READER"}, &reader)
	operator := stack.ReadToken(t, plane.DataDir+"/operator.token")
	for name, token := range map[string]string{"admin": plane.Admin.Token, "reader": reader.Token, "operator": operator} {
		t.Run(name, func(t *testing.T) {
			r := stack.Start(t, name, plane.Bin.CoreRunner, plane.RunnerEnv("edge", token), "serve")
			if status := r.Exit(t); status != 11 {
				t.Errorf("exit status %d, want 11", status)
			}
			if !r.Stderr.Has(textPerson) {
				t.Errorf("it says %q", r.Stderr)
			}
			if r.Stderr.Has(token) {
				t.Error("it shows the token")
			}
		})
	}
	if runners := plane.Admin.Runners(t); len(runners) > 0 {
		t.Errorf("runners are known: %v", runners)
	}
}

// A revocation cuts the live runner, which ends with the reason; so does one that starts with the revoked key.
func TestARevokedKeyEndsItsRunner(t *testing.T) {
	plane := stack.StartPlane(t, true, nil)
	id, token := plane.Admin.MintKey(t, "edge")
	r := plane.StartRunner(t, "edge", map[string]string{"RUNNER_ENROLL_TOKEN": token})
	plane.Admin.Must(t, http.MethodDelete, "/api/service-account-keys/"+id, nil, nil)
	late := stack.Start(t, "late", plane.Bin.CoreRunner, plane.RunnerEnv("edge", token), "serve")
	for _, p := range []*stack.Process{r.Process, late} {
		if status := p.Exit(t); status != 11 {
			t.Errorf("%s: exit status %d, want 11", p.Name, status)
		}
		if !p.Stderr.Has(`the service-account key "sa-edge" was revoked`) {
			t.Errorf("%s says %q", p.Name, p.Stderr)
		}
	}
	for give := time.Now().Add(stack.Patience); ; <-time.After(20 * time.Millisecond) { // the key is known to have ended at once, the link when its end is told
		state := plane.Admin.AwaitRunner(t, "edge", false)
		if !state.Health.Connected {
			break
		}
		if time.Now().After(give) {
			t.Fatalf("it is shown as %+v", state)
		}
	}
}

// Anything before the hello is dropped, counted, and answered in the sender's own inbox.
func TestHelloFirst(t *testing.T) {
	plane := stack.StartPlane(t, true, nil)
	b := benchOf(plane)
	_, token := plane.Admin.MintKey(t, "edge")
	nonce := schemas.NewID()
	r, err := b.dialRunner(t, token, "edge", nonce, schemas.ConnectName("edge", nonce))
	if err != nil {
		t.Fatal(err)
	}
	const counter = `runbus_registry_dropped_total{reason="hello_first"}`
	before := readStreams(t, b.privileged(t, "sec"))
	for i, early := range []*runbusv1.EnrollmentAccepted{
		r.ask(t, schemas.HeartbeatSubject(r.ref), &runbusv1.RunnerHeartbeat{ProcessNonce: nonce}),
		r.ask(t, schemas.HeartbeatSubject(r.ref), &runbusv1.RunnerHeartbeat{Session: schemas.NewID(), ProcessNonce: nonce}),
		r.ask(t, schemas.GoodbyeSubject(r.ref), &runbusv1.RunnerGoodbye{}),
	} {
		if e := early.GetError(); e.GetCode() != "HELLO_FIRST" || e.GetMessage() != "HELLO_FIRST: the first message of a runner must be RunnerHello" {
			t.Errorf("message %d is answered with %v", i, early)
		}
	}
	awaitMetric(t, plane.Admin, counter, 3)
	sameStreams(t, before, readStreams(t, b.privileged(t, "sec")))
	if runners := plane.Admin.Runners(t); len(runners) > 0 {
		t.Errorf("runners are known: %v", runners)
	}
	if answer := r.trueHello(t); answer.GetError() != nil {
		t.Errorf("the hello is answered with %v", answer)
	}
}
