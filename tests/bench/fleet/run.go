package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/org-runink/runbus/tests/bench/plane"
	"github.com/org-runink/runbus/tests/bench/proc"
)

// settings are the flags of one run.
type settings struct {
	runners, sites, together, repeat, beats int
	floor                                   bool
	out                                     proc.Out
	rest                                    time.Duration
	profile                                 string
}

// figures are those of one repetition.
type figures struct {
	floor              time.Duration
	floorCPU           [2]time.Duration // server, clients
	first              outcome
	planeCPU, fleetCPU time.Duration // of first
	held               held          // memory of the control plane, beside what it held before
	idle               float64       // processors that the connected fleet keeps busy in the control plane
	beats              time.Duration // of 1,000 heartbeats
	down               time.Duration // from the kill until the control plane served again
	back               outcome       // from the kill
	backCPU            time.Duration // of the control plane, since its start
}

// bench does it all and prints.
func bench(ctx context.Context, s settings) error {
	s.out.Printf("%d runners (runner.Agent) of %d service-account keys in one process, the control plane in another, TLS 1.3; %d under way at once at the first start\n",
		s.runners, s.sites, s.together)
	var all []figures
	for range s.repeat {
		f, err := once(ctx, s)
		if err != nil {
			return err
		}
		f.print(s)
		all = append(all, f)
	}
	if s.repeat > 1 {
		s.printMedians(all)
	}
	return nil
}

func once(ctx context.Context, s settings) (f figures, err error) {
	if s.profile != "" {
		if err := os.MkdirAll(s.profile, 0o750); err != nil {
			return f, err
		}
	}
	dir, err := os.MkdirTemp("", "runbus-fleet-")
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	p, err := plane.Start(filepath.Join(dir, "plane"))
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, p.Stop()) }()
	if s.floor {
		if err := f.measureFloor(s, p); err != nil {
			return f, err
		}
	}
	fleet, err := startRunners(ctx, s, p, dir)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, fleet.Kill()) }()
	if err := f.connect(s, p, fleet); err != nil {
		return f, err
	}
	if s.beats > 0 {
		if err := f.heartbeats(ctx, s, p, fleet); err != nil {
			return f, err
		}
	}
	return f, f.recover(s, p, fleet)
}

func startRunners(ctx context.Context, s settings, p *plane.Plane, dir string) (*proc.Child, error) {
	set := setup{Addr: p.Addr(), CA: p.CA, Dir: filepath.Join(dir, "runners"), Count: s.runners}
	for i := range s.sites {
		token, err := p.MintKey(ctx, fmt.Sprintf("site-%d", i))
		if err != nil {
			return nil, err
		}
		set.Tokens = append(set.Tokens, token)
	}
	body, err := json.Marshal(set)
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "fleet.json")
	if err := os.WriteFile(file, body, 0o600); err != nil {
		return nil, err
	}
	return proc.Start(runnersRole, []string{setupFile + "=" + file}, nil)
}

// measureFloor has as many bare connections made.
func (f *figures) measureFloor(s settings, p *plane.Plane) (err error) {
	addr, err := plane.FreeAddress()
	if err != nil {
		return err
	}
	tls := filepath.Dir(p.CA)
	body, err := json.Marshal(floorSetup{
		Addr: addr, CA: p.CA, Cert: filepath.Join(tls, "server.pem"), Key: filepath.Join(tls, "server.key"), Count: s.runners, Together: s.together,
	})
	if err != nil {
		return err
	}
	env := []string{setupFile + "=" + string(body)}
	server, err := proc.Start(floorServerRole, env, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	clients, err := proc.Start(floorClientsRole, env, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, clients.Stop()) }()
	if err := clients.Ask("connect", &f.floor); err != nil {
		return err
	}
	if f.floorCPU[0], err = server.CPU(); err != nil {
		return err
	}
	f.floorCPU[1], err = clients.CPU()
	return err
}

