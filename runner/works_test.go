package runner

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/seal"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Of a hundred assignments that come at once as many run as there are slots; each of the others is refused as busy.
func TestTheLimitHoldsUnderConcurrentAssignments(t *testing.T) {
	g := newGate()
	cp := newControlPlane(t)
	p := cp.start(t, func(c *Config) { c.Concurrency = 3 }, playing(g.fetch))
	calls := make([]*call, 100)
	var publishers sync.WaitGroup
	for i := range calls {
		publishers.Go(func() { calls[i] = p.assign(nil) })
	}
	publishers.Wait()
	var running []*call
	for _, c := range calls {
		switch f := c.next().(type) {
		case *runbusv1.RunnerWorkAccepted:
			running = append(running, c)
		case *runbusv1.RunnerWorkResult:
			if f.GetStarted() || f.GetError().GetMessage() != schemas.ErrRunnerBusy(edge.Runner, 3).Message {
				t.Fatalf("refused with %v", f)
			}
		}
	}
	if len(running) != 3 || p.works.count() != 3 {
		t.Fatalf("%d are running, %d by the runner's count", len(running), p.works.count())
	}
	for range running {
		receive(t, g.started, "start of a fetch")
	}
	none(t, g.started, "fourth fetch")
	close(g.open)
	for _, c := range running {
		if got := c.completes(); got.GetRows() != 1 || got.GetRunnerPid() != p.pid() {
			t.Errorf("response %v", got)
		}
	}
}

// Whoever has a result may count on its slot: with one slot, the next fetch of the same caller is never refused.
func TestASlotIsFreeWhenTheResultIsThere(t *testing.T) {
	cp := newControlPlane(t)
	p := cp.start(t, func(c *Config) { c.Concurrency = 1 }, playing(func(_ context.Context, _ source.Request, out *source.Output) error {
		return oneRow(out)
	}))
	for n := range 200 {
		p.assign(nil).completes()
		if n%(mostUndelivered/2) == 0 { // the acknowledgements come a little later, and those that lack are a limit of their own
			p.acknowledged()
		}
	}
}

// acknowledged waits until no result of an ended work waits for its acknowledgement.
func (p *process) acknowledged() {
	p.t.Helper()
	for give := time.Now().Add(patience); ; runtime.Gosched() {
		p.works.mu.Lock()
		n := p.works.undelivered
		p.works.mu.Unlock()
		if n == 0 {
			return
		}
		if time.Now().After(give) {
			p.t.Fatalf("%d results are not acknowledged", n)
		}
	}
}

// A replica that was silent for so long that its works were stopped, and comes back, gets their results: nobody waits for the
// deadline of a work that has ended long ago. Until then the works neither keep slots nor hold up a drain.
func TestASilentReplicaThatComesBackGetsItsResults(t *testing.T) {
	cp := newControlPlane(t)
	g := newGate()
	p := cp.start(t, func(c *Config) { c.Concurrency = mostOrphaned }, func(a *Agent) {
		playing(g.fetch)(a)
		a.times = []bus.Option{bus.OrphanAfter(500 * time.Millisecond), bus.ProbeAfter(10 * time.Second)}
	})
	var calls []*call
	for range mostOrphaned / 2 {
		calls = append(calls, p.assign(nil))
	}
	for range calls {
		receive(t, g.started, "start of a fetch")
	}
	p.log.awaitTimes(t, len(calls), "work failed") // the replica says nothing: its keepalives come every 10 s
	more := p.assign(nil)
	more.accepted()
	receive(t, g.started, "start of a fetch after works that nobody waits for")
	for _, c := range calls {
		c.accepted().fails(schemas.CodeOutcomeUnknown)
	}
	more.fails(schemas.CodeOutcomeUnknown)
}

// What is late, comes twice, or belongs to another session is dropped without a word, and reaches no source.
func TestDroppedAssignments(t *testing.T) {
	g := newGate()
	close(g.open)
	cp := newControlPlane(t)
	p := cp.start(t, nil, playing(g.fetch))
	late := p.assign(func(m *runbusv1.RunnerWorkAssignment) { m.AcceptBy = timestamppb.New(time.Now().Add(-time.Minute)) }) // by more than the clocks may be thought apart
	undated := p.assign(func(m *runbusv1.RunnerWorkAssignment) { m.AcceptBy = nil })
	foreign := p.assign(func(m *runbusv1.RunnerWorkAssignment) { m.Session = schemas.NewID() })
	done := p.assign(nil)
	done.completes()
	done.publish()
	p.assign(nil).completes() // a marker: it comes after all of them, on the same subject
	receive(t, g.started, "fetch")
	receive(t, g.started, "marker's fetch")
	none(t, g.started, "fetch of a dropped assignment")
	for name, c := range map[string]*call{"late": late, "undated": undated, "foreign": foreign} {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if f, err := c.Next(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v, %v", name, f, err)
		}
		// The replica asks what became of it: it never started, however often it asks, and never will.
		for range 2 {
			if state := p.cancel(c.id, schemas.CodeCancelled); state != runbusv1.CancelState_CANCEL_STATE_NEVER_STARTED {
				t.Errorf("%s: cancel answers %s", name, state)
			}
		}
	}
}

