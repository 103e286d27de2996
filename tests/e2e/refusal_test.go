package e2e

import (
	"net/http"
	"strings"
	"testing"

	"github.com/org-runink/runbus/tests/stack"
)

// Who reads the log of a runner whose key was revoked finds the reason, and before it no more than that the link is down: that its client
// may not have its old subscriptions back, where it may only ask why, is no fault of anybody's.
func TestRevocationIsToldFirst(t *testing.T) {
	t.Parallel()
	plane := stack.StartPlane(t, true, nil)
	id, token := plane.Admin.MintKey(t, "edge")
	runner := plane.StartRunner(t, "edge.1", map[string]string{"RUNNER_ENROLL_TOKEN": token})
	plane.Admin.Must(t, http.MethodDelete, "/api/service-account-keys/"+id, nil, nil)
	if status := runner.Exit(t); status != 11 {
		t.Fatalf("the runner ended with status %d", status)
	}
	const reason = "the control plane refuses this runner for good"
	before, told, found := strings.Cut(runner.Stderr.String(), reason)
	if line, _, _ := strings.Cut(told, "\n"); !found || !strings.Contains(line, `the service-account key \"sa-edge\" was revoked`) || !strings.Contains(line, "mint a new key") {
		t.Errorf("the reason is %q", line)
	}
	if last := before[strings.LastIndexByte(before, '\n')+1:]; !strings.Contains(last, "level=ERROR") {
		t.Errorf("the reason's line begins with %q", last)
	}
	for line := range strings.Lines(before[:strings.LastIndexByte(before, '\n')+1]) {
		down := strings.Contains(line, "the link to the control plane is down") ||
			strings.Contains(line, "can't reach the control plane") && !strings.Contains(line, "iolation") // a slow machine's handshake
		if !strings.Contains(line, "level=INFO") && !strings.Contains(line, "level=DEBUG") && !down {
			t.Errorf("before the reason: %s", line)
		}
	}
	// The server has refused the subscriptions before it passed on the question; whether the runner's client tells of that before the answer
	// comes is its own affair.
	plane.Stderr.Must(t, "Subscription Violation") // else the test shows nothing; what was written may not be read yet
	for line := range strings.Lines(plane.Stderr.String()) {
		if strings.Contains(line, "Subscription Violation") && !strings.Contains(line, "level=DEBUG") {
			t.Errorf("the control plane says: %s", line)
		}
	}
	if !strings.Contains(plane.Stderr.Must(t, "client jailed"), "level=WARN") {
		t.Error("the control plane does not warn of a revoked key that is used")
	}
}
