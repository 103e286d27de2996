package runner

import (
	"sync"
	"time"
)

// lingers is how long a goroutine that is not needed waits for the next job, and up to twice as long.
const lingers = 5 * time.Second

// pool runs works on goroutines that have run one before: their stacks have grown to what a work needs, which costs as much as a
// small work. The one that waits shortest is taken first, so that few do most, and the others end.
//
// A work that comes wakes one goroutine, unless one is on its way already; that one takes a work and, if there are more, wakes the next
// before it runs its own. So works that wait for their source hold up no other, and those that come together and don't wait are run
// one after the other by one or two goroutines. That, and memory for messages that is the goroutine's, took a seventh off what a small work
// costs (measured at 64 in flight).
type pool struct {
	do func(*work, *workspace)

	mu       sync.Mutex
	queue    []*work
	taken    int             // of queue, from the first
	coming   bool            // a goroutine is on its way to the queue
	idle     []chan struct{} // of the goroutines that wait, the last one shortest; each has room for one
	unneeded int             // of idle, from the first: not taken since the last trim
	trims    *time.Timer     // nil while nobody waits
	closed   bool
	all      sync.WaitGroup
}

// run has a work run, at once.
func (p *pool) run(job *work) {
	p.mu.Lock()
	if p.taken > len(p.queue)/2 && len(p.queue) == cap(p.queue) {
		p.queue = p.queue[:copy(p.queue, p.queue[p.taken:])]
		p.taken = 0
	}
	p.queue = append(p.queue, job)
	p.call()
}

// call has a goroutine come if there is something to run and none is on its way. mu is held, and given back.
func (p *pool) call() {
	if p.coming || p.taken == len(p.queue) {
		p.mu.Unlock()
		return
	}
	p.coming = true
	if last := len(p.idle) - 1; last >= 0 {
		next := p.idle[last]
		p.idle = p.idle[:last]
		p.unneeded = min(p.unneeded, last)
		p.mu.Unlock()
		next <- struct{}{}
		return
	}
	p.mu.Unlock()
	p.all.Go(p.serve)
}

// serve runs works until the pool is closed, or nobody needs this goroutine.
func (p *pool) serve() {
	m := new(workspace)
	called := make(chan struct{}, 1)
	for came := true; ; {
		job, ends := p.next(came, called)
		switch {
		case ends:
			return
		case job != nil:
			p.do(job, m)
			came = false
		default:
			if _, came = <-called; !came {
				return
			}
		}
	}
}

// next takes a work off the queue, for a goroutine that was called if it came for that. Without one the goroutine is in line, and is
// to wait for its call, or it ends.
func (p *pool) next(came bool, called chan struct{}) (job *work, ends bool) {
	p.mu.Lock()
	if came {
		p.coming = false
	}
	if p.taken < len(p.queue) {
		job = p.queue[p.taken]
		p.queue[p.taken] = nil
		p.taken++
		p.call()
		return job, false
	}
	defer p.mu.Unlock()
	p.queue, p.taken = p.queue[:0], 0
	if p.closed {
		return nil, true
	}
	p.idle = append(p.idle, called)
	if p.trims == nil {
		p.trims = time.AfterFunc(lingers, p.trim)
	}
	return nil, false
}

// trim ends the goroutines that nobody needed since the last time.
func (p *pool) trim() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	for _, called := range p.idle[:p.unneeded] {
		close(called)
	}
	p.idle = append(p.idle[:0], p.idle[p.unneeded:]...)
	p.unneeded = len(p.idle)
	if len(p.idle) == 0 {
		p.trims = nil
		return
	}
	p.trims.Reset(lingers)
}

// close ends the goroutines that wait, and the others when nothing is left to run.
func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.closed = true
	if p.trims != nil {
		p.trims.Stop()
	}
	for _, called := range p.idle {
		close(called)
	}
	p.idle = nil
}

// wait returns when every work is done and every goroutine has ended. It comes after close.
func (p *pool) wait() { p.all.Wait() }
