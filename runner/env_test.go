package runner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

func TestMain(m *testing.M) { leak.Main(m) }

// patience bounds every wait of a test: it is only used up by one that fails.
const patience = 2 * time.Minute

var edge = schemas.RunnerRef{Tenant: "acme", Runner: "edge.1"}

// controlPlane is the other side of a runner over the real server: the real receivers, and hellos answered as a test wants.
type controlPlane struct {
	*bustest.Bus
	serve, dispatch *bus.Conn
	receivers       *bus.Receivers
	token           string

	hellos   chan *runbusv1.RunnerHello
	beats    chan *runbusv1.RunnerHeartbeat
	goodbyes chan *runbusv1.RunnerGoodbye

	mu     sync.Mutex
	answer func(*runbusv1.RunnerHello) *runbusv1.EnrollmentAccepted // nil: no answer
	ahead  time.Duration                                            // of this host's clock
}

// newControlPlane enrols whoever says hello in a session per process nonce.
func newControlPlane(t testing.TB, options ...bustest.Option) *controlPlane {
	t.Helper()
	b := bustest.Start(t, options...)
	c := &controlPlane{
		Bus: b, serve: bus.NewConn(b.Conn(t, embedded.UserServe)), dispatch: bus.NewConn(b.Conn(t, embedded.UserDispatch)),
		token:  b.RunnerToken(t, edge),
		hellos: make(chan *runbusv1.RunnerHello, 256), beats: make(chan *runbusv1.RunnerHeartbeat, 256),
		goodbyes: make(chan *runbusv1.RunnerGoodbye, 256),
	}
	c.answer = c.accept
	var err error
	c.receivers, err = bus.NewReceivers(c.dispatch, bus.KeepaliveEvery(time.Second))
	must(t, err)
	t.Cleanup(func() { must(t, c.receivers.Close()) })
	subscribe(t, c.serve, schemas.AllHellos, func(msg *nats.Msg) {
		h := new(runbusv1.RunnerHello)
		if err := bus.Decode(msg, h); err != nil {
			t.Errorf("hello: %v", err)
			return
		}
		c.mu.Lock()
		answer := c.answer(h)
		c.mu.Unlock()
		if answer != nil {
			if err := c.serve.Answer(msg, answer); err != nil && !c.serve.NATS().IsClosed() { // at the end of the test a runner may still ask
				t.Errorf("answer: %v", err)
			}
		}
		c.hellos <- h
	})
	subscribe(t, c.serve, schemas.AllHeartbeats, func(msg *nats.Msg) { put(t, msg, c.beats, new(runbusv1.RunnerHeartbeat)) })
	subscribe(t, c.serve, schemas.AllGoodbyes, func(msg *nats.Msg) { put(t, msg, c.goodbyes, new(runbusv1.RunnerGoodbye)) })
	must(t, c.serve.NATS().Flush())
	must(t, c.dispatch.NATS().Flush())
	return c
}

func put[M proto.Message](t testing.TB, msg *nats.Msg, into chan M, m M) {
	if err := bus.Decode(msg, m); err != nil {
		t.Errorf("decode: %v", err)
		return
	}
	into <- m
}

func subscribe(t testing.TB, c *bus.Conn, subject string, h func(*nats.Msg)) {
	t.Helper()
	_, err := c.Subscribe(subject, h)
	must(t, err)
}

func (c *controlPlane) now() time.Time { return time.Now().Add(c.ahead) }

// accept gives a process the session that its nonce names.
func (c *controlPlane) accept(h *runbusv1.RunnerHello) *runbusv1.EnrollmentAccepted {
	return &runbusv1.EnrollmentAccepted{
		RunnerId: edge.String(), TenantId: edge.Tenant, HeartbeatIntervalSeconds: 15, Session: h.GetProcessNonce(),
		ServerTime: timestamppb.New(c.now()),
	}
}

// refuse answers hellos with an error from now on.
func (c *controlPlane) refuse(err error, fatal bool) {
	c.answerWith(func(*runbusv1.RunnerHello) *runbusv1.EnrollmentAccepted {
		return &runbusv1.EnrollmentAccepted{RunnerId: edge.String(), Error: schemas.ToDetail(err), Fatal: fatal, ServerTime: timestamppb.Now()}
	})
}

func (c *controlPlane) answerWith(answer func(*runbusv1.RunnerHello) *runbusv1.EnrollmentAccepted) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.answer = answer
}

// process is a runner that runs in this one.
type process struct {
	*Agent
	t        testing.TB
	cp       *controlPlane
	enrolled chan Enrolled
	ended    chan error
	log      *journal
	session  string
}

