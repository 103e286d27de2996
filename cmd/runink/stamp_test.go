package main

import (
	"strings"
	"testing"
	"time"
)

// A moment is shown with its zone: whoever reads it need not know whose clock it was.
func TestMomentsHaveTheirZone(t *testing.T) {
	at := time.Date(2026, 12, 1, 1, 2, 3, 4000, time.FixedZone("", 5*3600+1800))
	if back, err := time.Parse(time.RFC3339, stamp(at)); err != nil || !back.Equal(at.Truncate(time.Second)) {
		t.Errorf("%s is read as %s, %v", stamp(at), back, err)
	}
	r := runnerRow{Leaf: &leafRow{NotAfter: at}, Next: &leafRow{NotAfter: at}, Tokens: []runnerToken{{ID: "t", State: "live", ExpiresAt: at}}}
	shown := 0
	for _, f := range r.fields(at) {
		if strings.Contains(f.value, stamp(at)) {
			shown++
		}
	}
	if shown != 3 {
		t.Errorf("%d of 3 moments are shown so: %q", shown, r.fields(at))
	}
}

// A link that goes on while a new address is tried is shown with what is wrong with that one.
func TestALinkAndTheErrorOfItsNewAddress(t *testing.T) {
	now := time.Now()
	r := runnerRow{}
	r.Dial = &struct {
		Connected bool       `json:"connected"`
		Since     *time.Time `json:"since"`
		PeerAddr  string     `json:"peerAddr"`
		LastError string     `json:"lastError"`
		NextTry   *time.Time `json:"nextTry"`
	}{Connected: true, Since: &now, PeerAddr: "192.0.2.1:7443", LastError: "nothing listens at 192.0.2.2:7443"}
	var lines []string
	for _, f := range r.fields(now) {
		lines = append(lines, f.name+": "+f.value)
	}
	text := strings.Join(lines, "\n")
	for _, want := range []string{"dialled: linked to 192.0.2.1:7443", "last dial: failed: nothing listens at 192.0.2.2:7443"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
}