// A clock that a slow answer to the hello has set may be ahead: no assignment is dropped for that, or all would be, until the next hello.
func TestAClockThatMayBeAheadDropsNothing(t *testing.T) {
	g := newGate()
	close(g.open)
	cp := newControlPlane(t)
	p := cp.start(t, nil, playing(g.fetch))
	clock := &p.works.agent.clock
	now := time.Now()
	clock.set.Store(nil)
	clock.adjust(cp.now(), now.Add(-10*time.Minute), now) // answered at the end of ten minutes
	if ahead := clock.at(now).Sub(cp.now()); ahead < 4*time.Minute {
		t.Fatalf("the clock is %s ahead", ahead)
	}
	p.assign(nil).completes()
}

// What came in time, and is not begun by then, since the process stood still or was busy, is not run either; the replica is told so.
func TestBegunTooLate(t *testing.T) {
	g := newGate()
	close(g.open)
	cp := newControlPlane(t)
	p := cp.start(t, nil, playing(g.fetch))
	now := time.Now()
	m := &runbusv1.RunnerWorkAssignment{
		DispatchId: "d" + schemas.NewID(), Session: p.session, Replica: cp.receivers.Replica(),
		Request:  &runbusv1.RunFetchRequest{Source: &runbusv1.Source{Kind: "test"}},
		AcceptBy: timestamppb.New(cp.now().Add(-time.Minute)), Deadline: timestamppb.New(cp.now().Add(10 * time.Minute)),
	}
	c := &call{t: t, id: m.GetDispatchId(), m: m, p: p, Receiver: cp.receivers.Open(edge, p.session, m.GetDispatchId(), 0)}
	t.Cleanup(c.Close)
	p.works.assign(m, bus.Trace{}, now.Add(-2*time.Minute)) // by more than the clocks may be thought apart
	if r, ok := c.next().(*runbusv1.RunnerWorkResult); !ok || r.GetStarted() || r.GetError().GetCode() != string(schemas.CodeRunnerOffline) {
		t.Errorf("answered with %v", r)
	}
	p.assign(nil).completes()
	receive(t, g.started, "fetch of the next")
	none(t, g.started, "fetch that was begun too late")
	if state := p.cancel(c.id, schemas.CodeCancelled); state != runbusv1.CancelState_CANCEL_STATE_ENDED {
		t.Errorf("cancel answers %s", state)
	}
	for p.works.count() > 0 {
		runtime.Gosched() // until its slot is free
	}
}

func TestCancelStates(t *testing.T) {
	g := newGate()
	cp := newControlPlane(t)
	p := cp.start(t, func(c *Config) { c.Concurrency = 1 }, playing(g.fetch))

	running := p.assign(nil).accepted()
	receive(t, g.started, "fetch")
	refused := p.assign(nil)
	refused.fails(schemas.CodeRunnerBusy)
	if state := p.cancel(refused.id, schemas.CodeCancelled); state != runbusv1.CancelState_CANCEL_STATE_ENDED {
		t.Errorf("a refused work: %s", state)
	}
	if state := p.cancel(running.id, schemas.CodeCancelled); state != runbusv1.CancelState_CANCEL_STATE_STOPPING {
		t.Errorf("a running work: %s", state)
	}
	if r := running.fails(schemas.CodeCancelled); !r.GetStarted() {
		t.Error("the result says that the work never started")
	}
	if state := p.cancel(running.id, schemas.CodeCancelled); state != runbusv1.CancelState_CANCEL_STATE_ENDED {
		t.Errorf("an ended work: %s", state)
	}

	slow := p.assign(nil).accepted()
	receive(t, g.started, "fetch")
	p.cancel(slow.id, schemas.CodeDeadline)
	slow.fails(schemas.CodeDeadline)

	// An order that overtook its assignment: the assignment is refused for good.
	id := "d" + schemas.NewID()
	if state := p.cancel(id, schemas.CodeCancelled); state != runbusv1.CancelState_CANCEL_STATE_NEVER_STARTED {
		t.Errorf("an unknown work: %s", state)
	}
	p.assign(func(m *runbusv1.RunnerWorkAssignment) { m.DispatchId = id })
	marker := p.assign(nil).accepted()
	receive(t, g.started, "marker's fetch")
	none(t, g.started, "fetch that was cancelled before")
	close(g.open)
	marker.completes()
}

