package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/org-runink/runbus/tests/bench/plane"
	"github.com/org-runink/runbus/tests/bench/proc"
)

// settings are the flags of one run.
type settings struct {
	out     proc.Out
	bytes   int64
	pairs   int
	profile string
	// profiled is the path that runs under it.
	profiled string
}

// scene is all processes of one run.
type scene struct {
	dir    string
	plane  *plane.Plane
	runner *proc.Child
	peers  *proc.Child
	caller *proc.Child
	stops  []func() error
}

func newScene(ctx context.Context) (s *scene, err error) {
	s = new(scene)
	defer func() {
		if err != nil {
			err = errors.Join(err, s.stop())
		}
	}()
	if s.dir, err = os.MkdirTemp("", "runbus-bulk-"); err != nil {
		return s, err
	}
	s.stops = append(s.stops, func() error { return os.RemoveAll(s.dir) })
	if s.plane, err = plane.Start(filepath.Join(s.dir, "plane")); err != nil {
		return s, err
	}
	s.stops = append(s.stops, s.plane.Stop)
	token, err := s.plane.MintKey(ctx, runnerID)
	if err != nil {
		return s, err
	}
	if s.runner, err = proc.Start(runnerRole, []string{
		"RUNNER_ENROLL_ADDR=" + s.plane.Addr(), "RUNNER_ENROLL_TOKEN=" + token, "RUNNER_ENROLL_CA=" + s.plane.CA, "RUNNER_ID=" + runnerID,
		"CORE_RUNNER_STATE_DIR=" + filepath.Join(s.dir, "runner"),
	}, nil); err != nil {
		return s, err
	}
	s.stops = append(s.stops, s.runner.Stop)
	if err := s.plane.AwaitRunners(ctx, 1); err != nil {
		return s, err
	}
	r := reach{URL: s.plane.HTTP, Token: s.plane.Token(), CA: s.plane.CA}
	tls := filepath.Dir(s.plane.CA)
	if s.peers, err = proc.Start(peersRole, []string{
		"BENCH_CERT=" + filepath.Join(tls, "server.pem"), "BENCH_KEY=" + filepath.Join(tls, "server.key"),
	}, &r.Peers); err != nil {
		return s, err
	}
	s.stops = append(s.stops, s.peers.Stop)
	body, err := json.Marshal(r)
	if err != nil {
		return s, err
	}
	file := filepath.Join(s.dir, "caller.json")
	if err := os.WriteFile(file, body, 0o600); err != nil {
		return s, err
	}
	if s.caller, err = proc.Start(callerRole, []string{callerFile + "=" + file}, nil); err != nil {
		return s, err
	}
	s.stops = append(s.stops, s.caller.Stop)
	return s, nil
}

func (s *scene) stop() (err error) {
	for i := len(s.stops) - 1; i >= 0; i-- {
		err = errors.Join(err, s.stops[i]())
	}
	return err
}

// read has the caller read n bytes by one path.
func (s *scene) read(path string, n int64, check bool) (t took, err error) {
	who := s.caller
	if path == "inside" {
		who = s.plane.Child
	}
	err = who.Ask(fmt.Sprintf("%s %d %t", path, n, check), &t)
	return t, err
}

// verify reads n bytes by each path that has record batches, and compares what arrived through the product with what was sent.
func (s *scene) verify(n int64) error {
	var want string
	if err := s.runner.Ask(fmt.Sprintf("checksum %d", n), &want); err != nil {
		return err
	}
	for _, path := range paths[:3] { // the bare copy has no batches
		got, err := s.read(path, n, true)
		if err != nil {
			return err
		}
		// Flight's server is another process, with random numbers of its own.
		if got.Sum != want && path != "flight" || got.Bytes != n {
			return fmt.Errorf("%s: the caller has %d bytes with checksum %s, the source %d with %s", path, got.Bytes, got.Sum, n, want)
		}
	}
	return nil
}

// peaks are peaks of resident memory.
type peaks struct{ plane, runner, caller int64 }

// peakOf reads n bytes through the product and returns the peaks meanwhile.
func (s *scene) peakOf(n int64) (p peaks, t took, err error) {
	all := map[*proc.Child]*int64{s.plane.Child: &p.plane, s.runner: &p.runner, s.caller: &p.caller}
	for c := range all {
		if err := c.ForgetPeak(); err != nil {
			return p, t, err
		}
	}
	if t, err = s.read("product", n, false); err != nil {
		return p, t, err
	}
	for c, into := range all {
		m, err := c.Memory()
		if err != nil {
			return p, t, err
		}
		*into = m.Peak
	}
	return p, t, nil
}

var paths = []string{"inside", "product", "flight", "bare"}

