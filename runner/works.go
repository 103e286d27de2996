package runner

import (
	"context"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// seenMost bounds the memory of dispatch ids; an assignment is accepted for seconds only, so older ids can't come back.
const seenMost = 16384

// works is the runner's table of what it runs: it is the one place that decides whether a work gets a slot (SPEC D6), and
// it never runs one id twice (SPEC D12).
type works struct {
	agent *Agent

	mu       sync.Mutex
	running  map[string]*work
	seen     map[string]bool // every id ever assigned or cancelled
	seenList []string        // the same, oldest first
	isDrain  bool
	idleCh   chan struct{} // closed when draining and nothing runs
	all      sync.WaitGroup
}

func newWorks(a *Agent) *works {
	return &works{agent: a, running: map[string]*work{}, seen: map[string]bool{}, idleCh: make(chan struct{})}
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
		w.assign(m)
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
func (w *works) assign(m *runbusv1.RunnerWorkAssignment) {
	a := w.agent
	log := a.log.With("dispatch", m.GetDispatchId())
	s := a.session.Load()
	if s == nil || s.id != m.GetSession() {
		log.Warn("an assignment of another session was dropped")
		return
	}
	late := a.clock.now().After(m.GetAcceptBy().AsTime())

	w.mu.Lock()
	if w.seen[m.GetDispatchId()] {
		w.mu.Unlock()
		log.Info("an assignment that is known already was dropped")
		return
	}
	w.remember(m.GetDispatchId())
	var refusal error
	switch {
	case late:
	case w.isDrain:
		refusal = schemas.ErrRunnerOffline(a.ref.Runner, "draining")
	case len(w.running) >= a.cfg.Concurrency:
		refusal = schemas.ErrRunnerBusy(a.ref.Runner, a.cfg.Concurrency)
	}
	var job *work
	if !late {
		job = newWork(a, m, log)
		if refusal == nil {
			w.running[job.id] = job
		}
		w.all.Add(1)
	}
	w.mu.Unlock()

	if late {
		log.Warn("an assignment came too late and was dropped unrun")
		return
	}
	go func() {
		defer w.all.Done()
		if refusal != nil {
			log.Info("work refused", "reason", refusal)
			job.refuse(refusal)
			return
		}
		job.run()
		w.release(job.id)
	}()
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

// cancel stops one work and says what there was to stop. An id that never came is refused from now on.
func (w *works) cancel(id string, reason *schemas.Error) runbusv1.CancelState {
	w.mu.Lock()
	defer w.mu.Unlock()
	if job := w.running[id]; job != nil {
		job.cancel(reason)
		return runbusv1.CancelState_CANCEL_STATE_STOPPING
	}
	if w.seen[id] {
		return runbusv1.CancelState_CANCEL_STATE_ENDED
	}
	w.remember(id)
	return runbusv1.CancelState_CANCEL_STATE_NEVER_STARTED
}

func (w *works) cancelAll(reason *schemas.Error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, job := range w.running {
		job.cancel(reason)
	}
}

// remember notes an id; mu is held.
func (w *works) remember(id string) {
	w.seen[id] = true
	w.seenList = append(w.seenList, id)
	if len(w.seenList) > seenMost {
		delete(w.seen, w.seenList[0])
		w.seenList = w.seenList[1:]
	}
}

func (w *works) release(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.running, id)
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
	if !w.isDrain || len(w.running) > 0 {
		return
	}
	select {
	case <-w.idleCh:
	default:
		close(w.idleCh)
	}
}

// idle is closed when the runner drains and nothing runs any more.
func (w *works) idle() <-chan struct{} { return w.idleCh }

// wait blocks until every goroutine of a work has ended, at most for d.
func (w *works) wait(d time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	done := make(chan struct{})
	go func() { w.all.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
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

func (w *works) ids() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	ids := make([]string, 0, len(w.running))
	for id := range w.running {
		ids = append(ids, id)
	}
	return ids
}
