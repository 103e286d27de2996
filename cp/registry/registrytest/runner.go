package registrytest

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/seal"
	"github.com/org-runink/runbus/internal/natsdial"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Runner is the runner's side of the bus over a real connection, one step at a time: what it does not do, nothing does.
type Runner struct {
	Ref     schemas.RunnerRef
	Nonce   string
	Conn    *bus.Conn
	Key     *seal.Key
	Session string

	Work    chan *nats.Msg               // what comes on work.<session>
	Control chan *runbusv1.RunnerControl // what comes on control.<session>
	// Cancels answers cancel orders; unset: they are not answered.
	mu      sync.Mutex
	cancels func(*runbusv1.CancelOrder) runbusv1.CancelState

	cred    Credential
	senders *bus.Senders
	subs    []*nats.Subscription
}

// Connect connects a process of a runner, by the real callout. It has not said hello yet.
func (s *Stack) Connect(t testing.TB, cred Credential, id string) *Runner {
	t.Helper()
	r := &Runner{
		Ref: schemas.RunnerRef{Tenant: cred.Tenant, Runner: id}, Nonce: schemas.NewID(), cred: cred,
		Work: make(chan *nats.Msg, 64), Control: make(chan *runbusv1.RunnerControl, 64),
	}
	var err error
	r.Key, err = seal.NewKey()
	Must(t, err)
	r.Dial(t, s)
	return r
}

// Dial gives the process a new link.
func (r *Runner) Dial(t testing.TB, s *Stack) {
	t.Helper()
	nc, err := natsdial.Connect(Patience, s.URL(),
		nats.RootCAs(s.CAFile), nats.NoReconnect(), nats.IgnoreDiscoveredServers(), nats.Timeout(Patience),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}),
		nats.Name(schemas.ConnectName(r.Ref.Runner, r.Nonce)), nats.CustomInboxPrefix(schemas.InboxPrefix(r.Ref)),
		nats.Nkey(r.cred.PublicKey, r.cred.secret.Key.Sign))
	Must(t, err)
	t.Cleanup(nc.Close)
	r.Conn = bus.NewConn(nc)
}

// HelloMessage is the hello of this process, signed; change, which may be nil, runs before the signature.
func (r *Runner) HelloMessage(t testing.TB, change func(*runbusv1.RunnerHello)) *runbusv1.RunnerHello {
	t.Helper()
	h := &runbusv1.RunnerHello{
		RunnerId: r.Ref.Runner, Name: "Edge " + r.Ref.Runner, Version: "1.2.3", Capabilities: []string{"fetch", "source:file"},
		LoadScore: 0.25, Limit: 4, ProcessNonce: r.Nonce, Pid: 4711, SealingKey: r.Key.Public(), PublicKey: r.cred.PublicKey,
	}
	if change != nil {
		change(h)
	}
	signature, err := r.cred.secret.Key.Sign(schemas.HelloSigningInput(r.Ref, h))
	Must(t, err)
	h.Signature = signature
	return h
}

// Hello says hello and returns the answer; the session is taken over from it. As a runner does, it says hello again when the platform
// can't decide now.
func (r *Runner) Hello(t testing.TB, change func(*runbusv1.RunnerHello)) *runbusv1.EnrollmentAccepted {
	t.Helper()
	h := r.HelloMessage(t, change)
	answer := r.Say(t, h)
	for give := time.Now().Add(Patience); answer.GetError().GetCode() == string(schemas.CodeUnavailable) && time.Now().Before(give); {
		t.Logf("hello again: %v", answer.GetError())
		<-time.After(100 * time.Millisecond)
		answer = r.Say(t, h)
	}
	if answer.GetError() == nil {
		r.Session = answer.GetSession()
	}
	return answer
}

// helloAgain is after how long a hello is said again: one that had waited for too long before it was looked at is not answered.
const helloAgain = 10 * time.Second

// Say sends a hello as it is, until it is answered.
func (r *Runner) Say(t testing.TB, h *runbusv1.RunnerHello) *runbusv1.EnrollmentAccepted {
	t.Helper()
	for give := time.Now().Add(Patience); ; {
		ctx, cancel := context.WithTimeout(t.Context(), helloAgain)
		var answer runbusv1.EnrollmentAccepted
		err := r.Conn.Request(ctx, schemas.HelloSubject(r.Ref), h, &answer)
		cancel()
		if err == nil {
			return &answer
		}
		if !errors.Is(err, context.DeadlineExceeded) || time.Now().After(give) {
			t.Fatal(err)
		}
	}
}