// run starts a runner that has not enrolled yet. change may adjust its configuration, seam the agent itself.
func (c *controlPlane) run(t testing.TB, change func(*Config), seam func(*Agent)) *process {
	t.Helper()
	p := &process{t: t, cp: c, enrolled: make(chan Enrolled, 64), ended: make(chan error, 1), log: newJournal()}
	cfg := Config{
		Addrs: []string{c.URL()}, Token: c.token, ID: edge.Runner, Name: "test", TLS: true, CA: c.CAFile, Log: slog.New(p.log),
		StateDir:   t.TempDir(),
		OnEnrolled: func(e Enrolled) { p.enrolled <- e },
	}
	if change != nil {
		change(&cfg)
	}
	var err error
	p.Agent, err = New(cfg)
	must(t, err)
	p.waits.hello = patience // one that is asked again would be heard twice
	p.waits.goodbye = patience / 4
	p.retry = func(attempt int) time.Duration { return min(retryDelay(attempt)/20, 200*time.Millisecond) }
	if seam != nil {
		seam(p.Agent)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.ended <- p.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(patience):
			t.Error("the runner does not end")
		}
		if t.Failed() {
			t.Logf("the runner's log:\n%s", p.log.text())
		}
	})
	return p
}

// start is run, and waits for the enrolment and its first heartbeat.
func (c *controlPlane) start(t testing.TB, change func(*Config), seam func(*Agent)) *process {
	t.Helper()
	p := c.run(t, change, seam)
	p.session = receive(t, p.enrolled, "enrolment").Session
	receive(t, c.beats, "first heartbeat")
	return p
}

// exit waits for the end of the process and checks its status.
func (p *process) exit(status int) error {
	p.t.Helper()
	err := receive(p.t, p.ended, "end of the runner")
	if got := ExitCode(err); got != status {
		p.t.Fatalf("exit status %d, want %d: %v", got, status, err)
	}
	return err
}

// call is one dispatch, seen from the replica.
type call struct {
	*bus.Receiver
	t  testing.TB
	id string
	m  *runbusv1.RunnerWorkAssignment
	p  *process
}

// assign dispatches a work; change may spoil the assignment.
func (p *process) assign(change func(*runbusv1.RunnerWorkAssignment)) *call {
	p.t.Helper()
	now := p.cp.now()
	m := &runbusv1.RunnerWorkAssignment{
		DispatchId: "d" + schemas.NewID(), Session: p.session, Replica: p.cp.receivers.Replica(),
		Request:  &runbusv1.RunFetchRequest{Source: &runbusv1.Source{Kind: "test"}},
		AcceptBy: timestamppb.New(now.Add(patience)), Deadline: timestamppb.New(now.Add(10 * time.Minute)),
	}
	if change != nil {
		change(m)
	}
	c := &call{t: p.t, id: m.GetDispatchId(), m: m, p: p}
	c.Receiver = p.cp.receivers.Open(edge, p.session, c.id, m.GetWindowBytes())
	p.t.Cleanup(c.Close)
	c.publish()
	return c
}

// publish sends the assignment (again).
func (c *call) publish() {
	c.t.Helper()
	must(c.t, c.p.cp.dispatch.PublishWithReply(schemas.WorkSubject(edge, c.p.session), c.ReplySubject(), c.m))
}

// next is the next frame that is not a progress.
func (c *call) next() bus.Frame {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		f, err := c.Next(ctx)
		if err != nil {
			c.t.Fatalf("dispatch %s: %v", c.id, err)
		}
		c.Done(f)
		if _, ok := f.(*runbusv1.RunnerWorkProgress); !ok {
			return f
		}
	}
}

// accepted waits for the acceptance.
func (c *call) accepted() *call {
	c.t.Helper()
	if f, ok := c.next().(*runbusv1.RunnerWorkAccepted); !ok {
		c.t.Fatalf("dispatch %s: %v instead of an acceptance", c.id, f)
	}
	return c
}

// result waits for the result, and drops what comes before it.
func (c *call) result() *runbusv1.RunnerWorkResult {
	c.t.Helper()
	for {
		if r, ok := c.next().(*runbusv1.RunnerWorkResult); ok {
			return r
		}
	}
}

// fails waits for the result, which must have this code.
func (c *call) fails(code schemas.Code) *runbusv1.RunnerWorkResult {
	c.t.Helper()
	r := c.result()
	if got := schemas.Code(r.GetError().GetCode()); got != code {
		c.t.Fatalf("dispatch %s ended with %q (%s), want %q", c.id, got, r.GetError().GetMessage(), code)
	}
	return r
}

