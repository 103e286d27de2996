package dispatch

import (
	"time"
)

// The dispatcher's clock, its minder, and the guards of slow calls. A dispatch has no timer, and its sink is called in the
// goroutine of Fetch, which waits in one place: most dispatches end within a few milliseconds, and neither timers nor goroutines are
// free, nor is a wait for two things. Instead one goroutine looks at all of them now and then.

// tickEvery is how often running dispatches are looked at. It is the precision of the limits of time, and the delay with which it is
// seen that a caller has gone.
const tickEvery = 20 * time.Millisecond

// late is how long after the one before a look comes at which this process, or all of this machine, has stood still for a while.
const late = 4 * tickEvery

// mostSpared is how much longer than it should one wait for a runner's word may take since this process stood still meanwhile. A process that
// gets too little of the processor is late at every look.
const mostSpared = 10 * time.Second

// clock is a monotonic time in nanoseconds, from 1 on.
func (d *Dispatcher) clock() int64 { return int64(time.Since(d.began)) + 1 }

// clockAt is clock at a time that Deps.Now gave: the processor's clock is asked for it once, unless Now is somebody's own.
func (d *Dispatcher) clockAt(now time.Time) int64 {
	if d.ownClock {
		return d.clock()
	}
	return int64(now.Sub(d.began)) + 1
}

// mind looks at the running dispatches, as long as there are any, until the dispatcher is closed.
func (d *Dispatcher) mind() {
	defer close(d.minded)
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	for {
		tick.Stop()
		select {
		case <-d.busy:
		case <-d.closing:
			return
		}
		tick.Reset(tickEvery)
		for d.look() {
			select {
			case <-tick.C:
			case <-d.closing:
				return
			}
		}
	}
}

// look wakes the dispatches that are out of time, or whose caller has gone, gives a guard to those whose sink does not return, and has the
// audit told of those that have run for a while. It returns false when nothing runs.
//
// A look that comes late tells that this process stood still: what came meanwhile may not be read yet.
func (d *Dispatcher) look() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	now, tick := d.clock(), d.ticks.Add(1)
	if gap := now - d.coarse.Load(); gap >= int64(late) {
		d.stood.Add(gap)
	}
	d.coarse.Store(now)
	for r := range d.running.all {
		if at := r.wakeAt.Load(); at > 0 && now >= at || closed(r.gone) {
			r.wake()
		}
		if since := r.calling.Load(); since > 0 && tick-since > 1 {
			d.protect(r, since)
		}
		if since := r.unsaid.Load(); since > 0 && tick-since > 1 {
			d.tellStart(r)
		}
	}
	d.minding = d.running.count > 0
	return d.minding
}

// tellStart has the audit told that a run was accepted, unless it has ended.
func (d *Dispatcher) tellStart(r *run) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.unsaid.Load() > 0 {
		r.unsaid.Store(0)
		d.noteStart(r)
	}
}

// tellStarts has the audit, which takes no more afterwards, told of every run that was accepted, and from now on at once.
func (d *Dispatcher) tellStarts() {
	d.hasty.Store(true) // first: begun tells what is not seen here
	d.mu.Lock()
	defer d.mu.Unlock()
	for r := range d.running.all {
		d.tellStart(r)
	}
}

// stoodSince is how long this process has stood still since it was before altogether, a standstill that no look has told of yet included.
// Something runs.
func (d *Dispatcher) stoodSince(before int64) int64 {
	d.mu.Lock() // no look is half done
	defer d.mu.Unlock()
	stood := d.stood.Load() - before
	if gap := d.clock() - d.coarse.Load(); gap >= int64(late) {
		stood += gap
	}
	return stood
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// guard looks at what may end a run while its sink is being called, and ends it then. A caller who doesn't take what comes thus
// can't keep a deadline or a cancel from reaching the runner.
type guard struct {
	sink    Sink          // of the run
	over    chan struct{} // closed when the call has returned
	verdict chan *ending  // then comes how the run ended in between, nil if it did not
}

// guarded is the value of run.calling while a guard looks after the call. Otherwise it is the tick at which the call began, or 0
// for none.
const guarded = -1

// called is to be called before a call of the sink, and returned after it.
func (d *Dispatcher) called(run *run) { run.calling.Store(d.ticks.Load()) }

// returned returns how the run ended during the call, nil if it did not.
func (r *run) returned() *ending {
	if r.calling.Swap(0) != guarded {
		return nil
	}
	r.hadGuard = true
	close(r.guard.over)
	return <-r.guard.verdict
}

// protect gives a call that began at this tick a guard, unless it has returned.
func (d *Dispatcher) protect(run *run, since int64) {
	over, verdict := make(chan struct{}), make(chan *ending, 1)
	// Nobody else reads or writes them before calling is guarded.
	run.guard.over, run.guard.verdict = over, verdict
	if run.calling.CompareAndSwap(since, guarded) {
		go func() { verdict <- d.stand(run, over) }()
	}
}

// stand is the goroutine of a guard.
func (d *Dispatcher) stand(run *run, over <-chan struct{}) *ending {
	sink := run.guard.sink
	for {
		if end := d.overtaken(run); end != nil {
			sink.Abandon()
			return end
		}
		select {
		case <-over:
			return nil
		case <-run.stream.ready():
		case <-run.gone:
		}
	}
}
