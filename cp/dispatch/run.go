package dispatch

import (
	"sync"
	"time"

	"github.com/oklog/ulid/v2"
	oteltrace "go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
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

// run is one dispatch from its begin to its end.
type run struct {
	id       string
	caller   auth.Principal
	named    string                    // runner as the caller named it
	fetch    *runbusv1.RunFetchRequest // the caller's, with its limits set
	secrets  map[string]string
	timeout  time.Duration
	began    time.Time
	deadline time.Time
	replica  string
	now      func() time.Time

	runner          registry.Candidate // set once selected; Ref.Runner is empty before
	accepted        bool
	credentialsRead bool
	trace           bus.Trace   // of what is sent for the run
	live            *trace.Live // its timeline
	why             string      // for the timeline: what a run that did not get on waited for

	stop      sync.Once
	cancelled chan struct{} // closed by Cancel and Close

	mu          sync.Mutex // guards what Running and the timeline show
	span        oteltrace.Span
	pid         int64     // of the process that accepted
	lastRow     time.Time // when the last rows came
	phases      []PhaseAt
	rows, bytes int64
}

// newRun checks a request and gives it its id, limits and deadline. Nothing has been touched when it returns an error; the run
// is there all the same, for the record.
func (d *Dispatcher) newRun(req Request, id string) (*run, error) {
	now := d.d.Now()
	r := &run{
		id: id, caller: req.Caller, named: req.Runner, secrets: req.Secrets, timeout: req.Timeout,
		began: now, replica: d.Replica(), now: d.d.Now, cancelled: make(chan struct{}),
	}
	if r.timeout == 0 || r.timeout > d.d.Timeout {
		r.timeout = d.d.Timeout
	}
	r.deadline = now.Add(r.timeout)
	if id == "" {
		r.id = ulid.Make().String()
	}
	r.mark(PhaseQueued, r.byReplica())
	if _, err := ulid.ParseStrict(r.id); err != nil {
		r.id = ulid.Make().String()
		return r, schemas.Errorf(schemas.CodeInvalid, "the dispatch id is not a ULID")
	}
	if !mayFetch(req.Caller) {
		return r, errMayNotFetch("run a fetch")
	}
	if err := checkFetch(req); err != nil {
		return r, err
	}
	r.fetch = proto.CloneOf(req.Fetch)
	r.fetch.MaxRows = limit(req.Fetch.GetMaxRows(), MaxRows)
	r.fetch.MaxBytes = limit(req.Fetch.GetMaxBytes(), MaxBytes)
	return r, nil
}

// limit is what the caller asked for, at most the ceiling; zero asks for the ceiling.
func limit(asked, ceiling int64) int64 {
	if asked == 0 {
		return ceiling
	}
	return min(asked, ceiling)
}

func checkFetch(req Request) error {
	f := req.Fetch
	switch {
	case f.GetSource().GetKind() == "":
		return schemas.Errorf(schemas.CodeInvalid, "the fetch names no source").WithHint("source.kind is one of file, sqlite, postgres, http")
	case f.GetMaxRows() < 0 || f.GetMaxBytes() < 0:
		return schemas.Errorf(schemas.CodeInvalid, "a limit of rows or bytes can't be negative")
	case req.Timeout < 0:
		return schemas.Errorf(schemas.CodeInvalid, "the timeout can't be negative")
	case proto.Size(f) > maxRequest:
		return schemas.Errorf(schemas.CodeInvalid, "the request has %d bytes: at most %d are allowed", proto.Size(f), maxRequest)
	}
	size := 0
	for name, value := range req.Secrets {
		size += len(name) + len(value)
	}
	if size > maxSecrets {
		return schemas.Errorf(schemas.CodeInvalid, "the secrets have %d bytes: at most %d are allowed", size, maxSecrets)
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

// cancel asks the run to stop. It may be called more than once.
func (r *run) cancel() { r.stop.Do(func() { close(r.cancelled) }) }

func (r *run) byReplica() string { return "replica:" + r.replica }
func (r *run) byRunner() string  { return "runner:" + r.runner.Ref.Runner }

// mark adds a phase to the timeline, the first time it is reached.
func (r *run) mark(phase, by string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.phases {
		if p.Phase == phase {
			return
		}
	}
	r.phases = append(r.phases, PhaseAt{Phase: phase, At: r.now(), By: by})
	r.live.Changed()
}

// accept notes the process that took the work.
func (r *run) accept(pid int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.accepted, r.pid = true, pid
}

// count notes how far the result has come, and when its first and its last rows came; it only grows.
func (r *run) count(rows, bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rows > r.rows {
		now := r.now()
		if r.rows == 0 {
			r.phases = append(r.phases, PhaseAt{Phase: PhaseFirstRow, At: now, By: r.byRunner()})
		}
		r.lastRow = now
	}
	r.rows, r.bytes = max(r.rows, rows), max(r.bytes, bytes)
	r.live.Changed()
}

// assignTo notes the runner that was selected.
func (r *run) assignTo(c registry.Candidate) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.runner = c
}

func (r *run) snapshot() Running {
	r.mu.Lock()
	defer r.mu.Unlock()
	return Running{
		DispatchID: r.id, RunnerID: r.runner.Ref.Runner, Person: r.caller.Name, Source: r.fetch.GetSource().GetKind(),
		Phase: r.phases[len(r.phases)-1].Phase, Rows: r.rows, Bytes: r.bytes, StartedAt: r.began, Deadline: r.deadline,
	}
}