// connect has the runners get in, and sees what they cost.
func (f *figures) connect(s settings, p *plane.Plane, fleet *proc.Child) error {
	before, err := p.Memory()
	if err != nil {
		return err
	}
	classes, err := p.Classes()
	if err != nil {
		return err
	}
	done, err := profiled(s, "connect", p.Child, fleet)
	if err != nil {
		return err
	}
	planeBefore, fleetBefore, err := processorTimes(p.Child, fleet)
	if err != nil {
		return err
	}
	if err := fleet.Ask(fmt.Sprintf("connect %d", s.together), &f.first); err != nil {
		return err
	}
	planeAfter, fleetAfter, err := processorTimes(p.Child, fleet)
	if err != nil {
		return err
	}
	f.planeCPU, f.fleetCPU = planeAfter-planeBefore, fleetAfter-fleetBefore
	if err := done(); err != nil {
		return err
	}
	if f.held, err = measureHeld(s, p, before, classes); err != nil || s.profile == "" {
		return err
	}
	return p.Ask("heap "+filepath.Join(s.profile, "plane-heap.pprof"), nil)
}

// heartbeats measures what the connected fleet costs when nothing happens, and what heartbeats more cost.
func (f *figures) heartbeats(ctx context.Context, s settings, p *plane.Plane, fleet *proc.Child) error {
	if err := fleet.Ask(fmt.Sprintf("beaters %d", max(s.beats/beatsEach, 1)), nil); err != nil {
		return err
	}
	if err := pause(time.Second); err != nil { // the connections are made
		return err
	}
	cost := func(do func() error) (cpu, took time.Duration, err error) {
		before, err := p.CPU()
		if err != nil {
			return 0, 0, err
		}
		began := time.Now()
		if err := do(); err != nil {
			return 0, 0, err
		}
		took = time.Since(began)
		after, err := p.CPU()
		return after - before, took, err
	}
	idle, span, err := cost(func() error { return pause(15 * time.Second) }) // each runner's own heartbeat is in it once
	if err != nil {
		return err
	}
	f.idle = idle.Seconds() / span.Seconds()
	done, err := profiled(s, "beat", p.Child, fleet)
	if err != nil {
		return err
	}
	const rounds = 5
	sent := 0
	busy, span, err := cost(func() error {
		for range rounds {
			var n int
			if err := fleet.Ask("beat", &n); err != nil {
				return err
			}
			sent += n
			if err := pause(time.Second); err != nil { // until they are served
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := done(); err != nil {
		return err
	}
	own := time.Duration(f.idle * float64(span))
	f.beats = (busy - own) * 1000 / time.Duration(sent)
	served, err := p.Metric(ctx, `runbus_registry_heartbeats_total{result="ok"}`)
	if err == nil && served < float64(sent) {
		err = fmt.Errorf("only %.0f heartbeats were served, of %d that were sent beside the runners' own", served, sent)
	}
	return err
}

// recover kills the control plane, starts it again, and waits for the fleet.
func (f *figures) recover(s settings, p *plane.Plane, fleet *proc.Child) error {
	if err := fleet.Ask("mark", nil); err != nil {
		return err
	}
	began := time.Now()
	if err := p.Kill(); err != nil {
		return err
	}
	if err := p.Again(); err != nil {
		return err
	}
	f.down = time.Since(began)
	done, err := profiled(s, "recover", p.Child, fleet)
	if err != nil {
		return err
	}
	if s.profile != "" { // what it waits for in the middle
		if err := fleet.Ask("await 1 12s", nil); err != nil {
			return err
		}
		if err := p.Ask("heap "+filepath.Join(s.profile, "plane-recovering.pprof"), nil); err != nil {
			return err
		}
	}
	if err := fleet.Ask("await 1 5m", &f.back); err != nil {
		return err
	}
	if f.backCPU, err = p.CPU(); err != nil {
		return err
	}
	return done()
}

// processorTimes are those of both processes.
func processorTimes(p, fleet *proc.Child) (plane, runners time.Duration, err error) {
	if plane, err = p.CPU(); err != nil {
		return 0, 0, err
	}
	runners, err = fleet.CPU()
	return plane, runners, err
}

// profiled begins profiles of both processes if they are wanted; what it returns ends them.
func profiled(s settings, name string, p, fleet *proc.Child) (done func() error, err error) {
	if s.profile == "" {
		return func() error { return nil }, nil
	}
	for what, c := range map[string]*proc.Child{"plane": p, "runners": fleet} {
		if err := c.Profile(filepath.Join(s.profile, name+"-"+what+".pprof")); err != nil {
			return nil, err
		}
	}
	return func() error { return errors.Join(p.Profiled(), fleet.Profiled()) }, nil
}

// pause lets the fleet be for a while: what is measured is what it costs in that time.
func pause(d time.Duration) error {
	<-time.After(d)
	return nil
}