func TestTheDeadlineStopsAWork(t *testing.T) {
	g := newGate()
	cp := newControlPlane(t)
	p := cp.start(t, nil, playing(g.fetch))
	c := p.assign(func(m *runbusv1.RunnerWorkAssignment) {
		m.Deadline = timestamppb.New(time.Now().Add(50 * time.Millisecond))
	})
	c.accepted().fails(schemas.CodeDeadline)
	p.assign(func(m *runbusv1.RunnerWorkAssignment) { m.Deadline = nil }).fails(schemas.CodeDeadline)
}

// A connector that panics fails its own fetch, not the runner; the caller learns nothing of the panic.
func TestAPanicFailsTheFetchAlone(t *testing.T) {
	cp := newControlPlane(t)
	p := cp.start(t, nil, playing(func(_ context.Context, req source.Request, out *source.Output) error {
		if req.Query == "panic" {
			panic("inside information")
		}
		return oneRow(out)
	}))
	r := p.assign(func(m *runbusv1.RunnerWorkAssignment) { m.Request.Query = "panic" }).fails(schemas.CodeFailed)
	if !r.GetStarted() || strings.Contains(r.String(), "inside information") {
		t.Errorf("result %v", r)
	}
	p.log.await(t, "inside information")
	p.assign(nil).completes()
}

// What a connector returns reaches the caller: an *Error as it is, any other with its text, an unknown kind as bad_source.
func TestErrorsOfASource(t *testing.T) {
	cp := newControlPlane(t)
	p := cp.start(t, nil, func(a *Agent) {
		find := a.find
		a.find = func(kind string) (source.Connector, error) {
			if kind != "test" {
				return find(kind)
			}
			return connector(func(_ context.Context, req source.Request, _ *source.Output) error {
				if req.Query == "known" {
					return schemas.Errorf(schemas.CodeSource, "relation does not exist").WithHint("look")
				}
				return errors.New("disk on fire")
			}), nil
		}
	})
	query := func(q string) func(*runbusv1.RunnerWorkAssignment) {
		return func(m *runbusv1.RunnerWorkAssignment) { m.Request.Query = q }
	}
	if r := p.assign(query("known")).fails(schemas.CodeSource); r.GetError().GetMessage() != "relation does not exist" || r.GetError().GetHint() != "look" {
		t.Errorf("%v", r)
	}
	if r := p.assign(query("other")).fails(schemas.CodeFailed); !strings.Contains(r.GetError().GetMessage(), "disk on fire") {
		t.Errorf("%v", r)
	}
	p.assign(func(m *runbusv1.RunnerWorkAssignment) { m.Request.Source.Kind = "tape" }).fails(schemas.CodeBadSource)
	p.assign(func(m *runbusv1.RunnerWorkAssignment) { m.Request = nil }).fails(schemas.CodeBadSource)
}

// secretsOf plays a connector that tells the secrets it was given.
func secretsOf(got chan map[string]string) connector {
	return func(_ context.Context, req source.Request, out *source.Output) error {
		copied := map[string]string{}
		for k, v := range req.Secrets {
			copied[k] = v
		}
		got <- copied
		return oneRow(out)
	}
}

// send publishes a bundle for the call, sealed for the dispatch that change may alter.
func (c *call) send(bundle *runbusv1.CredentialBundle, change func(*seal.Context)) {
	c.t.Helper()
	sc := seal.Context{Tenant: edge.Tenant, Runner: edge.Runner, Session: c.p.session, Dispatch: c.id}
	if change != nil {
		change(&sc)
	}
	sealed, err := seal.Seal(c.p.key.Public(), sc, bundle)
	must(c.t, err)
	must(c.t, c.p.cp.dispatch.Publish(schemas.WorkSubject(edge, c.p.session), &runbusv1.RunnerWorkCredentials{
		DispatchId: c.id, Session: c.p.session, Sealed: sealed,
	}))
}

