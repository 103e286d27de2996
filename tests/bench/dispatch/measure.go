package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
)

// productPath is the name of the path that is compared with the others.
const productPath = "product"

// path is one dispatch from begin to end.
type path func(ctx context.Context) error

// figures are one repetition of one path.
type figures struct {
	perSecond float64
	p50, p99  time.Duration
	cpu       time.Duration // of both processes, a dispatch
	runnerCPU time.Duration
	messages  float64 // of the dispatcher's connection, a dispatch: only the product's path has some
}

type meter struct {
	children children
	waiting  *nats.Conn
	settings settings
}

// messages counts what the dispatcher's connection has sent and received.
func (m meter) messages() uint64 {
	s := m.waiting.Stats()
	return s.InMsgs + s.OutMsgs
}

// measure runs the path of that name in a closed loop.
func (m meter) measure(ctx context.Context, name string, p path, inFlight int) (figures, error) {
	child := m.children.of(name)
	if err := loop(ctx, p, inFlight, m.settings.warm, nil); err != nil {
		return figures{}, err
	}
	runtime.GC()
	hereBefore := cpuHere()
	thereBefore, err := child.cpu()
	if err != nil {
		return figures{}, err
	}
	messages := m.messages()
	took := make([][]time.Duration, inFlight)
	began := time.Now()
	if err := loop(ctx, p, inFlight, m.settings.span, took); err != nil {
		return figures{}, err
	}
	elapsed := time.Since(began)
	here := cpuHere() - hereBefore
	there, err := child.cpu()
	if err != nil {
		return figures{}, err
	}
	there -= thereBefore
	all := slices.Concat(took...)
	slices.Sort(all)
	n := len(all)
	if n == 0 {
		return figures{}, fmt.Errorf("no dispatch ended within %s", m.settings.span)
	}
	return figures{
		perSecond: float64(n) / elapsed.Seconds(), p50: all[n/2], p99: all[n*99/100],
		cpu: (here + there) / time.Duration(n), runnerCPU: there / time.Duration(n),
		messages: float64(m.messages()-messages) / float64(n),
	}, nil
}

// loop keeps inFlight dispatches under way for span. The times go into took if it is not nil.
func loop(ctx context.Context, p path, inFlight int, span time.Duration, took [][]time.Duration) error {
	end := time.Now().Add(span)
	failed := make(chan error, inFlight)
	var all sync.WaitGroup
	for i := range inFlight {
		all.Go(func() {
			for {
				began := time.Now()
				if began.After(end) {
					return
				}
				if err := p(ctx); err != nil {
					failed <- err
					return
				}
				if took != nil {
					took[i] = append(took[i], time.Since(began))
				}
			}
		})
	}
	all.Wait()
	select {
	case err := <-failed:
		return err
	default:
		return ctx.Err()
	}
}

func cpuHere() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// profile runs a path once more under CPU profiles of both processes, and writes what they have allocated.
func (m meter) profile(ctx context.Context, name string, p path, level int) error {
	child := m.children.of(name)
	base := filepath.Join(m.settings.profile, fmt.Sprintf("%s-%d", name, level))
	f, err := os.Create(base + "-plane.pprof")
	if err != nil {
		return err
	}
	defer f.Close()
	if err := child.command("profile " + base + "-runner.pprof"); err != nil {
		return err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return err
	}
	err = loop(ctx, p, level, m.settings.sampled, nil)
	pprof.StopCPUProfile()
	return errors.Join(err, child.command("profiled "+base+"-runner-allocs.pprof"), writeAllocs(base+"-plane-allocs.pprof"))
}

// writeAllocs writes what this process has allocated since its start.
func writeAllocs(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(pprof.Lookup("allocs").WriteTo(f, 0), f.Close())
}

func perSecond(f figures) float64 { return f.perSecond }
func p50(f figures) float64       { return float64(f.p50) }
func p99(f figures) float64       { return float64(f.p99) }
func cpu(f figures) float64       { return float64(f.cpu) }
func runnerCPU(f figures) float64 { return float64(f.runnerCPU) }
func messages(f figures) float64  { return f.messages }

func micro(ns float64) string { return fmt.Sprintf("%.0f us", ns/1000) }
