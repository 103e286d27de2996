package runner

import (
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// The share of one processor from which on a process gets them all, and that below which it gives them back, looked at every fitEvery
// while there is work: that many looks in a row, so that it doesn't go to and fro, nor follow a burst. With all of them the same work
// uses about a third more, hence shares that are near to one another. A large result gets them all at once: it is encoded, compressed and
// sent at the same time.
const (
	busyShare = 0.85
	calmShare = 0.75
	fitEvery  = 50 * time.Millisecond
	busyLooks = 4
	calmLooks = 20
)

// load is what the decision knows. Uptimes and processor times are of this process; time that only went by while it polled is not used.
type load struct {
	wide       bool          // it has all processors
	against    int           // looks in a row, the last ones, that found otherwise
	seen, used time.Duration // uptime and processor time at the last look
}

// look decides by the processor time that was used since the last look, and by whether a large result was sent. It reports whether wide
// has changed.
func (l *load) look(now, used time.Duration, large bool) (changed bool) {
	share := float64(used-l.used) / float64(max(now-l.seen, 1))
	l.seen, l.used = now, used
	needed := busyLooks
	switch {
	case l.wide:
		needed = calmLooks
		if large || share >= calmShare {
			l.against = 0
			return false
		}
	case large:
		l.against = busyLooks
	case share < busyShare:
		l.against = 0
		return false
	}
	if l.against++; l.against < needed {
		return false
	}
	l.wide, l.against = !l.wide, 0
	return true
}

// processors fits Go's processors (GOMAXPROCS) to what the process has to do: one while its works mostly wait, all of them from the moment
// on that one is not enough. With all of them Go wakes another one for nearly every goroutine that becomes ready, which finds its work
// done, or takes it away from where its memory is: a fifth of what small works cost at 1, 16 and 64 in flight (measured on two processors:
// 57, 16.1 and 11.9 us, with one 49, 13.1 and 9.7).
type processors struct {
	watching atomic.Bool  // the timer runs
	large    atomic.Bool  // a large result was sent since the last look
	wide     atomic.Bool  // load.wide, for narrow
	polled   atomic.Int64 // processor time of those who only polled, in all

	mu     sync.Mutex
	load   load
	timer  *time.Timer
	needed func() bool // there is work
	closed bool
}

// fitProcessors begins with one processor; nil if there is only one, or GOMAXPROCS is somebody else's decision. needed says whether
// there is work. It is for the whole process.
func fitProcessors(needed func() bool) *processors {
	if os.Getenv("GOMAXPROCS") != "" || runtime.GOMAXPROCS(0) == 1 {
		return nil
	}
	runtime.GOMAXPROCS(1)
	p := &processors{needed: needed}
	p.timer = time.AfterFunc(time.Hour, p.look)
	p.timer.Stop()
	return p
}

// begin says that there is work. A nil p does nothing.
func (p *processors) begin() {
	if p == nil || p.watching.Load() || !p.watching.CompareAndSwap(false, true) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.load.seen, p.load.used = uptime(), p.used()
		p.timer.Reset(fitEvery)
	}
}

// sendsLarge says that a large result is being sent. A nil p does nothing.
func (p *processors) sendsLarge() {
	if p != nil {
		p.large.Store(true)
	}
}

// narrow reports whether the process has one processor because that is enough. It is not for a nil p.
func (p *processors) narrow() bool { return p != nil && !p.wide.Load() }

// polls says that a goroutine has used the processor for so long only because nobody else needed it.
func (p *processors) polls(d time.Duration) { p.polled.Add(int64(d)) }

// used is the processor time of this process but for that.
func (p *processors) used() time.Duration { return processorTime() - time.Duration(p.polled.Load()) }

// look looks until there is no work any more, and one processor.
func (p *processors) look() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	if p.load.look(uptime(), p.used(), p.large.Swap(false)) {
		p.wide.Store(p.load.wide)
		if p.load.wide {
			runtime.SetDefaultGOMAXPROCS()
		} else {
			runtime.GOMAXPROCS(1)
		}
	}
	if !p.load.wide && !p.needed() {
		p.watching.Store(false)
		if !p.needed() || !p.watching.CompareAndSwap(false, true) { // else some came in between
			return
		}
	}
	p.timer.Reset(fitEvery)
}

// close gives the process all its processors. A nil p does nothing.
func (p *processors) close() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.wide.Store(true)
	p.timer.Stop()
	runtime.SetDefaultGOMAXPROCS()
}

// processorTime is what this process has used.
func processorTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0 // then one processor is thought enough
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
