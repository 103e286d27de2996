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

// A round in which the process stood still says nothing of what others did in it: another one follows, and in a process that is always late
// the fifth counts.
func TestALateRoundDoesNotCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		late := newLater(rescanLate)
		defer late.timer.Stop()
		came := func(after time.Duration) {
			<-time.After(after)
			select {
			case <-late.timer.C:
				late.came()
			default:
				t.Fatal("no round is due")
			}
		}
		first := late.ask()
		second := late.ask()
		if came(rescanLate + tardy); late.done != first || second == first {
			t.Errorf("rounds %d and %d were asked for, and %d has come", first, second, late.done)
		}
		for range mostTardy {
			if came(rescanLate + tardy + 1); late.done != first || !late.due {
				t.Fatalf("%d has come, which was late", late.done)
			}
		}
		if came(time.Hour); late.done < second || late.due {
			t.Errorf("%d has come of %d, which is late each time", late.done, second)
		}
		third := late.ask()
		came(rescanLate + tardy + 1)
		if came(rescanLate); late.done <= third || late.due {
			t.Errorf("%d has come of %d, in time but for the first time", late.done, third)
		}
	})
}
