package auth

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// However many revocations and renewals follow each other, the scan for what slipped through comes in its time after each.
func TestALateScanIsNotPutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		late := newLater(rescanLate)
		defer late.timer.Stop()
		var asked, came []time.Time
		every := time.NewTicker(rescanLate / 5)
		defer every.Stop()
		end := time.After(20 * rescanLate)
		ask := every.C
		for ask != nil || late.due {
			select {
			case <-ask:
				late.ask()
				asked = append(asked, time.Now())
			case <-late.timer.C:
				late.came()
				came = append(came, time.Now())
			case <-end:
				ask = nil
			}
		}
		if len(asked) < 90 || len(came) > len(asked)/4 {
			t.Errorf("asked for %d times, came %d times", len(asked), len(came))
		}
		for _, at := range asked {
			if !slices.ContainsFunc(came, func(c time.Time) bool { d := c.Sub(at); return d >= rescanLate && d <= 2*rescanLate }) {
				t.Fatalf("nothing came for what was asked at %s: %s", at, came)
			}
		}
	})
}
