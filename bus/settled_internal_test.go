package bus

import (
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// Only a dispatch whose result is there is settled; of another the runner is told how much has come.
func TestNothingIsSettledWithoutItsResult(t *testing.T) {
	for _, c := range []struct {
		settles, settled bool
		final            uint64
	}{{true, true, 2}, {true, false, 0}, {false, false, 2}} {
		one := &Receiver{}
		one.begin(&Receivers{}, schemas.RunnerRef{Tenant: "acme", Runner: "edge"}, "s", "d", MaxWindow, MaxWindow)
		one.settles, one.in.last, one.in.final = c.settles, 2, c.final
		last, owed := one.fail(ErrClosed)
		if !owed || last.settled != c.settled || last.credit != (credit{dispatch: "d", session: "s", acknowledged: 2}) {
			t.Errorf("%+v: owed %t, %+v", c, owed, last)
		}
	}
}
