package runner

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// mostUndelivered is how many ended works may wait for the acknowledgement of their results, beside one for each slot: whoever has a result
// may give the slot new work before it is acknowledged. Each has a window of chunks at most, of which there may be mostWindows, or the number
// of slots: callers that take nothing must not fill this process's memory.
const (
	mostUndelivered = 256
	mostWindows     = 16
)

// mostOrphaned bounds those whose replica is silent in the same way. They don't keep a replica that has started anew from giving
// work, and their windows add up to what one connection may have under way.
const mostOrphaned = 64

// works is the runner's table of what it runs: it is the one place that decides whether a work gets a slot (SPEC D6), and
// it never runs one id twice (SPEC D12).
type works struct {
	agent *Agent

	pool pool           // runs them
	done doneLog        // of those that went well
	open sync.WaitGroup // counts those in jobs, and what is done for them

	mu          sync.Mutex
	jobs        map[string]*work // by dispatch, until the result is delivered
	running     int              // of jobs: hold a slot
	undelivered int              // of jobs: ended, with a result that is not acknowledged yet
	held        int64            // bytes of chunks that those keep
	orphaned    int              // likewise, and their replica is silent
	fates       fates            // of every id assigned or cancelled
	spare       []*work          // memory of works that are over
	isDrain     bool
	isClosed    bool                   // nothing is taken, nor refused
	idleCh      chan struct{}          // closed when draining and nothing runs or waits
	alarm       *time.Timer            // for look
	wakeStream  func(at time.Duration) // wakeAt, made once
	alarmAt     atomic.Int64           // uptime at which it rings; 0: it does not. Written with mu held
}

func newWorks(a *Agent) *works {
	w := &works{agent: a, jobs: map[string]*work{}, idleCh: make(chan struct{})}
	w.pool.do = (*work).do
	w.done.log = a.log
	w.wakeStream = w.wakeAt
	w.alarm = time.AfterFunc(time.Hour, w.look)
	w.alarm.Stop()
	return w
}

