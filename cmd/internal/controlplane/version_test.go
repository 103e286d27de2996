package controlplane

import "testing"

// A control plane tells the version it was built from, in the form that a NATS service must have, and none for a build without.
func TestVersion(t *testing.T) {
	for build, want := range map[string]string{
		"v1.2.3": "1.2.3", "v0.0.0-20261201112913-3b2167c39ef8+dirty": "0.0.0-20261201112913-3b2167c39ef8+dirty", "(devel)": "", "": "",
	} {
		if got := version(build); got != want {
			t.Errorf("%q: %q, want %q", build, got, want)
		}
	}
}
