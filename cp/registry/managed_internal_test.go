package registry

import "testing"

// RUNNING is what a live heartbeat says, and nothing else (SPEC R7).
func TestTheManagedRunnersState(t *testing.T) {
	for connected, want := range map[bool]string{true: StateRunning, false: StateUnknown} {
		r := Runner{Health: Health{Connected: connected}}
		describeManaged(&r)
		if r.State != want || (r.Description == "") != connected {
			t.Errorf("connected %v is %s, %q", connected, r.State, r.Description)
		}
	}
}
