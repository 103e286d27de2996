package dispatch_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/cp/registry"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/cp/trace"
	"github.com/org-runink/runbus/internal/leak"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

func TestMain(m *testing.M) { leak.Main(m) }

// env is a stack with a dispatcher and one enrolled runner.
type env struct {
	*rt.Stack
	d      *dispatch.Dispatcher
	record *trace.Recorder // its timelines stay in memory
	runner *rt.Runner
	cred   rt.Credential
	copies *copies
}

func newEnv(t testing.TB, configure func(*dispatch.Deps), reg func(*registry.Deps)) *env {
	t.Helper()
	e := &env{Stack: rt.Start(t, reg), copies: &copies{}}
	deps := dispatch.Deps{
		Bus: bus.NewConn(e.Conn(t, embedded.UserDispatch)), Registry: e.Registry, Audit: e.Audit, Metrics: e.Metrics,
		Copies: e.copies.add, Log: e.Log, Now: e.Clock.Now,
		AcceptWithin: rt.Patience, CredentialsWithin: rt.Patience, ConfirmWithin: rt.Patience, // what does not come in time is a test of its own
	}
	var err error
	e.record, err = trace.New(trace.Deps{Store: e.Store, Replica: "test", Metrics: e.Metrics, Log: e.Log, Now: e.Clock.Now})
	rt.Must(t, err)
	t.Cleanup(e.record.Close)
	deps.Recorder = e.record
	if configure != nil {
		configure(&deps)
	}
	if deps.Audit == nil {
		deps.Audit = e.stoppedLog(t)
	}
	e.d, err = dispatch.New(deps)
	rt.Must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), rt.Patience)
		defer cancel()
		if err := e.d.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	e.cred = e.Mint(t, e.Admin, "edge")
	e.runner = e.Enrol(t, e.cred, "edge-1")
	return e
}

// young stops the clock when the runner's session and its link have just begun.
func (e *env) young(t *testing.T) {
	t.Helper()
	e.Clock.Hold()
	c := e.Candidate(t, "edge-1")
	begun := c.SessionAt
	if c.LinkAt.After(begun) { // it is heard of by a way of its own
		begun = c.LinkAt
	}
	e.Clock.Advance(begun.Sub(e.Clock.Now()))
}

// unconfirmed is for tests in which the runner does not answer a cancel.
func unconfirmed(d *dispatch.Deps) { d.ConfirmWithin = 100 * time.Millisecond }

// awaitMetric waits until a metric, which is counted when the one it is about may know already, is at least 1.
func (e *env) awaitMetric(t *testing.T, name string, labels map[string]string) {
	t.Helper()
	for give := time.Now().Add(rt.Patience); e.Metric(t, name, labels) < 1; runtime.Gosched() {
		if time.Now().After(give) {
			t.Fatalf("%s %v is not counted", name, labels)
		}
	}
}

// writer is a person who may fetch.
func writer() auth.Principal {
	return auth.Principal{Tenant: rt.Tenant, Name: "wanda", Role: auth.RoleWriter, ExpiresAt: time.Now().Add(time.Hour)}
}

func request(runner string) dispatch.Request {
	return dispatch.Request{Caller: writer(), Runner: runner, Phases: true, Fetch: &runbusv1.RunFetchRequest{
		Source: &runbusv1.Source{Kind: "file", Settings: map[string]string{"path": "/data/x.csv"}}, Query: "",
	}}
}

// secretRequest is a request with a secret.
func secretRequest() dispatch.Request {
	r := request("edge-1")
	r.Secrets = map[string]string{"password": "hunter2"}
	return r
}

// stoppedLog is an audit log that records nothing any more.
func (e *env) stoppedLog(t testing.TB) *audit.Log {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	log, err := audit.New(ctx, e.Store, "stopped", e.Log)
	rt.Must(t, err)
	cancel()
	if err := log.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	return log
}

// fetching is a fetch that runs.
type fetching struct {
	sink *sink
	stop context.CancelFunc
	done chan dispatch.Outcome
}

func (e *env) start(t *testing.T, req dispatch.Request) *fetching {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	f := &fetching{sink: newSink(), stop: cancel, done: make(chan dispatch.Outcome, 1)}
	go func() { f.done <- e.d.Fetch(ctx, req, "", f.sink) }()
	return f
}

func (f *fetching) wait(t *testing.T) dispatch.Outcome {
	t.Helper()
	return rt.Wait(t, "the outcome", f.done)
}