// Listen subscribes work and control of the session.
func (r *Runner) Listen(t testing.TB) {
	t.Helper()
	work, err := r.Conn.Subscribe(schemas.WorkSubject(r.Ref, r.Session), func(m *nats.Msg) { r.Work <- m })
	Must(t, err)
	control, err := r.Conn.Subscribe(schemas.ControlSubject(r.Ref, r.Session), r.control)
	Must(t, err)
	r.subs = append(r.subs, work, control)
	Must(t, r.Conn.NATS().Flush())
}

// Deafen ends the subscriptions of Listen.
func (r *Runner) Deafen(t testing.TB) {
	t.Helper()
	for _, sub := range r.subs {
		Must(t, sub.Unsubscribe())
	}
	r.subs = nil
	Must(t, r.Conn.NATS().Flush())
}

func (r *Runner) control(msg *nats.Msg) {
	var order runbusv1.RunnerControl
	if bus.Decode(msg, &order) != nil {
		return
	}
	r.mu.Lock()
	answer := r.cancels
	r.mu.Unlock()
	if c := order.GetCancel(); c != nil && answer != nil {
		reply := &runbusv1.RunnerControlReply{Id: order.GetId(), CancelState: answer(c)}
		_ = r.Conn.Publish(schemas.ReplySubject(r.Ref, order.GetReplica(), order.GetId()), reply)
	}
	r.Control <- &order
}

// OnCancel has cancel orders answered. answer runs in the subscription's callback.
func (r *Runner) OnCancel(answer func(*runbusv1.CancelOrder) runbusv1.CancelState) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cancels = answer
}

// Beat sends a heartbeat; change may be nil.
func (r *Runner) Beat(t testing.TB, change func(*runbusv1.RunnerHeartbeat)) {
	t.Helper()
	beat := &runbusv1.RunnerHeartbeat{Session: r.Session, ProcessNonce: r.Nonce, LoadScore: 0.5, Limit: 4, SentAt: timestamppb.Now()}
	if change != nil {
		change(beat)
	}
	Must(t, r.Conn.Publish(schemas.HeartbeatSubject(r.Ref), beat))
	Must(t, r.Conn.NATS().Flush())
}

// Goodbye takes leave.
func (r *Runner) Goodbye(t testing.TB, reason string) {
	t.Helper()
	Must(t, r.Conn.Publish(schemas.GoodbyeSubject(r.Ref), &runbusv1.RunnerGoodbye{Session: r.Session, ProcessNonce: r.Nonce, Reason: reason}))
	Must(t, r.Conn.NATS().Flush())
}

// Enrol connects a process and brings it to where it may get work, and the registry's view of a runner of Tenant to where it has all that
// came of that: each bucket is followed by itself.
func (s *Stack) Enrol(t testing.TB, cred Credential, id string) *Runner {
	t.Helper()
	r := s.Connect(t, cred, id)
	if answer := r.Hello(t, nil); answer.GetError() != nil {
		t.Fatalf("hello of %s: %v", id, answer.GetError())
	}
	r.Listen(t)
	r.Beat(t, nil)
	if cred.Tenant == Tenant {
		s.Await(t, id+" is dispatchable", func() bool {
			return s.Dispatchable(t, id) && s.Candidate(t, id).Session == r.Session && s.BoundTo(r.Ref, cred)
		})
	}
	return r
}

// Assignment waits for the next assignment.
func (r *Runner) Assignment(t testing.TB) *runbusv1.RunnerWorkAssignment {
	t.Helper()
	var a runbusv1.RunnerWorkAssignment
	Must(t, bus.Decode(Wait(t, "an assignment", r.Work), &a))
	return &a
}

// Order waits for the next order.
func (r *Runner) Order(t testing.TB) *runbusv1.RunnerControl {
	t.Helper()
	return Wait(t, "an order", r.Control)
}

// Stream opens the result stream of an assignment.
func (r *Runner) Stream(t testing.TB, a *runbusv1.RunnerWorkAssignment) *bus.Sender {
	t.Helper()
	if r.senders == nil {
		senders, err := bus.NewSenders(r.Conn, r.Ref)
		Must(t, err)
		t.Cleanup(func() { _ = senders.Close() }) // a test may have cut the connection
		r.senders = senders
	}
	s := r.senders.Open(a.GetDispatchId(), a.GetSession(), a.GetReplica(), a.GetWindowBytes())
	t.Cleanup(s.Close)
	return s
}

// Send sends one frame.
func Send(t testing.TB, s *bus.Sender, f bus.Frame) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	Must(t, s.Send(ctx, f))
}

// Drain waits until all frames are acknowledged.
func Drain(t testing.TB, s *bus.Sender) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	Must(t, s.Drain(ctx))
}

// Cut ends the link without a word.
func (r *Runner) Cut() {
	r.Conn.NATS().Close()
	r.subs, r.senders = nil, nil
}
