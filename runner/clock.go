package runner

import (
	"sync"
	"sync/atomic"
	"time"
)

// clock tells control-plane time by this host's monotonic clock, so that a wrong or moved wall clock here drops no work. It is set by the
// answers to hellos and probes, and a slow answer never makes it less precise than it was: an assignment that comes too late must not run.
// What it may be wrong by grows with the age of its setting. It is safe for concurrent use.
type clock struct {
	set    atomic.Pointer[clockSetting]
	setter sync.Mutex // held by adjust
}

// clockDrift is how far two clocks go apart, in parts per million of the time that goes by.
const clockDrift = 200

// clockSetting says that it was server, there, at local, here, give or take bound.
type clockSetting struct {
	server, local time.Time
	bound         time.Duration
}

// adjust takes the server's time in an answer to a request that was sent and answered at the given local times: the middle between
// them, which is wrong by half the round trip at most. It takes the place of the setting before if it is at least as precise as that is by
// now, clockDrift included; or if the two contradict each other, being further apart than both are wrong at most: then the control
// plane's clock was set, or a replica with another clock answers. Else it is dropped.
func (c *clock) adjust(server, sent, got time.Time) {
	c.setter.Lock()
	defer c.setter.Unlock()
	half := got.Sub(sent) / 2
	s := &clockSetting{server: server, local: sent.Add(half), bound: half}
	if old := c.set.Load(); old != nil {
		bound := old.boundAt(s.local)
		if apart := server.Sub(old.at(s.local)).Abs(); s.bound > bound && apart <= s.bound+bound {
			return
		}
	}
	c.set.Store(s)
}

// at is the server's time at that local time.
func (s *clockSetting) at(local time.Time) time.Time { return s.server.Add(local.Sub(s.local)) }

// boundAt is how far at is wrong at most.
func (s *clockSetting) boundAt(local time.Time) time.Duration {
	return s.bound + local.Sub(s.local).Abs()/1_000_000*clockDrift
}

// now is the local time until the first adjust.
func (c *clock) now() time.Time { return c.at(time.Now()) }

// at is now, for who knows the local time.
func (c *clock) at(local time.Time) time.Time {
	if s := c.set.Load(); s != nil {
		return s.at(local)
	}
	return local
}

// atLeast is the server's time at that local time at least: at, without what it may be wrong by. An answer to a hello that took seconds,
// since a machine stood still, may have set the clock ahead by half of them, and since then the two clocks have gone apart.
func (c *clock) atLeast(local time.Time) time.Time {
	if s := c.set.Load(); s != nil {
		return s.at(local).Add(-s.boundAt(local))
	}
	return local
}

// bound is how far at is wrong at most; 0 until the first adjust.
func (c *clock) bound(local time.Time) time.Duration {
	if s := c.set.Load(); s != nil {
		return s.boundAt(local)
	}
	return 0
}

var processStart = time.Now()

// uptime is how long this process has run, by the monotonic clock.
func uptime() time.Duration { return time.Since(processStart) }
