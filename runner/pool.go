package runner

import (
	"sync"
	"time"
)

// lingers is how long a goroutine that is not needed waits for the next job, and up to twice as long.
const lingers = 5 * time.Second

// pool runs jobs on goroutines that have done one before: their stacks have grown to what a work needs, which costs as much as a
// small work. The one that waits shortest is taken first, so that few do most, and the others end.
type pool struct {
	mu       sync.Mutex
	idle     []chan func() // of the goroutines that wait, the last one shortest; each has room for one job
	unneeded int           // of idle, from the first: not taken since the last trim
	trims    *time.Timer   // nil while nobody waits
	closed   bool
	all      sync.WaitGroup
}

// run runs a job, at once.
func (p *pool) run(job func()) {
	p.mu.Lock()
	if last := len(p.idle) - 1; last >= 0 {
		next := p.idle[last]
		p.idle = p.idle[:last]
		p.unneeded = min(p.unneeded, last)
		p.mu.Unlock()
		next <- job
		return
	}
	p.mu.Unlock()
	p.all.Go(func() {
		next := make(chan func(), 1)
		for job != nil {
			job()
			if !p.park(next) {
				return
			}
			job = <-next
		}
	})
}

// park puts a goroutine in line. It reports false when there will be no more jobs.
func (p *pool) park(next chan func()) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.idle = append(p.idle, next)
	if p.trims == nil {
		p.trims = time.AfterFunc(lingers, p.trim)
	}
	return true
}

// trim ends the goroutines that nobody needed since the last time.
func (p *pool) trim() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	for _, next := range p.idle[:p.unneeded] {
		close(next)
	}
	p.idle = append(p.idle[:0], p.idle[p.unneeded:]...)
	p.unneeded = len(p.idle)
	if len(p.idle) == 0 {
		p.trims = nil
		return
	}
	p.trims.Reset(lingers)
}

// close ends the goroutines that wait, and the others after their job.
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
	for _, next := range p.idle {
		close(next)
	}
	p.idle = nil
}

// wait returns when every job is done and every goroutine has ended. It comes after close.
func (p *pool) wait() { p.all.Wait() }
