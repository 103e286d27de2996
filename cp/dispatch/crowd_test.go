package dispatch_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// What the fetches of a crowd do. It is their query, so that their runner knows.
const (
	completes = "completes"
	takesLong = "takes long" // and completes: its sink has a guard meanwhile
	leaves    = "leaves"     // its context ends at the first chunk
	isStuck   = "is stuck"   // it is cancelled, while its sink takes nothing
	isLate    = "is late"    // it is cancelled when it ends
)

// pieces is how many chunks a fetch of a crowd has.
const pieces = 3

// piece is what a chunk of a dispatch has: whose it is.
func piece(tenant, id string, n int) string { return fmt.Sprintf("%s/%s/%d\n", tenant, id, n) }

func allPieces(tenant, id string) string {
	var all strings.Builder
	for n := range pieces {
		all.WriteString(piece(tenant, id, n))
	}
	return all.String()
}

// crowd is many fetches of several tenants at a time.
type crowd struct {
	*env
	t       *testing.T
	members []*member
}

// member is a tenant of it: its one runner, and its person.
type member struct {
	*crowd
	tenant  string
	person  auth.Principal
	runner  *rt.Runner
	senders *bus.Senders
	cancels sync.Map // dispatch → chan struct{}, closed when the runner is to give it up
}

func (c *crowd) join(admin auth.Principal, r *rt.Runner) {
	m := &member{crowd: c, tenant: admin.Tenant, person: writer(), runner: r}
	m.person.Tenant = admin.Tenant
	var err error
	m.senders, err = bus.NewSenders(r.Conn, r.Ref)
	rt.Must(c.t, err)
	c.t.Cleanup(func() { rt.Must(c.t, m.senders.Close()) })
	r.OnCancel(func(o *runbusv1.CancelOrder) runbusv1.CancelState {
		close(m.cancelled(o.GetDispatchId()))
		return stopping
	})
	c.members = append(c.members, m)
}

func (m *member) cancelled(id string) chan struct{} {
	c, _ := m.cancels.LoadOrStore(id, make(chan struct{}))
	return c.(chan struct{}) //nolint:forcetypeassert // nothing else is stored
}

// serve does what the runner is given, until over is closed.
func (m *member) serve(over <-chan struct{}) {
	var works sync.WaitGroup
	defer works.Wait()
	for {
		select {
		case <-over:
			return
		case <-m.runner.Control:
		case msg := <-m.runner.Work:
			a := new(runbusv1.RunnerWorkAssignment)
			if err := bus.Decode(msg, a); err != nil {
				m.t.Errorf("%s: %v", m.tenant, err)
				continue
			}
			works.Go(func() { m.work(a) })
		}
	}
}

// work does one assignment, with frames that no caller may get: duplicates, late ones, and such for a dispatch of another tenant.
func (m *member) work(a *runbusv1.RunnerWorkAssignment) {
	ctx, cancel := context.WithTimeout(context.Background(), rt.Patience)
	defer cancel()
	id := a.GetDispatchId()
	s := m.senders.Open(id, a.GetSession(), a.GetReplica(), a.GetWindowBytes())
	defer s.Close()
	must := func(err error) {
		if err != nil {
			m.t.Errorf("%s of %s: %v", id, m.tenant, err)
		}
	}
	raw := func(by *member, seq uint64, body string) {
		f := &runbusv1.RunnerWorkChunk{DispatchId: id, Session: a.GetSession(), Seq: seq, ArrowIpc: []byte(body), Rows: 1, Bytes: 1}
		must(by.runner.Conn.Publish(schemas.ResultDataSubject(by.runner.Ref, a.GetReplica(), id), f))
	}
	must(s.Send(ctx, &runbusv1.RunnerWorkAccepted{Pid: 4711}))
	for _, other := range m.members {
		if other != m {
			raw(other, 2, "foreign, of "+other.tenant) // the number of the first chunk, and before it
			must(other.runner.Conn.NATS().FlushWithContext(ctx))
		}
	}
	bytes := 0
	for n := range pieces {
		f := &runbusv1.RunnerWorkChunk{ArrowIpc: []byte(piece(m.tenant, id, n)), Rows: int64(n) + 1}
		bytes += len(f.GetArrowIpc())
		f.Bytes = int64(bytes)
		must(s.Send(ctx, f))
		again := proto.CloneOf(f)
		must(m.runner.Conn.Publish(schemas.ResultDataSubject(m.runner.Ref, a.GetReplica(), id), again))
	}
	result := &runbusv1.RunnerWorkResult{Started: true}
	switch a.GetRequest().GetQuery() {
	case leaves, isStuck:
		select {
		case <-m.cancelled(id):
		case <-ctx.Done():
			m.t.Errorf("%s of %s: no cancel came", id, m.tenant)
		}
		result.Outcome = &runbusv1.RunnerWorkResult_Error{Error: &runbusv1.ErrorDetail{Code: "cancelled", Message: "stopped"}}
	default:
		sum := sha256.Sum256([]byte(allPieces(m.tenant, id)))
		result.StreamSha256 = sum[:]
		result.Outcome = &runbusv1.RunnerWorkResult_Response{Response: &runbusv1.RunFetchResponse{Rows: pieces, Bytes: int64(bytes), RunnerPid: 4711}}
	}
	must(s.Send(ctx, result))
	must(s.Drain(ctx))
	for seq := range uint64(2 * pieces) { // before and after the last of the dispatch
		raw(m, seq+1, "late, of "+m.tenant)
	}
}

