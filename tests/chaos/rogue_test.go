package chaos

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"os"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/seal"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
	"github.com/org-runink/runbus/tests/stack"
)

// rogue is a runner with a valid credential and code of its own: what it does with an assignment is the test's.
type rogue struct {
	*bus.Conn
	ref     schemas.RunnerRef
	session string
	nonce   string
	token   schemas.ServiceToken
	public  string
	sealing []byte
	works   *nats.Subscription
	work    chan *runbusv1.RunnerWorkAssignment
	credit  chan *runbusv1.RunnerWorkCredit // those that were not taken are dropped
}

// newRogue connects a rogue under a fresh key and enrols it.
func newRogue(t testing.TB, p *stack.Plane, id string) *rogue {
	t.Helper()
	_, token := p.Admin.MintKey(t, id)
	parsed, err := schemas.ParseServiceToken(token)
	if err != nil {
		t.Fatal(err)
	}
	key, err := seal.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	r := &rogue{
		ref: schemas.RunnerRef{Tenant: parsed.Tenant, Runner: id}, nonce: schemas.NewID(), token: parsed, sealing: key.Public(),
		work: make(chan *runbusv1.RunnerWorkAssignment, 16), credit: make(chan *runbusv1.RunnerWorkCredit, 1),
	}
	if r.public, err = parsed.Key.PublicKey(); err != nil {
		t.Fatal(err)
	}
	pem, err := os.ReadFile(p.CA)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	nc, err := stack.Connect(p.NATS, nats.Secure(&tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool}),
		nats.IgnoreDiscoveredServers(), nats.NoReconnect(), nats.Name(schemas.ConnectName(id, r.nonce)),
		nats.Nkey(r.public, parsed.Key.Sign), nats.CustomInboxPrefix(schemas.InboxPrefix(r.ref)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	r.Conn = bus.NewConn(nc)
	answer := r.hello(t, nil)
	if answer.GetError() != nil {
		t.Fatalf("hello: %v", answer.GetError())
	}
	r.session = answer.GetSession()
	if r.works, err = r.Subscribe(schemas.WorkSubject(r.ref, r.session), func(msg *nats.Msg) {
		m := new(runbusv1.RunnerWorkAssignment)
		if bus.Decode(msg, m) == nil {
			r.work <- m
		}
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Subscribe(schemas.CreditSubject(r.ref, "*"), func(msg *nats.Msg) {
		m := new(runbusv1.RunnerWorkCredit)
		if bus.Decode(msg, m) == nil {
			select {
			case r.credit <- m:
			default:
			}
		}
	}); err != nil {
		t.Fatal(err)
	}
	r.flush(t)
	r.beat(t)
	p.Admin.AwaitRunner(t, id, true)
	return r
}

func (r *rogue) heartbeat() *runbusv1.RunnerHeartbeat {
	return &runbusv1.RunnerHeartbeat{Session: r.session, ProcessNonce: r.nonce, Limit: 4}
}

// beat sends a heartbeat, without which the rogue gets no work after some time.
func (r *rogue) beat(t testing.TB) {
	t.Helper()
	r.send(t, schemas.HeartbeatSubject(r.ref), r.heartbeat())
	r.flush(t)
}

// hello says it, signed, after change has had its way with it.
func (r *rogue) hello(t testing.TB, change func(*runbusv1.RunnerHello)) *runbusv1.EnrollmentAccepted {
	t.Helper()
	h := &runbusv1.RunnerHello{
		RunnerId: r.ref.Runner, Name: "rogue", Version: "1", Limit: 4, ProcessNonce: r.nonce, Pid: int64(os.Getpid()),
		SealingKey: r.sealing, PublicKey: r.public, Session: r.session,
	}
	if change != nil {
		change(h)
	}
	var err error
	if h.Signature, err = r.token.Key.Sign(schemas.HelloSigningInput(r.ref, h)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), stack.Patience)
	defer cancel()
	answer := new(runbusv1.EnrollmentAccepted)
	if err := r.Request(ctx, schemas.HelloSubject(r.ref), h, answer); err != nil {
		t.Fatalf("hello: %v", err)
	}
	return answer
}

func (r *rogue) send(t testing.TB, subject string, m proto.Message) {
	t.Helper()
	if err := r.Publish(subject, m); err != nil {
		t.Errorf("publish %s: %v", subject, err)
	}
}

func (r *rogue) flush(t testing.TB) {
	t.Helper()
	if err := r.NATS().FlushTimeout(stack.Patience); err != nil {
		t.Fatal(err)
	}
}

// assignment waits for the next one.
func (r *rogue) assignment(t testing.TB) *runbusv1.RunnerWorkAssignment {
	t.Helper()
	select {
	case m := <-r.work:
		return m
	case <-time.After(stack.Patience):
		t.Fatal("no assignment came")
		return nil
	}
}

func (r *rogue) ctl(m *runbusv1.RunnerWorkAssignment) string {
	return schemas.ResultCtlSubject(r.ref, m.GetReplica(), m.GetDispatchId())
}

func (r *rogue) data(m *runbusv1.RunnerWorkAssignment) string {
	return schemas.ResultDataSubject(r.ref, m.GetReplica(), m.GetDispatchId())
}

func accepted(m *runbusv1.RunnerWorkAssignment, seq uint64) *runbusv1.RunnerWorkAccepted {
	return &runbusv1.RunnerWorkAccepted{DispatchId: m.GetDispatchId(), Session: m.GetSession(), Seq: seq, Pid: 1}
}

func chunk(m *runbusv1.RunnerWorkAssignment, seq uint64, b []byte) *runbusv1.RunnerWorkChunk {
	return &runbusv1.RunnerWorkChunk{DispatchId: m.GetDispatchId(), Session: m.GetSession(), Seq: seq, ArrowIpc: b, Rows: 1}
}

func result(m *runbusv1.RunnerWorkAssignment, seq uint64, sum []byte) *runbusv1.RunnerWorkResult {
	return &runbusv1.RunnerWorkResult{
		DispatchId: m.GetDispatchId(), Session: m.GetSession(), Seq: seq, Started: true, StreamSha256: sum,
		Outcome: &runbusv1.RunnerWorkResult_Response{Response: &runbusv1.RunFetchResponse{Rows: 1}},
	}
}

func failed(m *runbusv1.RunnerWorkAssignment, seq uint64, message string) *runbusv1.RunnerWorkResult {
	return &runbusv1.RunnerWorkResult{
		DispatchId: m.GetDispatchId(), Session: m.GetSession(), Seq: seq, Started: true,
		Outcome: &runbusv1.RunnerWorkResult_Error{Error: &runbusv1.ErrorDetail{Code: "FAILED", Message: message}},
	}
}