// receive takes what comes on `work.<session>`. It runs on the connection's callback and never blocks.
func (w *works) receive(msg *nats.Msg) {
	switch bus.TypeOf(msg) {
	case "RunnerWorkAssignment", "RunnerWorkAssignments":
		w.agent.senders.Settled(msg) // first: it may make room
		came := time.Now()
		err := bus.Assignments(msg, func(m *runbusv1.RunnerWorkAssignment, from bus.Trace) { w.assign(m, from, came) })
		if err != nil {
			w.agent.log.Warn("an assignment could not be read", "error", err)
		}
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

// assign gives the assignment, which came then, a slot and starts it, or refuses it, or drops it: one that came too late, or whose id is known.
func (w *works) assign(m *runbusv1.RunnerWorkAssignment, from bus.Trace, began time.Time) {
	a := w.agent
	id := m.GetDispatchId()
	s := a.session.Load()
	if s == nil || s.id != m.GetSession() {
		a.log.Warn("an assignment of another session was dropped", "dispatch", id)
		return
	}
	at, now := began.Sub(processStart), a.clock.at(began)
	left := m.GetAcceptBy().AsTime().Sub(a.clock.atLeast(began)) // who may be wrong drops nothing: the control plane asks for a cancel of what is late
	late := left < 0

	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.isClosed:
		a.log.Warn("an assignment came after the end and was dropped unrun", "dispatch", id)
		return
	case w.fates.of(id) != 0:
		a.log.Info("an assignment that is known already was dropped", "dispatch", id)
		return
	case late:
		w.fates.remember(id, neverRun, 0, at)
		a.log.Warn("an assignment came too late and was dropped unrun", "dispatch", id)
		signal(a.doubt) // the control plane's clock may have been set back
		return
	}
	startBy := at + left
	w.fates.remember(id, answered, startBy, at)
	job := w.memory()
	job.begin(m, from, began, w.refusal())
	job.startBy = startBy
	w.jobs[id] = job
	w.open.Add(1)
	if job.refused == nil {
		w.running++
		a.fit.begin()
		w.wake(job.ends(m.GetDeadline().AsTime().Sub(now)))
	}
	w.pool.run(job)
}

// wake has look called at that uptime, or before; mu is held.
func (w *works) wake(at time.Duration) {
	if !w.rings(at) {
		w.alarmAt.Store(int64(max(at, 1)))
		w.alarm.Reset(at - uptime())
	}
}

// rings reports whether the alarm rings at that uptime, or before.
func (w *works) rings(at time.Duration) bool {
	alarm := w.alarmAt.Load()
	return alarm != 0 && time.Duration(alarm) <= at
}

// wakeAt is wake for who does not hold mu. What is due then must be where look finds it by now.
func (w *works) wakeAt(at time.Duration) {
	if w.rings(at) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wake(at)
}

// look does what time brings in every work, and sets the alarm for what comes next: one timer for all of them, since most works end
// before anything is due.
func (w *works) look() {
	now := uptime()
	w.lookAt(now)
	if at := w.done.flush(now); at > 0 { // without mu: it writes
		w.wakeAt(at)
	}
}

func (w *works) lookAt(now time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.alarmAt.Store(0) // first: what becomes due after its work was looked at sets the alarm anew
	next := time.Duration(0)
	for _, job := range w.jobs {
		if at := job.look(now); at > 0 && (next == 0 || at < next) {
			next = at
		}
	}
	if next > 0 {
		w.wake(next)
	}
}

// refusal is why no work is taken now, nil if one is; mu is held.
func (w *works) refusal() error {
	a := w.agent
	switch {
	case w.isDrain:
		return schemas.ErrRunnerOffline(a.ref.Runner, "draining")
	case w.running >= a.cfg.Concurrency:
		return a.worded(schemas.ErrRunnerBusy(a.ref.Runner, a.cfg.Concurrency), childBusy)
	case w.undelivered >= mostUndelivered+a.cfg.Concurrency, w.held >= bus.MaxWindow*int64(max(mostWindows, a.cfg.Concurrency)):
		return schemas.ErrRunnerBacklog(a.ref.Runner, w.undelivered)
	}
	return nil
}

// job is the work that runs under an id, nil if none does; mu is held.
func (w *works) job(id string) *work {
	if job := w.jobs[id]; job != nil && job.isRunning() {
		return job
	}
	return nil
}

// credentials hands a sealed bundle to the work that waits for it.
func (w *works) credentials(m *runbusv1.RunnerWorkCredentials) {
	w.mu.Lock()
	defer w.mu.Unlock()
	job := w.job(m.GetDispatchId())
	if job == nil || job.session != m.GetSession() {
		w.agent.log.Warn("credentials for a work that does not run here were dropped", "dispatch", m.GetDispatchId())
		return
	}
	select {
	case job.sealed <- m.GetSealed():
	default: // a second bundle for the same work, or one for a work without
	}
}

// cancel stops one work and says what there was to stop. An id that never ran will not run from now on, however often this is
// asked.
func (w *works) cancel(id string, reason *schemas.Error) runbusv1.CancelState {
	w.mu.Lock()
	defer w.mu.Unlock()
	if job := w.job(id); job != nil {
		job.cancel(reason)
		return runbusv1.CancelState_CANCEL_STATE_STOPPING
	}
	switch w.fates.of(id) {
	case answered:
		return runbusv1.CancelState_CANCEL_STATE_ENDED
	case 0:
		w.fates.remember(id, neverRun, 0, uptime())
	}
	return runbusv1.CancelState_CANCEL_STATE_NEVER_STARTED
}

func (w *works) cancelAll(reason *schemas.Error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, job := range w.jobs {
		if job.isRunning() {
			job.cancel(reason)
		}
	}
}

// close drops whatever is assigned from now on and cancels what runs.
func (w *works) close(reason *schemas.Error) {
	w.mu.Lock()
	w.isClosed = true
	w.mu.Unlock()
	w.pool.close()
	w.cancelAll(reason)
}

// ended frees the slot of a work, which has its result and keeps it for so long at most. It reports whether nobody seems to wait for
// that.
func (w *works) ended(job *work, delivery time.Duration) (silent bool) {
	held := job.sender.Held() + job.stream.kept()
	w.mu.Lock()
	defer w.mu.Unlock()
	if job.refused == nil {
		w.running--
		w.undelivered++
		w.held += held
		job.held = held
	}
	w.wake(job.kept(delivery))
	return job.silent
}

// silence notes that nobody seems to wait for the result of a work. It reports whether that still runs.
func (w *works) silence(job *work) (running bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	job.silent = true
	return job.isRunning()
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
	w.held -= job.held
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
	delete(w.jobs, job.id)
	switch {
	case job.refused != nil:
	case job.orphaned:
		w.orphaned--
	default:
		w.undelivered--
		w.held -= job.held
	}
	w.tellIdle()
	w.open.Done()
	if job.letGo() {
		w.keep(job)
	}
}

// leave says that the goroutine of a work has done with it, which comes before its end or after.
func (w *works) leave(job *work) {
	if job.letGo() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.keep(job)
	}
}

// mostSpare is how many works' memory is kept for others, about 1 KiB each.
const mostSpare = 256

// keep keeps the memory of a work for another one; mu is held.
func (w *works) keep(job *work) {
	if len(w.spare) < mostSpare {
		job.forget()
		w.spare = append(w.spare, job)
	}
}

// memory is that of the work that ended last, whose memory is nearest; mu is held.
func (w *works) memory() *work {
	last := len(w.spare) - 1
	if last < 0 {
		return newWork(w.agent)
	}
	job := w.spare[last]
	w.spare[last] = nil
	w.spare = w.spare[:last]
	return job
}

// drain stops taking work and returns how many works still run.
func (w *works) drain() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isDrain = true
	w.tellIdle()
	return w.running
}

// tellIdle closes idleCh once; mu is held.
func (w *works) tellIdle() {
	if !w.isDrain || w.running > 0 || w.undelivered > 0 {
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

// wait blocks until every work has ended and is delivered, at most for d. It comes after close.
func (w *works) wait(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	defer w.done.flush(uptime() + time.Second)
	defer w.alarm.Stop()
	done := make(chan struct{})
	go func() { w.open.Wait(); w.pool.wait(); close(done) }()
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
	return w.running
}

// load is 0 when idle and 1 when every slot is taken.
func (w *works) load() float64 { return float64(w.count()) / float64(w.agent.cfg.Concurrency) }

func (w *works) runningIDs() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	ids := make([]string, 0, w.running)
	for id, job := range w.jobs {
		if job.isRunning() {
			ids = append(ids, id)
		}
	}
	return ids
}