// crowdSink is the caller of one fetch.
type crowdSink struct {
	m         *member
	does      string
	leave     context.CancelFunc
	abandoned chan struct{}
	over      atomic.Bool // Fetch has returned
	others    sync.WaitGroup

	accepted dispatch.Accepted
	got      strings.Builder
}

func (s *crowdSink) called() {
	if s.over.Load() {
		s.m.t.Errorf("the sink of %s is called when its fetch is over", s.accepted.DispatchID)
	}
}

func (s *crowdSink) Accepted(a dispatch.Accepted) error {
	s.called()
	s.accepted = a
	return nil
}

func (s *crowdSink) Progress(*runbusv1.RunFetchUpdate) error {
	s.called()
	return nil
}

func (s *crowdSink) Chunk(b []byte) error {
	s.called()
	s.got.Write(b)
	switch s.does {
	case takesLong:
		if s.got.Len() == len(b) {
			<-time.After(100 * time.Millisecond) // long enough for a guard, mostly; what is checked does not depend on it
		}
	case leaves:
		s.leave()
	case isLate:
		if s.got.Len() == pieces*len(b) {
			s.others.Go(func() {
				if err := s.m.d.Cancel(s.m.person, s.accepted.DispatchID); err != nil && schemas.CodeOf(err) != schemas.CodeNotFound {
					s.m.t.Errorf("cancel: %v", err)
				}
			})
		}
	case isStuck:
		if err := s.m.d.Cancel(s.m.person, s.accepted.DispatchID); err != nil {
			s.m.t.Errorf("cancel: %v", err)
		}
		select {
		case <-s.abandoned:
		case <-time.After(rt.Patience):
			s.m.t.Errorf("%s is not abandoned", s.accepted.DispatchID)
		}
	}
	return nil
}

func (s *crowdSink) Abandon() { close(s.abandoned) }

// fetch runs one fetch and looks at what came of it.
func (m *member) fetch(does string) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s := &crowdSink{m: m, does: does, leave: cancel, abandoned: make(chan struct{})}
	req := request(m.runner.Ref.Runner)
	req.Caller, req.Fetch.Query = m.person, does
	o := m.d.Fetch(ctx, req, "", s)
	s.over.Store(true)
	defer s.others.Wait()
	if s.accepted.DispatchID != o.DispatchID || s.accepted.Tenant != m.tenant || s.accepted.RunnerID != m.runner.Ref.Runner {
		m.t.Errorf("%s of %s was told %+v", o.DispatchID, m.tenant, s.accepted)
	}
	want, got := allPieces(m.tenant, o.DispatchID), s.got.String()
	switch does {
	case isLate:
		if (o.Code != dispatch.OutcomeCompleted && o.Code != dispatch.OutcomeCancelled) || got != want {
			m.t.Errorf("%s of %s, which %s, got %q and %+v", o.DispatchID, m.tenant, does, got, o)
		}
	case completes, takesLong:
		if o.Code != dispatch.OutcomeCompleted || got != want || o.Response.GetBytes() != int64(len(want)) {
			m.t.Errorf("%s of %s, which %s, got %q and %+v", o.DispatchID, m.tenant, does, got, o)
		}
	default:
		if o.Code != dispatch.OutcomeCancelled || got == "" || !strings.HasPrefix(want, got) {
			m.t.Errorf("%s of %s, which %s, got %q and %+v", o.DispatchID, m.tenant, does, got, o)
		}
	}
}

// Many fetches of three tenants use the same memory one after the other, some cancelled, some with a guard, while runners send again,
// send late, and send for those of others: each caller gets what its own dispatch has, and nothing else (SPEC D5).
func TestACrowdOfTenants(t *testing.T) {
	const callers, each = 4, 32
	e := newEnv(t, nil, nil)
	third, err := e.Auth.CreateTenant(t.Context(), auth.Principal{Name: "operator", Role: auth.RoleOperator}, "initech")
	rt.Must(t, err)
	initech, err := e.Auth.Authenticate(third)
	rt.Must(t, err)
	c := &crowd{env: e, t: t}
	c.join(e.Admin, e.runner)
	c.join(e.Stranger, e.enrolFor(t, e.Stranger, "other-1"))
	c.join(initech, e.enrolFor(t, initech, "third-1"))
	over := make(chan struct{})
	var runners, fetches sync.WaitGroup
	for _, m := range c.members {
		runners.Go(func() { m.serve(over) })
		for n := range callers {
			fetches.Go(func() {
				for i := range each {
					does := completes
					switch (i + 2*n) % 8 {
					case 1:
						does = takesLong
					case 3:
						does = leaves
					case 4, 7:
						does = isLate
					case 6:
						does = isStuck
					}
					m.fetch(does)
				}
			})
		}
	}
	done := make(chan struct{})
	go func() {
		fetches.Wait()
		close(done)
	}()
	beat := time.NewTicker(time.Second)
	defer beat.Stop()
	for running := true; running; {
		select {
		case <-beat.C:
			for _, m := range c.members {
				m.runner.Beat(t, nil)
			}
		case <-done:
			running = false
		}
	}
	close(over)
	runners.Wait()
	for _, reason := range []string{"foreign", "duplicate", "late"} {
		e.awaitMetric(t, "runbus_results_dropped_total", map[string]string{"reason": reason})
	}
}
