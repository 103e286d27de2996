package cp

import (
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// What decides how much memory is kept beside what is in use.
const (
	memoryEvery = 2 * time.Second
	// A heap below smallHeap is left to Go's defaults.
	smallHeap = 64 << 20
	// The live heap of a large fleet lives long, and little is allocated while nothing happens: the collector lets as much of it be garbage
	// as is allocated in collectEvery, but calmPercent at least, and busyPercent at most, as while a fleet connects or results pass.
	busyPercent, calmPercent = 100, 5
	collectEvery             = 3 // seconds
	// More than a part in worthPart of what is in use, and worthReturning, must be left over to be given back to the system, and it must
	// have been calm for calmFor. What gathers while it stays calm is given back every returnEvery: that costs a collection.
	worthPart      = 20
	worthReturning = 8 << 20
	calmFor        = 3  // looks
	returnEvery    = 15 // looks
)

// memory watches how much is allocated and how much is left over.
type memory struct {
	samples []metrics.Sample
	allocs  uint64 // at the last look
	calm    int    // looks since it was busy
	kept    int    // looks since something was given back, or since it was busy
	percent int
	settled uint64 // what was held after the last return, or less by now
}

func newMemory() *memory {
	m := &memory{percent: busyPercent, kept: returnEvery}
	for _, name := range []string{
		"/gc/heap/allocs:bytes", "/gc/heap/live:bytes", "/memory/classes/heap/objects:bytes", "/memory/classes/heap/unused:bytes",
		"/memory/classes/heap/free:bytes", "/memory/classes/heap/stacks:bytes",
	} {
		m.samples = append(m.samples, metrics.Sample{Name: name})
	}
	return m
}

// keepMemory has the process hold little more memory than it uses, until ctx ends: thousands of runners that connect at once leave
// grown stacks and garbage behind that the collector alone would keep for minutes. GOGC and GOMEMLIMIT, if set, are left to whoever
// set them.
func keepMemory(ctx context.Context) error {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return nil
	}
	defer debug.SetGCPercent(busyPercent)
	m := newMemory()
	tick := time.NewTicker(memoryEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			m.look()
		case <-ctx.Done():
			return nil
		}
	}
}

func (m *memory) look() {
	metrics.Read(m.samples)
	value := func(i int) uint64 { return m.samples[i].Value.Uint64() }
	allocs, live := value(0), value(1)
	held := value(2) + value(3) + value(4) + value(5)
	percent, returns := m.decide(allocs, live, held)
	if percent != m.percent {
		m.percent = percent
		debug.SetGCPercent(percent)
	}
	if !returns {
		return
	}
	runtime.GC() // halves the stacks that are used little
	debug.FreeOSMemory()
	metrics.Read(m.samples)
	m.settled = value(2) + value(3) + value(4) + value(5)
}

// decide is what to do when so many bytes were allocated ever, are live since the last collection, and are held.
func (m *memory) decide(allocs, live, held uint64) (percent int, returns bool) {
	rate := (allocs - m.allocs) / uint64(memoryEvery/time.Second)
	m.allocs = allocs
	percent = busyPercent
	if live > smallHeap {
		percent = int(min(max(100*collectEvery*rate/live, calmPercent), busyPercent))
	}
	if rate*collectEvery > live {
		m.calm, m.kept = 0, returnEvery
		return percent, false
	}
	m.calm++
	m.kept++
	if m.settled > held {
		m.settled = held // runners have left
	}
	if live <= smallHeap || m.calm < calmFor || m.kept < returnEvery || held <= m.settled+m.settled/worthPart+worthReturning {
		return percent, false
	}
	m.kept = 0
	return percent, true
}