// smallPart is the part of a result whose memory is compared with the whole's.
const smallPart = 16

func bench(set settings) (err error) {
	s, err := newScene(context.Background())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	set.out.Printf("%d MiB of random numbers in batches of 1 MiB; the runner's stream over TLS 1.3, zstd (fastest) left out where it gains nothing; read from the dispatcher inside the control plane, and by HTTP by a third process; Flight over TLS 1.3, uncompressed\n", set.bytes>>20)
	if err := s.verify(64 << 20); err != nil {
		return err
	}
	for _, path := range paths { // connections open, heaps grown
		if _, err := s.read(path, 64<<20, false); err != nil {
			return err
		}
	}
	part, _, err := s.peakOf(set.bytes / smallPart)
	if err != nil {
		return err
	}
	whole := peaks{}
	rates, costs := map[string][]float64{}, map[string][4]float64{}
	for i := range set.pairs {
		for j := range paths {
			path := paths[(i+j)%len(paths)] // who goes first changes
			before, err := s.cpu()
			if err != nil {
				return err
			}
			var t took
			if path == "product" {
				var p peaks
				p, t, err = s.peakOf(set.bytes)
				whole = peaks{max(whole.plane, p.plane), max(whole.runner, p.runner), max(whole.caller, p.caller)}
			} else {
				t, err = s.read(path, set.bytes, false)
			}
			if err != nil {
				return err
			}
			after, err := s.cpu()
			if err != nil {
				return err
			}
			cost := costs[path]
			for k := range cost {
				cost[k] += (after[k] - before[k]) / float64(set.pairs)
			}
			costs[path] = cost
			rates[path] = append(rates[path], float64(t.Bytes)/1e6/t.Elapsed.Seconds())
		}
		set.out.Printf("pair %d: inside %.0f MB/s, by HTTP %.0f MB/s, Flight %.0f MB/s, bare TLS %.0f MB/s\n", i+1, rates["inside"][i], rates["product"][i], rates["flight"][i], rates["bare"][i])
	}
	if set.profile != "" {
		if err := s.profile(set); err != nil {
			return err
		}
	}
	set.out.Printf("medians: inside %.0f MB/s, by HTTP %.0f MB/s, Flight %.0f MB/s, bare TLS %.0f MB/s\n",
		proc.Median(rates["inside"]), proc.Median(rates["product"]), proc.Median(rates["flight"]), proc.Median(rates["bare"]))
	in, by, flight := costs["inside"], costs["product"], costs["flight"]
	set.out.Printf("processor time of one: inside %.2f s (control plane with its caller %.2f, runner %.2f), by HTTP %.2f s (control plane %.2f, runner %.2f, caller %.2f), Flight %.2f s (source %.2f, caller %.2f)\n",
		in[0]+in[1], in[0], in[1], by[0]+by[1]+by[2], by[0], by[1], by[2], flight[2]+flight[3], flight[3], flight[2])
	set.out.Printf("over Flight (bar 0.65): inside %.2f, by HTTP %.2f; over bare TLS: inside %.2f, by HTTP %.2f: medians of the pairs\n",
		ratio(rates["inside"], rates["flight"]), ratio(rates["product"], rates["flight"]), ratio(rates["inside"], rates["bare"]), ratio(rates["product"], rates["bare"]))
	set.out.Printf("peak resident memory for %d MiB and for %d MiB: control plane %d and %d MiB, runner %d and %d, caller %d and %d\n", set.bytes/smallPart>>20, set.bytes>>20,
		part.plane>>20, whole.plane>>20, part.runner>>20, whole.runner>>20, part.caller>>20, whole.caller>>20)
	return nil
}

// cpu is the processor time so far of control plane, runner, caller and the controls' sources, in seconds.
func (s *scene) cpu() (all [4]float64, err error) {
	for i, c := range []*proc.Child{s.plane.Child, s.runner, s.caller, s.peers} {
		d, err := c.CPU()
		if err != nil {
			return all, err
		}
		all[i] = d.Seconds()
	}
	return all, nil
}

// ratio is the median of the ratios of neighbours in time.
func ratio(a, b []float64) float64 {
	var all []float64
	for i := range a {
		all = append(all, a[i]/b[i])
	}
	return proc.Median(all)
}

// profile runs one path once more under CPU profiles.
func (s *scene) profile(set settings) error {
	all := map[string]*proc.Child{"plane": s.plane.Child, "runner": s.runner, "caller": s.caller}
	for name, c := range all {
		if err := c.Profile(filepath.Join(set.profile, "bulk-"+name+".pprof")); err != nil {
			return err
		}
	}
	_, err := s.read(set.profiled, set.bytes, false)
	for _, c := range all {
		err = errors.Join(err, c.Profiled())
	}
	return err
}
