package main

import (
	"fmt"
	"time"

	"github.com/org-runink/runbus/tests/bench/proc"
)

func (f figures) print(s settings) {
	if s.floor {
		s.out.Printf("bare connections: %d in %s; processor time server %s, clients %s\n", s.runners, seconds(f.floor), seconds(f.floorCPU[0]), seconds(f.floorCPU[1]))
	}
	s.out.Printf("connected and enrolled: %d of %d, half in %s, 99 %% in %s, all in %s (bar 10 s); processor time control plane %s, runners %s; %d warnings\n",
		f.first.Enrolled, s.runners, seconds(f.first.Half), seconds(f.first.Most), seconds(f.first.All), seconds(f.planeCPU), seconds(f.fleetCPU), f.first.Warnings)
	f.held.print(s)
	if s.beats > 0 {
		s.out.Printf("heartbeats: 1,000 take %.0f ms of the control plane's processor time; the idle fleet with its own, pings and all keeps %.2f processors busy\n",
			f.beats.Seconds()*1000, f.idle)
	}
	s.out.Printf("recovery: served again %s after the kill; %d of %d back, half in %s, 99 %% in %s (bar 35 s), all in %s; closed for good: %d (bar 0); processor time %s; %d warnings\n",
		seconds(f.down), f.back.Enrolled, s.runners, seconds(f.back.Half), seconds(f.back.Most), seconds(f.back.All), len(f.back.Closed), seconds(f.backCPU), f.back.Warnings)
	for i, why := range f.back.Closed {
		if i == 5 {
			break
		}
		s.out.Printf("  closed: %s\n", why)
	}
}

func (s settings) printMedians(all []figures) {
	median := func(get func(figures) float64) float64 {
		var values []float64
		for _, f := range all {
			values = append(values, get(f))
		}
		return proc.Median(values)
	}
	closed := 0
	for _, f := range all {
		closed += len(f.back.Closed)
	}
	s.out.Printf("medians of %d: bare %.1f s; connected and enrolled %.1f s (bar 10), %.2f of bare; %.1f KiB a runner (bar 80); 1,000 heartbeats %.0f ms; 99 %% back after %.1f s (bar 35); closed for good %d (bar 0)\n",
		len(all), median(func(f figures) float64 { return f.floor.Seconds() }), median(func(f figures) float64 { return f.first.All.Seconds() }),
		median(func(f figures) float64 { return f.first.All.Seconds() / f.floor.Seconds() }),
		median(func(f figures) float64 { return f.held.bar() / 1024 }), median(func(f figures) float64 { return f.beats.Seconds() * 1000 }),
		median(func(f figures) float64 { return f.back.Most.Seconds() }), closed)
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }
