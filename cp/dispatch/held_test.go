package dispatch_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"net"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/cp/registry"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// gate is how a client gets to the server of a test: it holds back the first write that contains mark, and with it whatever the client is
// to write after that. The client goes on reading: what it could not answer meanwhile, the server's pings, the gate answers.
type gate struct {
	server nats.InProcessConnProvider
	mark   []byte
	once   sync.Once
	held   chan struct{} // closed when the write is held back
	open   chan struct{} // closed to let it go
}

// before has a client connect through the gate.
func (g *gate) before(o *nats.Options) error {
	g.server, o.InProcessServer = o.InProcessServer, g
	return nil
}

// InProcessConn is a new connection.
func (g *gate) InProcessConn() (net.Conn, error) {
	conn, err := g.server.InProcessConn()
	return &gated{Conn: conn, gate: g}, err
}

type gated struct {
	net.Conn
	gate *gate
}

// Write writes, when it may.
func (c *gated) Write(b []byte) (int, error) {
	if bytes.Contains(b, c.gate.mark) {
		c.gate.once.Do(func() {
			close(c.gate.held)
			<-c.gate.open
		})
	}
	return c.Conn.Write(b)
}

// Read reads all but pings.
func (c *gated) Read(b []byte) (n int, err error) {
	for n == 0 && err == nil {
		n, err = c.Conn.Read(b)
		ping := []byte("PING\r\n")
		if rest := bytes.ReplaceAll(b[:n], ping, nil); len(rest) < n {
			n = copy(b, rest)
			if _, err := c.Conn.Write([]byte("PONG\r\n")); err != nil {
				return n, err
			}
		}
	}
	return n, err
}

// fetchOf is a fetch by a tenant that reads as itself.
func fetchOf(tenant, runner, id string) dispatch.Request {
	req := request(runner)
	req.Caller.Tenant, req.Fetch.Query = tenant, tenant+" "+id
	return req
}

// awaitPhase waits until a dispatch has got that far.
func awaitPhase(t *testing.T, d *dispatch.Dispatcher, tenant, id, phase string) {
	t.Helper()
	is := func(r dispatch.Running) bool { return r.DispatchID == id && r.Phase == phase }
	for give := time.Now().Add(rt.Patience); !slices.ContainsFunc(d.Running(tenant), is); runtime.Gosched() {
		if time.Now().After(give) {
			t.Fatalf("%s is not %s", id, phase)
		}
	}
}

// enrolFor enrols a runner of another tenant, whose admin it is given.
func (e *env) enrolFor(t *testing.T, admin auth.Principal, id string) *rt.Runner {
	t.Helper()
	r := e.Enrol(t, e.Mint(t, admin, id), id)
	e.Await(t, id+" is dispatchable", func() bool {
		list, err := e.Registry.Snapshot(admin.Tenant)
		rt.Must(t, err)
		return slices.ContainsFunc(list, func(c registry.Candidate) bool {
			return c.Ref.Runner == id && c.Offline == "" && c.Session == r.Session
		})
	})
	return r
}

// A runner that knows the ids of dispatches ends them before their assignments are written. Their memory is nobody else's until then: what
// is written at last is each dispatch's own assignment, to its own runner.
func TestMemoryOfAnUnwrittenAssignmentIsKept(t *testing.T) {
	const early = 12
	e := newEnv(t, nil, nil)
	first := schemas.NewULID(time.Now())
	g := &gate{mark: []byte(first), held: make(chan struct{}), open: make(chan struct{})}
	let := sync.OnceFunc(func() { close(g.open) })
	d, err := dispatch.New(dispatch.Deps{
		Bus: bus.NewConn(e.Conn(t, embedded.UserDispatch, g.before)), Registry: e.Registry, Audit: e.Audit, Log: e.Log,
		AcceptWithin: rt.Patience, ConfirmWithin: rt.Patience,
	})
	rt.Must(t, err)
	t.Cleanup(func() {
		let()
		ctx, cancel := context.WithTimeout(context.Background(), rt.Patience)
		defer cancel()
		if err := d.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	other := e.enrolFor(t, e.Stranger, "other-1")
	owners := []struct {
		tenant string
		runner *rt.Runner
		want   []string // what its runner is to read in its assignments
	}{{tenant: rt.Tenant, runner: e.runner}, {tenant: rt.Other, runner: other}}
	fetch := func(tenant string, r *rt.Runner, id string) <-chan dispatch.Outcome {
		done := make(chan dispatch.Outcome, 1)
		go func() { done <- d.Fetch(t.Context(), fetchOf(tenant, r.Ref.Runner, id), id, newSink()) }()
		return done
	}
	end := func(r *rt.Runner, id string) {
		subject, sum := schemas.ResultCtlSubject(r.Ref, d.Replica(), id), sha256.Sum256(nil)
		rt.Must(t, r.Conn.Publish(subject, &runbusv1.RunnerWorkAccepted{DispatchId: id, Session: r.Session, Seq: 1, Pid: 4711}))
		rt.Must(t, r.Conn.Publish(subject, &runbusv1.RunnerWorkResult{
			DispatchId: id, Session: r.Session, Seq: 2, Started: true, StreamSha256: sum[:],
			Outcome: &runbusv1.RunnerWorkResult_Response{Response: &runbusv1.RunFetchResponse{RunnerPid: 4711}},
		}))
	}

	writing := fetch(rt.Tenant, e.runner, first)
	rt.Wait(t, "the write of the first assignment", g.held)
	owners[0].want = []string{rt.Tenant + " " + first}
	for i := range early {
		o := &owners[i%len(owners)]
		id := schemas.NewULID(time.Now())
		done := fetch(o.tenant, o.runner, id)
		awaitPhase(t, d, o.tenant, id, dispatch.PhaseAssigned)
		end(o.runner, id)
		wantOutcome(t, rt.Wait(t, "the outcome", done), dispatch.OutcomeCompleted, "", "")
		o.want = append(o.want, o.tenant+" "+id)
	}
	let()
	end(e.runner, first)
	wantOutcome(t, rt.Wait(t, "the outcome", writing), dispatch.OutcomeCompleted, "", "")
	for _, o := range owners {
		id := schemas.NewULID(time.Now())
		last := o.tenant + " " + id
		done := fetch(o.tenant, o.runner, id)
		var got []string
		for len(got) == 0 || got[len(got)-1] != last {
			a := o.runner.Assignment(t)
			if a.GetSession() != o.runner.Session || a.GetRequest().GetQuery() != o.tenant+" "+a.GetDispatchId() {
				t.Errorf("the runner of %s was sent %v", o.tenant, a)
			}
			got = append(got, a.GetRequest().GetQuery())
		}
		end(o.runner, id)
		wantOutcome(t, rt.Wait(t, "the outcome", done), dispatch.OutcomeCompleted, "", "")
		o.want = append(o.want, last)
		slices.Sort(got)
		slices.Sort(o.want)
		if !slices.Equal(got, o.want) {
			t.Errorf("the runner of %s read %q, want %q", o.tenant, got, o.want)
		}
	}
}