func TestCredentials(t *testing.T) {
	got := make(chan map[string]string, 16)
	cp := newControlPlane(t)
	p := cp.start(t, nil, func(a *Agent) {
		playing(secretsOf(got))(a)
		a.waits.credentials = patience // those that do not come have a test of their own
	})
	follow := func(m *runbusv1.RunnerWorkAssignment) { m.CredentialsFollow = true }
	bundle := func(password string, left time.Duration) *runbusv1.CredentialBundle {
		return &runbusv1.CredentialBundle{
			Secrets: map[string]string{"password": password},
			Caller:  &runbusv1.CallerSession{Tenant: edge.Tenant, Person: "ada", Role: "WRITER", ExpiresAt: timestamppb.New(time.Now().Add(left))},
		}
	}
	t.Run("opened", func(t *testing.T) {
		c := p.assign(follow).accepted()
		c.send(bundle("first", time.Hour), nil)
		c.send(bundle("second", time.Hour), nil) // ignored
		c.completes()
		if secrets := receive(t, got, "fetch"); len(secrets) != 1 || secrets["password"] != "first" {
			t.Errorf("secrets %v", secrets)
		}
	})
	t.Run("none follow", func(t *testing.T) {
		p.assign(nil).completes()
		if secrets := receive(t, got, "fetch"); len(secrets) != 0 {
			t.Errorf("secrets %v", secrets)
		}
	})
	for name, change := range map[string]func(*seal.Context){
		"sealed for another dispatch": func(c *seal.Context) { c.Dispatch = "other" },
		"sealed for another session":  func(c *seal.Context) { c.Session = "other" },
		"sealed for another runner":   func(c *seal.Context) { c.Runner = "other" },
		"sealed for another tenant":   func(c *seal.Context) { c.Tenant = "other" },
	} {
		t.Run(name, func(t *testing.T) {
			c := p.assign(follow).accepted()
			c.send(bundle("secret", time.Hour), change)
			if r := c.fails(schemas.CodeFailed); !strings.Contains(r.GetError().GetMessage(), "do not open on this runner") {
				t.Errorf("%v", r)
			}
			none(t, got, "fetch")
		})
	}
	t.Run("empty", func(t *testing.T) {
		c := p.assign(follow).accepted()
		must(t, cp.dispatch.Publish(schemas.WorkSubject(edge, p.session), &runbusv1.RunnerWorkCredentials{DispatchId: c.id, Session: p.session}))
		c.fails(schemas.CodeFailed)
		none(t, got, "fetch")
	})
	t.Run("caller's session expired", func(t *testing.T) {
		c := p.assign(follow).accepted()
		c.send(bundle("secret", -time.Minute), nil) // by more than the clocks may be thought apart
		c.fails(schemas.CodeForbidden)
		none(t, got, "fetch")
	})
	t.Run("of an unknown work", func(t *testing.T) {
		must(t, cp.dispatch.Publish(schemas.WorkSubject(edge, p.session), &runbusv1.RunnerWorkCredentials{DispatchId: "nobody", Session: p.session}))
		p.log.await(t, "credentials for a work that does not run here were dropped")
	})
	t.Run("of another session", func(t *testing.T) {
		c := p.assign(follow).accepted()
		must(t, cp.dispatch.Publish(schemas.WorkSubject(edge, p.session), &runbusv1.RunnerWorkCredentials{DispatchId: c.id, Session: "other"}))
		c.send(bundle("mine", time.Hour), nil)
		c.completes()
		if secrets := receive(t, got, "fetch"); secrets["password"] != "mine" {
			t.Errorf("secrets %v", secrets)
		}
	})
	t.Run("cancelled while it waits", func(t *testing.T) {
		c := p.assign(follow).accepted()
		p.cancel(c.id, schemas.CodeCancelled)
		c.fails(schemas.CodeCancelled)
		none(t, got, "fetch")
	})
	if text := p.log.text(); strings.Contains(text, "first") || strings.Contains(text, "secret=") {
		t.Errorf("a secret is in the log:\n%s", text)
	}
}

func TestCredentialsThatDoNotComeFreeTheSlot(t *testing.T) {
	got := make(chan map[string]string, 1)
	cp := newControlPlane(t)
	p := cp.start(t, func(c *Config) { c.Concurrency = 1 }, func(a *Agent) {
		playing(secretsOf(got))(a)
		a.waits.credentials = 50 * time.Millisecond
	})
	c := p.assign(func(m *runbusv1.RunnerWorkAssignment) { m.CredentialsFollow = true }).accepted()
	if r := c.fails(schemas.CodeFailed); r.GetError().GetMessage() != "the credentials did not arrive within 50ms" {
		t.Errorf("%v", r)
	}
	none(t, got, "fetch")
	p.assign(nil).completes()
}

// What is no message of the contract, or no order, is dropped, and the runner goes on.
func TestForeignMessagesAreDropped(t *testing.T) {
	cp := newControlPlane(t)
	p := cp.start(t, nil, playing(func(_ context.Context, _ source.Request, out *source.Output) error { return oneRow(out) }))
	for _, subject := range []string{schemas.WorkSubject(edge, p.session), schemas.ControlSubject(edge, p.session)} {
		must(t, cp.dispatch.NATS().Publish(subject, []byte{0xff, 0xff}))
		must(t, cp.dispatch.Publish(subject, &runbusv1.RunnerGoodbye{}))
	}
	must(t, cp.dispatch.Publish(schemas.ControlSubject(edge, p.session), &runbusv1.RunnerControl{}))
	p.assign(nil).completes()
	p.log.await(t, "unknown message on the work subject")
	p.log.await(t, "an order could not be read")
	p.log.await(t, "an unknown order was ignored")
}
