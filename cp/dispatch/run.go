package dispatch

import (
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oklog/ulid/v2"
	oteltrace "go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/registry"
	"github.com/org-runink/runbus/cp/trace"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Limits of what one request may carry beside its limits of rows and bytes.
const (
	maxRequest = 512 << 10 // encoded, so that the assignment fits into one message
	maxSecrets = 256 << 10 // names and values
)

// run is one dispatch from its begin to its end. Its memory is another's afterwards, if all went well: then nobody holds it any more who
// might still act (recycle). What is not marked otherwise belongs to the goroutine of Fetch, or to the guard that acts for it while it
// is in a call of the sink.
type run struct {
	facts

	receiver  bus.Receiver          // of stream
	nudge     func()                // receiver.Nudge
	shown     func() trace.Timeline // timeline
	watch     registry.Watch
	opening   audit.Opening
	event     audit.Brief             // memory for that of its end
	details   [8]audit.Detail         // …and for its details
	body      []byte                  // …and for the assignment
	update    runbusv1.RunFetchUpdate // …for the progress that the first chunk stands for,
	updateAt  timestamppb.Timestamp   // …and for its time
	lastThere string                  // there, of this run or the one before

	next *run // in Dispatcher.running; guarded by its mu

	asked   atomic.Bool  // Cancel or Close asks it to stop
	open    atomic.Bool  // receiver is in use: who has something for the run wakes it there
	wakeAt  atomic.Int64 // time at which it is to be woken: due or lingers; 0 for none
	calling atomic.Int64 // see called
	unsaid  atomic.Int64 // tick at which it was accepted, while the audit is not told of that; what sets it to 0 holds mu
	guard   guard

	mu    sync.Mutex // guards what Running and the timeline show; and all facts, when they are another's
	steps [8]PhaseAt // memory for phases: those of a fetch without credentials
}

// facts are what a run begins with anew.
type facts struct {
	id       string
	subject  string // of audit events: `dispatch:` and the id
	caller   auth.Principal
	actor    string                    // the caller, in audit events
	named    string                    // runner as the caller named it
	fetch    *runbusv1.RunFetchRequest // the caller's, as it is; not read any more when the assignment was accepted
	sized    sized                     // of it in an assignment
	kind     string                    // of its source
	secrets  map[string]string
	timeout  time.Duration
	phased   bool // the outcome is to have the phases
	began    time.Time
	deadline time.Time
	endsAt   int64 // deadline, by Dispatcher.clock
	replica  string
	here     string // who did it, in the timeline: this replica
	there    string // …or the runner; set once it is selected
	now      func() time.Time

	runner          *registry.Candidate // set once selected; Ref.Runner is empty before. It may be others' too
	accepted        bool
	assignedAt      time.Time
	acceptedAt      time.Time
	firstRow        time.Time
	streaming       bool // the caller was told that rows come
	completed       bool
	credentialsRead bool
	trace           bus.Trace   // of what is sent for the run
	live            *trace.Live // its timeline
	why             string      // for the timeline: what a run that did not get on waited for

	stream   stream
	over     ending          // memory for how the runner says that it ended
	sum      bus.Digest      // over the chunks that were relayed
	wire     int64           // …and their bytes
	gone     <-chan struct{} // closed when the caller has gone; stays as it is from enter on
	hadGuard bool            // a call of the sink had one

	due     int64 // time, by Dispatcher.clock, at which the run is out of time: to be accepted first, then to end
	stood   int64 // value of Dispatcher.stood up to which due was put off
	spent   int64 // how far due was put off, of Dispatcher.spare
	lingers int64 // time at which a lost runner's last words are no longer waited for; 0 while it isn't lost

	// Guarded by mu.
	span        oteltrace.Span
	pid         int64     // of the process that accepted
	lastRow     time.Time // when the last rows came
	phases      []PhaseAt
	ended       time.Time
	rows, bytes int64
}

const subjectPrefix = "dispatch:"

// nobody is the runner of a run for which none is selected.
var nobody registry.Candidate

// newMemory is memory of a run that is nobody's.
func newMemory() any {
	r := &run{}
	r.nudge, r.shown = r.receiver.Nudge, r.timeline
	return r
}

// recycle gives the memory of a run to others. One that was cancelled, or went wrong, may still be in somebody's hands: that of one
// which completed is not, once its assignments are written: a runner that guesses ids sends results before. Its watch has ended, and who
// found it among the running ones had the lock that leave takes. Recorder and stream keep it, but take its lock, and know when it is
// another's. Who did it stays in opening, to be compared with the next one's.
func (d *Dispatcher) recycle(r *run) {
	if !r.asked.Load() && !r.hadGuard && r.receiver.Written() {
		r.guard.sink, r.fetch, r.secrets = nil, nil, nil
		d.memory.Put(r)
	}
}

// newRun checks a request and gives it its id, limits and deadline. Nothing has been touched when it returns an error; the run
// is there all the same, for the record.
func (d *Dispatcher) newRun(req Request, id string) (*run, error) {
	now := d.d.Now()
	r, _ := d.memory.Get().(*run)
	r.asked.Store(false)
	r.mu.Lock()
	defer r.mu.Unlock()
	actor := r.actor // of the run before: mostly the same
	if actor == "" || r.caller.Name != req.Caller.Name || r.caller.Role != req.Caller.Role {
		actor = req.Caller.Actor()
	}
	r.facts = facts{
		caller: req.Caller, actor: actor, named: req.Runner, kind: req.Fetch.GetSource().GetKind(), secrets: req.Secrets, timeout: req.Timeout, phased: req.Phases,
		began: now, replica: d.Replica(), here: d.here, now: d.d.Now, runner: &nobody,
	}
	r.phases = append(r.steps[:0], PhaseAt{Phase: PhaseQueued, At: now, By: d.here})
	if r.timeout == 0 || r.timeout > d.d.Timeout {
		r.timeout = d.d.Timeout
	}
	r.deadline, r.endsAt = now.Add(r.timeout), d.clockAt(now)+int64(r.timeout)
	var err error
	if id == "" {
		r.name("")
	} else if r.name(id); !isULID(id) {
		r.name("")
		err = schemas.Errorf(schemas.CodeInvalid, "the dispatch id is not a ULID")
	}
	switch {
	case err != nil:
		return r, err
	case !mayFetch(req.Caller):
		return r, errMayNotFetch("run a fetch")
	}
	r.sized = measure(req.Fetch)
	if err = checkFetch(req, r.sized.all); err != nil {
		return r, err
	}
	r.fetch = req.Fetch
	return r, nil
}

func isULID(id string) bool {
	_, err := ulid.ParseStrict(id)
	return err == nil
}

// name gives the run its id; empty draws one.
func (r *run) name(id string) {
	if id == "" {
		var text [len(subjectPrefix) + ulid.EncodedSize]byte
		r.subject = string(schemas.AppendULID(append(text[:0], subjectPrefix...), r.began))
	} else {
		r.subject = subjectPrefix + id
	}
	r.id = r.subject[len(subjectPrefix):]
}

// limit is what the caller asked for, at most the ceiling; zero asks for the ceiling.
func limit(asked, ceiling int64) int64 {
	if asked == 0 {
		return ceiling
	}
	return min(asked, ceiling)
}

// checkFetch returns what is wrong with a request that takes size bytes in an assignment.
func checkFetch(req Request, size int) error {
	f := req.Fetch
	switch {
	case f.GetSource().GetKind() == "":
		return schemas.Errorf(schemas.CodeInvalid, "the fetch names no source").WithHint("source.kind is one of file, sqlite, postgres, http")
	case f.GetMaxRows() < 0 || f.GetMaxBytes() < 0:
		return schemas.Errorf(schemas.CodeInvalid, "a limit of rows or bytes can't be negative")
	case req.Timeout < 0:
		return schemas.Errorf(schemas.CodeInvalid, "the timeout can't be negative")
	case size > maxRequest:
		return schemas.Errorf(schemas.CodeInvalid, "the request has %d bytes: at most %d are allowed", size, maxRequest)
	}
	secrets := 0
	for name, value := range req.Secrets {
		secrets += len(name) + len(value)
	}
	if secrets > maxSecrets {
		return schemas.Errorf(schemas.CodeInvalid, "the secrets have %d bytes: at most %d are allowed", secrets, maxSecrets)
	}
	return nil
}

// mayFetch reports whether p may run and cancel fetches.
func mayFetch(p auth.Principal) bool {
	return p.Tenant != "" && (p.Role == auth.RoleWriter || p.Role == auth.RoleOrgAdmin)
}

func errMayNotFetch(what string) *schemas.Error {
	return schemas.Errorf(schemas.CodeForbidden, "to %s takes a WRITER of the tenant", what)
}

// cancel asks the run to stop. It may be called more than once, from any goroutine.
func (r *run) cancel() {
	r.asked.Store(true)
	r.wake()
}

// wake has the run look at everything again, if it waits. It may be called from any goroutine.
func (r *run) wake() {
	if r.open.Load() {
		r.nudge()
	}
}

// unwanted reports whether the run is to be cancelled: it was asked to, or the caller has gone.
func (r *run) unwanted() bool {
	return r.asked.Load() || closed(r.gone)
}

// mark adds a phase to the timeline, the first time it is reached.
func (r *run) mark(phase, by string) { r.reach(phase, by, r.now()) }

// reach is mark at this time.
func (r *run) reach(phase, by string, at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(phase, by, at)
}

// add is reach with the lock held.
func (r *run) add(phase, by string, at time.Time) {
	for i := range r.phases {
		if r.phases[i].Phase == phase {
			return
		}
	}
	r.phases = append(r.phases, PhaseAt{Phase: phase, At: at, By: by})
	r.live.Changed()
}

// accept notes the process that took the work.
func (r *run) accept(pid int64, at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.accepted, r.pid, r.acceptedAt = true, pid, at
	r.add(PhaseAccepted, r.there, at)
}

// credible is what a runner says of rows and bytes, as far as it may be true: it may have sent no more than the fetch allows.
func (r *run) credible(rows, bytes int64) (int64, int64) {
	return min(max(rows, 0), r.sized.rows), min(max(bytes, 0), r.sized.bytes)
}

// count notes how far the result has come, as far as that is credible, and when its first and its last rows came; it only grows.
func (r *run) count(rows, bytes int64) {
	rows, bytes = r.credible(rows, bytes)
	if rows <= r.rows && bytes <= r.bytes { // nobody else writes them
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if rows > r.rows {
		now := r.now()
		if r.rows == 0 {
			r.firstRow = now
			r.phases = append(r.phases, PhaseAt{Phase: PhaseFirstRow, At: now, By: r.there})
		}
		r.lastRow = now
	}
	r.rows, r.bytes = max(r.rows, rows), max(r.bytes, bytes)
	r.live.Changed()
}

// assignTo notes the runner that was selected.
func (r *run) assignTo(c *registry.Candidate) {
	if c == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.runner = c
	r.lastThere = label(r.lastThere, "runner:", c.Ref.Runner)
	r.there = r.lastThere
}

// label is prefix and name, and last if it says that already: who runs fetches mostly runs them on the same runner again.
func label(last, prefix, name string) string {
	if rest, ok := strings.CutPrefix(last, prefix); ok && rest == name {
		return last
	}
	return prefix + name
}

func (r *run) snapshot() Running {
	r.mu.Lock()
	defer r.mu.Unlock()
	return Running{
		DispatchID: r.id, RunnerID: r.runner.Ref.Runner, Person: r.caller.Name, Source: r.kind,
		Phase: r.phases[len(r.phases)-1].Phase, Rows: r.rows, Bytes: r.bytes, StartedAt: r.began, Deadline: r.deadline,
	}
}
