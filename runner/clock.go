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
func (c *clock) now() time.Time { return c.at(time.Now()) }

// at is now, for who knows the local time.
func (c *clock) at(local time.Time) time.Time {
	s := c.set.Load()
	if s == nil {
		return local
	}
	return s.server.Add(local.Sub(s.local))
}

var processStart = time.Now()

// uptime is how long this process has run, by the monotonic clock.
func uptime() time.Duration { return time.Since(processStart) }
