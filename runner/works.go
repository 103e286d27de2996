package runner

import (
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// seenMost bounds the memory of dispatch ids; an assignment is accepted for seconds only, so older ids can't come back.
const seenMost = 16384

// mostUndelivered is how many ended works may wait for the acknowledgement of their results beside those that run, or the number
// of slots if that is more; each has a window of chunks at most: callers that take nothing must not fill this process's memory.
const mostUndelivered = 16

// mostOrphaned bounds those whose replica is silent in the same way. They don't keep a replica that has started anew from giving
// work, and their windows add up to what one connection may have under way.
const mostOrphaned = 64

// fate is what became of a dispatch id.
type fate uint8

const (
	neverRun fate = iota + 1 // cancelled before it came, or dropped as late: it will not run
	answered                 // it runs, or ran, or was refused: its result tells
)

// works is the runner's table of what it runs: it is the one place that decides whether a work gets a slot (SPEC D6), and
// it never runs one id twice (SPEC D12).
type works struct {
	agent *Agent

	mu          sync.Mutex
	running     map[string]*work // each holds a slot
	undelivered int              // ended, with a result that is not acknowledged yet
	orphaned    int              // likewise, and their replica is silent
	fates       map[string]fate  // of every id ever assigned or cancelled
	ids         []string         // of fates, oldest first
	isDrain     bool
	isClosed    bool          // nothing is taken, nor refused
	idleCh      chan struct{} // closed when draining and nothing runs or waits
	all         sync.WaitGroup
	next        chan func()   // unbuffered: takes a job to a goroutine that has done one
	over        chan struct{} // closed with isClosed
}

func newWorks(a *Agent) *works {
	return &works{agent: a, running: map[string]*work{}, fates: map[string]fate{}, idleCh: make(chan struct{}), next: make(chan func()), over: make(chan struct{})}
}

// receive takes what comes on `work.<session>`. It runs on the connection's callback and never blocks.
func (w *works) receive(msg *nats.Msg) {
	switch bus.TypeOf(msg) {
	case "RunnerWorkAssignment":
		m := new(runbusv1.RunnerWorkAssignment)
		if err := bus.Decode(msg, m); err != nil {
			w.agent.log.Warn("an assignment could not be read", "error", err)
			return
		}
		w.assign(m, bus.TraceOf(msg))
	case "RunnerWorkCredentials":
		m := new(runbusv1.RunnerWorkCredentials)
		if err := bus.Decode(msg, m); err != nil {
			w.agent.log.Warn("credentials could not be read", "error", err)
			return
		}
		w.credentials(m)
	default:
		w.agent.log.Warn("unknown message on the work subject", "type", bus.TypeOf(msg))
	}
}

// assign gives the assignment a slot and starts it, or refuses it, or drops it: one that came too late, or whose id is known.
func (w *works) assign(m *runbusv1.RunnerWorkAssignment, from bus.Trace) {
	a := w.agent
	id := m.GetDispatchId()
	log := a.log.With("dispatch", id)
	s := a.session.Load()
	if s == nil || s.id != m.GetSession() {
		log.Warn("an assignment of another session was dropped")
		return
	}
	late := a.clock.now().After(m.GetAcceptBy().AsTime())

	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.isClosed:
		log.Warn("an assignment came after the end and was dropped unrun")
		return
	case w.fates[id] != 0:
		log.Info("an assignment that is known already was dropped")
		return
	case late:
		w.remember(id, neverRun)
		log.Warn("an assignment came too late and was dropped unrun")
		return
	}
	w.remember(id, answered)
	job := newWork(a, m, from, log)
	if reason := w.refusal(); reason != nil {
		log.Info("work refused", "reason", reason)
		w.start(func() { job.deliver(job.refuse(reason)) })
		return
	}
	w.running[id] = job
	w.start(func() {
		result := job.run()
		w.ended(id) // first: whoever has the result may count on the slot
		job.deliver(result)
		w.delivered(job)
	})
}

// lingers is how long a goroutine waits for the next job: its stack has grown to what a work needs, which costs as much as a
// small work.
const lingers = 5 * time.Second

// start runs a job on a goroutine that has done one, or a new one.
func (w *works) start(job func()) {
	select {
	case w.next <- job:
		return
	default:
	}
	w.all.Go(func() {
		job()
		timer := time.NewTimer(lingers)
		defer timer.Stop()
		for {
			select {
			case job := <-w.next:
				job()
				timer.Reset(lingers)
			case <-timer.C:
				return
			case <-w.over:
				return
			}
		}
	})
}

