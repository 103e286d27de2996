package runner

import (
	"sync/atomic"
	"time"
)

// clock tells control-plane time by this host's monotonic clock, so that a wrong or moved wall clock here drops no work.
type clock struct{ set atomic.Pointer[clockSetting] }

type clockSetting struct{ server, local time.Time }

// adjust takes the server's time in an answer to a request that was sent and answered at the given local times.
func (c *clock) adjust(server, sent, got time.Time) {
	c.set.Store(&clockSetting{server: server, local: sent.Add(got.Sub(sent) / 2)})
}

// now is the local time until the first adjust.
func (c *clock) now() time.Time {
	s := c.set.Load()
	if s == nil {
		return time.Now()
	}
	return s.server.Add(time.Since(s.local))
}
