package main

import (
	"path/filepath"
	"time"

	"github.com/org-runink/runbus/tests/bench/plane"
	"github.com/org-runink/runbus/tests/bench/proc"
)

const (
	// settle is how long the fleet is left alone before memory is read first: every runner has sent a heartbeat of its own by then.
	settle = 20 * time.Second
	// heldEvery is how often it is read in the second half of the rest.
	heldEvery = 5 * time.Second
)

// held is resident memory (VmRSS) of the control plane's process beyond what it was before the first runner, in bytes a runner. What the
// kernel holds for their sockets is not in it.
type held struct {
	settled    float64 // settle after the last had enrolled
	mean, most float64 // in the second half of the rest; zero without one
	classes    proc.Classes
	runners    float64
}

// measureHeld leaves the connected fleet alone and reads.
func measureHeld(s settings, p *plane.Plane, before proc.Memory, classes proc.Classes) (h held, err error) {
	h.runners = float64(s.runners)
	read := func() (float64, error) {
		now, err := p.Memory()
		return float64(now.Now-before.Now) / h.runners, err
	}
	if err := pause(settle); err != nil {
		return h, err
	}
	if h.settled, err = read(); err != nil {
		return h, err
	}
	if s.rest > 0 {
		if s.profile != "" { // what the rest allocates is the difference to the one after it
			if err := p.Ask("heap "+filepath.Join(s.profile, "plane-settled.pprof"), nil); err != nil {
				return h, err
			}
		}
		if err := pause(s.rest / 2); err != nil {
			return h, err
		}
		n := max(int(s.rest/2/heldEvery), 1)
		for range n {
			if err := pause(heldEvery); err != nil {
				return h, err
			}
			now, err := read()
			if err != nil {
				return h, err
			}
			h.mean += now / float64(n)
			h.most = max(h.most, now)
		}
	}
	now, err := p.Classes()
	h.classes = now.Sub(classes)
	return h, err
}

// bar is the figure that the bar is for: what an operator sees once the fleet has been connected for a while.
func (h held) bar() float64 {
	if h.mean > 0 {
		return h.mean
	}
	return h.settled
}

func (h held) print(s settings) {
	s.out.Printf("control-plane memory, resident, more than without runners: %.1f KiB a runner %s after the last enrolled", h.settled/1024, settle)
	if h.mean > 0 {
		s.out.Printf("; from %s to %s later %.1f on average (bar 80), %.1f at most", s.rest/2, s.rest, h.mean/1024, h.most/1024)
	}
	// A difference, which may be negative.
	each := func(bytes uint64) float64 { return float64(int64(bytes)) / h.runners / 1024 }
	c := h.classes
	s.out.Printf("\n  of it, at the end: objects %.1f, room between them %.1f, free %.1f, stacks %.1f, the runtime's own %.1f KiB\n",
		each(c.Objects), each(c.Unused), each(c.Free), each(c.Stacks), each(c.Other))
}
