package enrol

import (
	"testing"
	"time"
)

// C7, D13: as long as the works on a runner may be waited for, the pauses before its lost link is tried again stay short; one that
// has had no link for longer is tried ever less often.
func TestALostLinkIsSoughtEagerly(t *testing.T) {
	d := &Dialler{d: DiallerDeps{FirstRetry: time.Second, SlowestRetry: 30 * time.Second}}
	lost := time.Now()
	for _, c := range []struct {
		what  string
		lost  time.Time
		after time.Duration // the loss
		grows bool
	}{
		{"lost just now", lost, 0, false},
		{"as long as works are waited for", lost, 19 * time.Second, false},
		{"longer than that", lost, eager, true},
		{"never linked", time.Time{}, 0, true},
	} {
		pause := d.retryDelay((&tender{d: d, lost: c.lost, failures: 6}).paced(lost.Add(c.after)))
		if grown := pause > time.Second; grown != c.grows || pause < 500*time.Millisecond {
			t.Errorf("%s: a pause of %s", c.what, pause)
		}
	}
}
