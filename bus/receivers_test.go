package bus_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// forge publishes a message as a runner would, past the Sender.
func forge(t testing.TB, c *bus.Conn, subject string, m proto.Message) {
	t.Helper()
	if err := c.Publish(subject, m); err != nil {
		t.Fatal(err)
	}
}

func TestDroppedIsCounted(t *testing.T) {
	p := newPair(t, bus.ResendEvery(time.Hour), bus.TombstoneFor(time.Hour))
	replica := p.receivers.Replica()
	other := schemas.RunnerRef{Tenant: "acme", Runner: "edge.2"}
	thief := bus.NewConn(p.dial(t, other))
	defer thief.NATS().Close()
	r := p.receivers.Open(edge, session, "d1", 0)
	p.receivers.Open(edge, session, "gone", 0).Close()
	accepted := func(dispatch, session string, seq uint64) *runbusv1.RunnerWorkAccepted {
		return &runbusv1.RunnerWorkAccepted{DispatchId: dispatch, Session: session, Seq: seq}
	}
	ctl, data := schemas.ResultCtlSubject(edge, replica, "d1"), schemas.ResultDataSubject(edge, replica, "d1")
	for _, c := range []struct {
		reason  bus.DropReason
		from    *bus.Conn
		subject string
		m       proto.Message
	}{
		{bus.DropForeign, thief, schemas.ResultCtlSubject(other, replica, "d1"), accepted("d1", session, 1)},
		{bus.DropForeign, thief, schemas.ResultCtlSubject(other, replica, "gone"), accepted("gone", session, 1)},
		{bus.DropForeign, thief, schemas.ResultCtlSubject(other, replica, "d1"), &runbusv1.RunnerWorkResume{DispatchId: "d1", Session: session, Sent: 9}},
		{bus.DropUnknown, p.runner, schemas.ResultCtlSubject(edge, replica, "d2"), accepted("d2", session, 1)},
		{bus.DropUnknown, p.runner, schemas.ReplySubject(edge, replica, "x"), &runbusv1.RunnerControlReply{Id: "x"}},
		{bus.DropLate, p.runner, schemas.ResultCtlSubject(edge, replica, "gone"), accepted("gone", session, 1)},
		{bus.DropSession, p.runner, ctl, accepted("d1", "0000", 1)},
		{bus.DropSession, p.runner, ctl, &runbusv1.RunnerWorkResume{DispatchId: "d1", Session: "0000", Sent: 9}},
		{bus.DropInvalid, p.runner, ctl, accepted("d2", session, 1)},
		{bus.DropInvalid, p.runner, ctl, accepted("d1", session, 0)},
		{bus.DropInvalid, p.runner, data, accepted("d1", session, 1)},
		{bus.DropInvalid, p.runner, ctl, &runbusv1.RunnerHello{}},
		{bus.DropInvalid, p.runner, data, &runbusv1.RunnerWorkChunk{DispatchId: "d1", Session: session, Seq: 1, ArrowIpc: make([]byte, bus.ChunkBytes+1)}},
		{bus.DropGap, p.runner, ctl, accepted("d1", session, 3)},
	} {
		before := p.receivers.Dropped()
		forge(t, c.from, c.subject, c.m)
		eventually(t, c.from, string(c.reason), func() bool { return p.receivers.Dropped()[c.reason] > before[c.reason] })
	}
	forge(t, p.runner, ctl, accepted("d1", session, 1))
	forge(t, p.runner, ctl, accepted("d1", session, 1))
	eventually(t, p.runner, "duplicate", func() bool { return p.receivers.Dropped()[bus.DropDuplicate] == 1 })
	if f := next[*runbusv1.RunnerWorkAccepted](t, r); f.GetSeq() != 1 {
		t.Errorf("frame %d", f.GetSeq())
	}
	forge(t, p.runner, ctl, &runbusv1.RunnerWorkResult{DispatchId: "d1", Session: session, Seq: 2})
	forge(t, p.runner, ctl, &runbusv1.RunnerWorkProgress{DispatchId: "d1", Session: session, Seq: 3})
	eventually(t, p.runner, "after the result", func() bool { return p.receivers.Dropped()[bus.DropOverrun] == 1 })
}

// A gap is asked for once, by a credit that says what is here.
func TestGapAsksForResend(t *testing.T) {
	p := newPair(t, bus.ResendEvery(time.Hour), bus.KeepaliveEvery(time.Hour)) // no credit but the one
	credits, err := p.runner.NATS().SubscribeSync(schemas.CreditSubject(edge, "d1"))
	if err != nil {
		t.Fatal(err)
	}
	p.receivers.Open(edge, session, "d1", 0)
	data := schemas.ResultDataSubject(edge, p.receivers.Replica(), "d1")
	for _, seq := range []uint64{1, 2, 4, 5, 6} {
		forge(t, p.runner, data, &runbusv1.RunnerWorkChunk{DispatchId: "d1", Session: session, Seq: seq, ArrowIpc: []byte("rows")})
	}
	msg, err := credits.NextMsgWithContext(within(t))
	if err != nil {
		t.Fatal(err)
	}
	c := &runbusv1.RunnerWorkCredit{}
	if err := bus.Decode(msg, c); err != nil || !c.GetResend() || c.GetAcknowledged() != 2 {
		t.Fatalf("credit %v, %v", c, err)
	}
	if want := int64(bus.DefaultWindow - 8); c.GetWindowBytes() != want {
		t.Fatalf("the window is %d, not %d: what is held here still counts", c.GetWindowBytes(), want)
	}
	eventually(t, p.runner, "all dropped", func() bool { return p.receivers.Dropped()[bus.DropGap] == 3 })
	if err := p.runner.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	if n, _, err := credits.Pending(); err != nil || n != 0 {
		t.Fatalf("%d more credits, %v", n, err)
	}
}