// completes waits for the result, which must be a response.
func (c *call) completes() *runbusv1.RunFetchResponse {
	c.t.Helper()
	r := c.result()
	if r.GetResponse() == nil {
		c.t.Fatalf("dispatch %s failed: %v", c.id, r.GetError())
	}
	return r.GetResponse()
}

// order sends an order and returns the answer.
func (p *process) order(o *runbusv1.RunnerControl) *runbusv1.RunnerControlReply {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	reply, err := p.cp.receivers.Order(ctx, edge, p.session, o)
	must(p.t, err)
	return reply
}

func (p *process) cancel(id string, code schemas.Code) runbusv1.CancelState {
	p.t.Helper()
	return p.order(&runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Cancel{
		Cancel: &runbusv1.CancelOrder{DispatchId: id, Code: string(code)},
	}}).GetCancelState()
}

// connector is a source that a test plays.
type connector func(ctx context.Context, req source.Request, out *source.Output) error

func (connector) Kind() string { return "test" }

func (f connector) Fetch(ctx context.Context, _ source.Env, req source.Request, out *source.Output) error {
	return f(ctx, req, out)
}

// playing puts the connector in the place of every other.
func playing(f connector) func(*Agent) {
	return func(a *Agent) { a.find = func(string) (source.Connector, error) { return f, nil } }
}

// gate is a connector whose fetches tell that they have started and then wait to be let go, or to be stopped.
type gate struct {
	started chan struct{}
	open    chan struct{}
}

func newGate() *gate {
	return &gate{started: make(chan struct{}, 256), open: make(chan struct{})}
}

func (g *gate) fetch(ctx context.Context, _ source.Request, out *source.Output) error {
	g.started <- struct{}{}
	select {
	case <-g.open:
		return oneRow(out)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// oneRow writes a result of one row.
func oneRow(out *source.Output) error {
	schema := arrow.NewSchema([]arrow.Field{{Name: "n", Type: arrow.PrimitiveTypes.Int64}}, nil)
	if err := out.Start(schema); err != nil {
		return err
	}
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	b.Field(0).(*array.Int64Builder).Append(42)
	batch := b.NewRecordBatch()
	defer batch.Release()
	return out.Write(batch)
}

// journal is a log that a test can wait for.
type journal struct {
	mu      sync.Mutex
	lines   []string
	changed chan struct{}
}

func newJournal() *journal { return &journal{changed: make(chan struct{})} }

func (*journal) Enabled(context.Context, slog.Level) bool { return true }
func (j *journal) WithAttrs([]slog.Attr) slog.Handler     { return j }
func (j *journal) WithGroup(string) slog.Handler          { return j }

func (j *journal) Handle(_ context.Context, r slog.Record) error {
	line := r.Level.String() + " " + r.Message
	r.Attrs(func(a slog.Attr) bool {
		line += fmt.Sprintf(" %s=%v", a.Key, a.Value)
		return true
	})
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, line)
	close(j.changed)
	j.changed = make(chan struct{})
	return nil
}

func (j *journal) text() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Join(j.lines, "\n")
}

// await waits for a line with this text.
func (j *journal) await(t testing.TB, text string) string {
	t.Helper()
	return j.awaitTimes(t, 1, text)
}

// awaitTimes waits for the n-th line that has all of these texts.
func (j *journal) awaitTimes(t testing.TB, n int, texts ...string) string {
	t.Helper()
	timeout := time.After(patience)
	for {
		j.mu.Lock()
		changed := j.changed
		found := 0
		for _, line := range j.lines {
			if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) }) {
				if found++; found == n {
					j.mu.Unlock()
					return line
				}
			}
		}
		j.mu.Unlock()
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("not %d times %q in the log:\n%s", n, texts, j.text())
		}
	}
}

func receive[T any](t testing.TB, from <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-from:
		return v
	case <-time.After(patience):
		t.Fatalf("no %s", what)
		panic("unreachable")
	}
}

// none fails if something is there already; it doesn't wait, so a marker must have come before.
func none[T any](t testing.TB, from <-chan T, what string) {
	t.Helper()
	select {
	case v := <-from:
		t.Fatalf("an unexpected %s: %v", what, v)
	default:
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func hintOf(err error) string {
	var e *schemas.Error
	if errors.As(err, &e) {
		return e.Hint
	}
	return ""
}

func wantExit(t testing.TB, err error, status int, text string) {
	t.Helper()
	var exit *ExitError
	if !errors.As(err, &exit) || exit.Code != status || !strings.Contains(err.Error(), text) {
		t.Errorf("got %v (status %d), want status %d and %q", err, ExitCode(err), status, text)
	}
}
