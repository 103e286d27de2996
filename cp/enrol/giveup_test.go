package enrol

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// A link that was replaced is given up with the one that replaced it: nobody waits for the rest of its time.
func TestGivingUpEndsWithItsContext(t *testing.T) {
	for what, c := range map[string]struct {
		cancelled time.Duration
		want      time.Duration
	}{"the new link ends": {time.Second, time.Second}, "the runner holds on to the old one": {time.Hour, giveUpWithin}} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), c.cancelled)
			defer cancel()
			old := &spliced{ended: make(chan struct{})}
			old.end = func() { close(old.ended) }
			began := time.Now()
			(&tender{}).giveUp(ctx, old)
			if took := time.Since(began); took != c.want {
				t.Errorf("%s: it took %s", what, took)
			}
		})
	}
}