// An assignment that reached nobody surfaces from Next, which then goes on waiting for the next attempt.
func TestAssignmentReachesNobody(t *testing.T) {
	p := newPair(t)
	s, r := p.open("d1", 0)
	assignment := &runbusv1.RunnerWorkAssignment{DispatchId: "d1", Session: session, Replica: p.receivers.Replica()}
	work := schemas.WorkSubject(edge, session)
	for range 3 {
		if err := p.replica.PublishWithReply(work, r.ReplySubject(), assignment); err != nil {
			t.Fatal(err)
		}
		if f, err := r.Next(within(t)); !errors.Is(err, bus.ErrNoResponders) {
			t.Fatalf("next: %v, %v", f, err)
		}
	}
	got := make(chan string, 1)
	if _, err := p.runner.Subscribe(work, func(msg *nats.Msg) { got <- bus.TypeOf(msg) }); err != nil {
		t.Fatal(err)
	}
	if err := p.runner.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	if err := p.replica.PublishWithReply(work, r.ReplySubject(), assignment); err != nil {
		t.Fatal(err)
	}
	if name := <-got; name != "RunnerWorkAssignment" {
		t.Fatalf("the runner got a %s", name)
	}
	send(t, s, &runbusv1.RunnerWorkAccepted{})
	next[*runbusv1.RunnerWorkAccepted](t, r)
	if d := p.receivers.Dropped(); len(d) != 0 {
		t.Errorf("dropped %v", d)
	}
}

func TestOrder(t *testing.T) {
	p := newPair(t)
	cancel := func() *runbusv1.RunnerControl {
		return &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Cancel{Cancel: &runbusv1.CancelOrder{DispatchId: "d1"}}}
	}
	if _, err := p.receivers.Order(within(t), edge, session, cancel()); !errors.Is(err, bus.ErrNoResponders) {
		t.Fatalf("nobody is there: %v", err)
	}
	other := schemas.RunnerRef{Tenant: "acme", Runner: "edge.2"}
	thief := bus.NewConn(p.dial(t, other))
	defer thief.NATS().Close()
	failed := make(chan error, 10)
	_, err := p.runner.Subscribe(schemas.ControlSubject(edge, session), func(msg *nats.Msg) {
		order := &runbusv1.RunnerControl{}
		if err := bus.Decode(msg, order); err != nil {
			failed <- err
			return
		}
		if order.GetHealth() != nil {
			return // never answered
		}
		// Another runner that learned the id can't answer in its place.
		foreign := &runbusv1.RunnerControlReply{Id: order.GetId(), CancelState: runbusv1.CancelState_CANCEL_STATE_ENDED}
		if err := thief.Publish(schemas.ReplySubject(other, order.GetReplica(), order.GetId()), foreign); err != nil {
			failed <- err
		}
		if err := thief.NATS().Flush(); err != nil {
			failed <- err
		}
		own := &runbusv1.RunnerControlReply{Id: order.GetId(), CancelState: runbusv1.CancelState_CANCEL_STATE_STOPPING}
		if err := p.runner.Publish(schemas.ReplySubject(edge, order.GetReplica(), order.GetId()), own); err != nil {
			failed <- err
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.runner.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	order := cancel()
	reply, err := p.receivers.Order(within(t), edge, session, order)
	if err != nil || reply.GetCancelState() != runbusv1.CancelState_CANCEL_STATE_STOPPING {
		t.Fatalf("reply %v, %v", reply, err)
	}
	if order.GetId() == "" || order.GetReplica() != p.receivers.Replica() {
		t.Errorf("the order went out as %v", order)
	}
	if n := p.receivers.Dropped()[bus.DropForeign]; n != 1 {
		t.Errorf("%d foreign replies counted", n)
	}
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer stop()
	health := &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Health{Health: &runbusv1.HealthOrder{}}}
	if _, err := p.receivers.Order(ctx, edge, session, health); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no reply: %v", err)
	}
	select {
	case err := <-failed:
		t.Error(err)
	default:
	}
}

// The windows of all open streams together stay within what one connection bears.
func TestWindowsAreShared(t *testing.T) {
	p := newPair(t)
	var open []*bus.Receiver
	sum := func() (n int64) {
		for _, r := range open {
			n += r.Window()
		}
		return n
	}
	for i := range 64 {
		open = append(open, p.receivers.Open(edge, session, fmt.Sprintf("d%d", i), bus.MaxWindow))
		if n := sum(); n > 32<<20 {
			t.Fatalf("%d streams have windows of %d bytes together", len(open), n)
		}
	}
	if w := open[0].Window(); w != bus.MinWindow {
		t.Fatalf("one of 64 has a window of %d", w)
	}
	for len(open) > 1 {
		open[0].Close()
		open = open[1:]
	}
	if w := open[0].Window(); w != bus.MaxWindow {
		t.Fatalf("the last one has a window of %d", w)
	}
}
