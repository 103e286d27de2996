package runner

import (
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A link that this process gives up itself, for another, is no fault and does not look like one.
func TestALinkThatIsGivenUpIsNotDown(t *testing.T) {
	cp := newControlPlane(t)
	p := cp.start(t, nil, nil)
	must(t, cp.dispatch.Publish(schemas.ControlSubject(edge, p.session), &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Move{Move: &runbusv1.MoveOrder{}}}))
	p.log.await(t, "the link to the control plane is given up for a new one")
	receive(t, p.enrolled, "another enrolment")
	if text := p.log.text(); strings.Contains(text, "the link to the control plane is down") {
		t.Errorf("the log says\n%s", text)
	}
}
