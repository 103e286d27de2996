package crash

import (
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// each runs a test for each step.
func each(t *testing.T, steps []string, test func(t *testing.T, step string)) {
	t.Helper()
	for _, step := range steps {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			test(t, step)
		})
	}
}

// SPEC C3, C5, C6: a control plane that is killed in an enrolment. Until the token is used nothing has come of it, and the proof has gone
// with the memory of the process: the next one says that it takes a new token. From then on there is one certificate, which the
// runner gets, if it has not got it.
func TestThePlaneIsKilledAtEveryStepOfAnEnrolment(t *testing.T) {
	t.Parallel()
	each(t, []string{
		"hello sent", "request heard", "proof verified", "runner.enrol decided", "token consumed", "grant sent", "installed", "link taken",
	}, func(t *testing.T, step string) {
		s := newScene(t)
		dying := s.doomed(step, "24h")
		var at stack.Endpoints
		stack.ReadyLine(t, dying, &at)
		s.create(&stack.API{URL: at.HTTP, Token: stack.ReadToken(t, at.AdminToken)})
		s.killed(dying)
		pending := false
		p := s.stopped("24h", func(_ *stack.Plane, r record) { pending = r.State == "PENDING" })
		if early := step == "hello sent" || step == "request heard" || step == "proof verified"; early != pending {
			t.Errorf("after a crash at %q the runner is pending: %v", step, pending)
		}
		if pending {
			s.dial(p.Admin)
			s.await("what to do", func() bool { return strings.Contains(s.record(p).Dial.LastError, "has no token that can be proven") })
			s.runner.Stderr.Must(t, "issue a new token")
			if has := s.fingerprint(); has != "" {
				t.Errorf("a pending runner has the certificate %.16s…", has)
			}
			var made struct{ Ticket string }
			p.Admin.Must(t, http.MethodPost, "/api/runners/edge/token", nil, &made)
			s.runner.Stop(t)
			s.start(made.Ticket)
		}
		s.dial(p.Admin)
		s.one(p, "runner.enrol")
	})
}

// SPEC C8: a control plane that is killed in a renewal over the link.
func TestThePlaneIsKilledAtEveryStepOfARenewal(t *testing.T) {
	t.Parallel()
	const life, next = "40s", "100s" // the first is renewed after 24 s; what takes its place after a minute: not while it is looked at
	each(t, []string{
		"request received", "runner.certificate.next decided", "next recorded", "installed", "link taken#2", "runner.certificate.promote decided", "promoted",
	}, func(t *testing.T, step string) {
		s := newScene(t)
		first := s.plane(life)
		s.create(first.Admin)
		first.Admin.AwaitRunner(t, "edge", true)
		old := s.fingerprint()
		first.Stop(t)
		s.killed(s.doomed(step, next))
		p := s.stopped(next, nil)
		s.dial(p.Admin)
		s.one(p, "runner.certificate.promote", old)
		if s.record(p).pinned(old) {
			t.Error("the old certificate is still valid")
		}
	})
}

// SPEC C13: a control plane that is killed while it renews a certificate that expired when the host was off.
func TestThePlaneIsKilledAtEveryStepOfALateRenewal(t *testing.T) {
	t.Parallel()
	each(t, []string{
		"hello sent", "request heard", "runner.certificate.next decided", "next recorded", "grant sent", "installed", "link taken", "runner.certificate.promote decided", "promoted",
	}, func(t *testing.T, step string) {
		s := newScene(t)
		first := s.plane("10s") // the shortest
		s.create(first.Admin)
		first.Admin.AwaitRunner(t, "edge", true)
		s.runner.Signal(t, syscall.SIGKILL)
		s.runner.Exit(t)
		first.Stop(t)
		leaf, old := s.leaf(), s.fingerprint()
		<-time.After(time.Until(leaf.NotAfter.Add(time.Second))) // the host is off
		s.start("")
		s.killed(s.doomed(step, "1h"))
		p := s.stopped("1h", nil)
		s.dial(p.Admin)
		s.one(p, "runner.certificate.promote", old)
		if s.record(p).pinned(old) {
			t.Error("the expired certificate is still on record")
		}
	})
}