// refusal is why no work is taken now, nil if one is; mu is held.
func (w *works) refusal() error {
	a := w.agent
	switch {
	case w.isDrain:
		return schemas.ErrRunnerOffline(a.ref.Runner, "draining")
	case len(w.running) >= a.cfg.Concurrency:
		return schemas.ErrRunnerBusy(a.ref.Runner, a.cfg.Concurrency)
	case w.undelivered >= max(mostUndelivered, a.cfg.Concurrency):
		return schemas.ErrRunnerBacklog(a.ref.Runner, w.undelivered)
	}
	return nil
}

// credentials hands a sealed bundle to the work that waits for it.
func (w *works) credentials(m *runbusv1.RunnerWorkCredentials) {
	w.mu.Lock()
	job := w.running[m.GetDispatchId()]
	w.mu.Unlock()
	if job == nil || job.session != m.GetSession() {
		w.agent.log.Warn("credentials for a work that does not run here were dropped", "dispatch", m.GetDispatchId())
		return
	}
	select {
	case job.sealed <- m.GetSealed():
	default: // a second bundle for the same work
	}
}

// cancel stops one work and says what there was to stop. An id that never ran will not run from now on, however often this is
// asked.
func (w *works) cancel(id string, reason *schemas.Error) runbusv1.CancelState {
	w.mu.Lock()
	defer w.mu.Unlock()
	if job := w.running[id]; job != nil {
		job.cancel(reason)
		return runbusv1.CancelState_CANCEL_STATE_STOPPING
	}
	switch w.fates[id] {
	case answered:
		return runbusv1.CancelState_CANCEL_STATE_ENDED
	case 0:
		w.remember(id, neverRun)
	}
	return runbusv1.CancelState_CANCEL_STATE_NEVER_STARTED
}

func (w *works) cancelAll(reason *schemas.Error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, job := range w.running {
		job.cancel(reason)
	}
}

// close drops whatever is assigned from now on and cancels what runs.
func (w *works) close(reason *schemas.Error) {
	w.mu.Lock()
	if !w.isClosed {
		w.isClosed = true
		close(w.over)
	}
	w.mu.Unlock()
	w.cancelAll(reason)
}

// remember notes what became of an id; mu is held.
func (w *works) remember(id string, f fate) {
	w.fates[id] = f
	w.ids = append(w.ids, id)
	if len(w.ids) > seenMost {
		delete(w.fates, w.ids[0])
		w.ids = w.ids[1:]
	}
}

// ended frees the slot of a work.
func (w *works) ended(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.running, id)
	w.undelivered++
}

// orphan notes that nobody seems to wait for the result of a work that has ended. It reports whether there is room to keep it for
// a replica that comes back.
func (w *works) orphan(job *work) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if job.delivered {
		return true
	}
	if w.orphaned >= mostOrphaned || job.orphaned {
		return false
	}
	w.undelivered--
	w.orphaned++
	job.orphaned = true
	w.tellIdle()
	return true
}

// delivered ends what ended, or orphan, began.
func (w *works) delivered(job *work) {
	w.mu.Lock()
	defer w.mu.Unlock()
	job.delivered = true
	if job.orphaned {
		w.orphaned--
	} else {
		w.undelivered--
	}
	w.tellIdle()
}

// drain stops taking work and returns how many works still run.
func (w *works) drain() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isDrain = true
	w.tellIdle()
	return len(w.running)
}

// tellIdle closes idleCh once; mu is held.
func (w *works) tellIdle() {
	if !w.isDrain || len(w.running) > 0 || w.undelivered > 0 {
		return
	}
	select {
	case <-w.idleCh:
	default:
		close(w.idleCh)
	}
}

// idle is closed when the runner drains, nothing runs any more and every result that somebody waits for is acknowledged.
func (w *works) idle() <-chan struct{} { return w.idleCh }

// wait blocks until every goroutine of a work has ended, at most for d. It comes after close.
func (w *works) wait(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	done := make(chan struct{})
	go func() { w.all.Wait(); close(done) }()
	select {
	case <-done:
	case <-timer.C:
	}
}

func (w *works) draining() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.isDrain
}

func (w *works) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.running)
}

// load is 0 when idle and 1 when every slot is taken.
func (w *works) load() float64 { return float64(w.count()) / float64(w.agent.cfg.Concurrency) }

func (w *works) runningIDs() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	ids := make([]string, 0, len(w.running))
	for id := range w.running {
		ids = append(ids, id)
	}
	return ids
}
