package crash

import (
	"fmt"
	"strconv"
	"testing"
)

// How often an enrolment and a renewal change a runner's state folder; runner/identity counts them and kills at each too.
const (
	stepsOfAnEnrolment = 16
	stepsOfARenewal    = 7
)

// SPEC C5, C6: a runner that is killed in its enrolment goes on at its next start, with the ticket that its unit still has.
func TestTheRunnerIsKilledAtEveryStepOfAnEnrolment(t *testing.T) {
	t.Parallel()
	p := newScene(t).plane("24h")
	t.Run("steps", func(t *testing.T) { // p lives as long as they
		for step := 1; step <= stepsOfAnEnrolment; step++ {
			t.Run(strconv.Itoa(step), func(t *testing.T) {
				t.Parallel()
				s := newScene(t)
				s.name = fmt.Sprint("edge-", step)
				made := p.Admin.Create(t, s.name, s.address)
				s.id = made.Runner.ID
				s.killed(s.doomedRunner(step, made.Ticket))
				s.start(made.Ticket)
				s.dial(p.Admin)
				s.enrolled()
				s.one(p, "runner.enrol")
			})
		}
	})
}

// SPEC C8: a runner that is killed in a renewal over its link has the old certificate or the new one, and one that is valid.
func TestTheRunnerIsKilledAtEveryStepOfARenewal(t *testing.T) {
	t.Parallel()
	p := newScene(t).plane("30s") // renewed after 18
	t.Run("steps", func(t *testing.T) {
		for step := 1; step <= stepsOfARenewal; step++ {
			t.Run(strconv.Itoa(step), func(t *testing.T) {
				t.Parallel()
				s := newScene(t)
				s.name = fmt.Sprint("edge-", step)
				s.create(p.Admin)
				p.Admin.AwaitRunner(t, s.name, true)
				old := s.fingerprint()
				s.runner.Stop(t)
				s.killed(s.doomedRunner(step, ""))
				if has, r := s.fingerprint(), s.record(p); !r.pinned(has) {
					t.Errorf("no valid certificate: the runner has %.16s…, the registry takes %+v and %+v", has, r.Certificate, r.Next)
				}
				s.start("")
				s.dial(p.Admin)
				s.enrolled() // the control plane may not know yet that the process before is gone
				s.one(p, "runner.certificate.promote", old)
				if s.record(p).pinned(old) {
					t.Error("the old certificate is still valid")
				}
			})
		}
	})
}