// sink keeps what a fetch yields.
type sink struct {
	accepted chan dispatch.Accepted
	chunk    chan struct{} // one for each chunk

	mu       sync.Mutex
	progress []*runbusv1.RunFetchUpdate
	bytes    []byte
	hold     chan struct{} // not nil: a chunk waits for it
	refuse   error         // not nil: a chunk fails with it

	abandoned chan struct{} // room for one
}

func newSink() *sink {
	return &sink{accepted: make(chan dispatch.Accepted, 1), chunk: make(chan struct{}, 1024), abandoned: make(chan struct{}, 1)}
}

func (s *sink) Accepted(a dispatch.Accepted) error {
	s.accepted <- a
	return nil
}

func (s *sink) Progress(u *runbusv1.RunFetchUpdate) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress = append(s.progress, proto.CloneOf(u))
	return nil
}

func (s *sink) Chunk(b []byte) error {
	s.mu.Lock()
	hold, err := s.hold, s.refuse
	s.bytes = append(s.bytes, b...)
	s.mu.Unlock()
	s.chunk <- struct{}{}
	if hold != nil {
		<-hold
	}
	return err
}

func (s *sink) Abandon() { s.abandoned <- struct{}{} }

// copies are what ops would see.
type copies struct {
	told chan struct{} // may be nil; one for each, as long as there is room

	mu  sync.Mutex
	all []proto.Message
}

func (c *copies) add(_ string, m proto.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, proto.Clone(m))
	select {
	case c.told <- struct{}{}:
	default:
	}
}

// work is the runner's side of one dispatch.
type work struct {
	t *testing.T
	*bus.Sender
	assignment *runbusv1.RunnerWorkAssignment
	sum        []byte
}

// take waits for an assignment and opens its stream.
func (e *env) take(t *testing.T) *work {
	t.Helper()
	a := e.runner.Assignment(t)
	return &work{t: t, Sender: e.runner.Stream(t, a), assignment: a}
}

// accept takes an assignment and accepts it.
func (e *env) accept(t *testing.T) *work {
	t.Helper()
	w := e.take(t)
	rt.Send(t, w.Sender, &runbusv1.RunnerWorkAccepted{Pid: 4711})
	return w
}

// chunks sends the pieces of a result.
func (w *work) chunks(pieces ...[]byte) {
	w.t.Helper()
	for i, p := range pieces {
		w.sum = append(w.sum, p...)
		rt.Send(w.t, w.Sender, &runbusv1.RunnerWorkChunk{ArrowIpc: p, Rows: int64(i+1) * 10, Bytes: int64(len(w.sum))})
	}
}

// complete sends the response.
func (w *work) complete() {
	w.t.Helper()
	sum := sha256.Sum256(w.sum)
	rt.Send(w.t, w.Sender, &runbusv1.RunnerWorkResult{
		Started: true, StreamSha256: sum[:],
		Outcome: &runbusv1.RunnerWorkResult_Response{Response: &runbusv1.RunFetchResponse{Rows: 42, Bytes: int64(len(w.sum)), RunnerPid: 4711}},
	})
	rt.Drain(w.t, w.Sender)
}

// fail sends an error as the result.
func (w *work) fail(started bool, code, message string) {
	w.t.Helper()
	rt.Send(w.t, w.Sender, &runbusv1.RunnerWorkResult{
		Started: started, Outcome: &runbusv1.RunnerWorkResult_Error{Error: &runbusv1.ErrorDetail{Code: code, Message: message}},
	})
}

func phases(o dispatch.Outcome) []string {
	var names []string
	for _, p := range o.Phases {
		names = append(names, p.Phase)
	}
	return names
}

func wantOutcome(t *testing.T, o dispatch.Outcome, code, errCode, text string) {
	t.Helper()
	var have string
	message := ""
	if o.Err != nil {
		have, message = string(o.Err.Code), o.Err.Message
	}
	if o.Code != code || have != errCode || (text != "" && message != text) {
		t.Fatalf("outcome = %s, %s %q; want %s, %s %q", o.Code, have, message, code, errCode, text)
	}
	if last := o.Phases[len(o.Phases)-1].Phase; last != trace.EndPhase(code) || o.DispatchID == "" {
		t.Errorf("outcome = %+v", o)
	}
}

var errGone = errors.New("the caller has gone")
