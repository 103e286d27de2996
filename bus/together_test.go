package bus_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// assign sends the assignment of a receiver's dispatch.
func assign(t testing.TB, r *bus.Receiver, dispatch string, trace bus.Trace) error {
	t.Helper()
	body, err := proto.Marshal(&runbusv1.RunnerWorkAssignment{DispatchId: dispatch, Session: session})
	if err != nil {
		t.Fatal(err)
	}
	return r.Assign(trace, bus.Abilities{Assignments: true}, body)
}

// Many assignments to one session leave in fewer messages than there are; each comes once, says what the replica reads, and has
// its own trace. So do the results.
func TestManyDispatchesShareMessages(t *testing.T) {
	p := newPair(t, bus.ProbeAfter(time.Hour), bus.KeepaliveEvery(time.Hour)) // nothing comes twice, however slow this machine is
	const dispatches = 200
	unwatched := schemas.NewID()
	type work struct {
		m     *runbusv1.RunnerWorkAssignment
		trace bus.Trace
	}
	works := make(chan work, 2*dispatches)
	messages := make(chan *nats.Msg, 2*dispatches)
	if _, err := p.runner.Subscribe(schemas.WorkSubject(edge, session), func(msg *nats.Msg) {
		messages <- msg
		if err := bus.Assignments(msg, func(m *runbusv1.RunnerWorkAssignment, trace bus.Trace) { works <- work{proto.CloneOf(m), trace} }); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	results := make(chan *nats.Msg, 10*dispatches)
	watcher := p.bus.Conn(t, embedded.UserDispatch)
	if _, err := watcher.ChanSubscribe(schemas.ResultsOf(p.receivers.Replica()), results); err != nil {
		t.Fatal(err)
	}
	var told sync.Map
	p.receivers.TellIf(nil, func(subject string) bool {
		parsed, err := schemas.Parse(subject)
		return err == nil && parsed.Kind == schemas.KindResultCtl && parsed.Dispatch != unwatched
	})
	p.receivers.OnBundled(func(subject string, m proto.Message) {
		told.Store(subject+" "+string(m.ProtoReflect().Descriptor().Name()), true)
	})
	for _, nc := range []*nats.Conn{p.runner.NATS(), watcher} {
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	receivers := map[string]*bus.Receiver{}
	var all sync.WaitGroup
	free := p.receivers.Busy()
	for i := range dispatches {
		id := schemas.NewID()
		if i == 0 {
			id = unwatched
		}
		r := p.receivers.Open(edge, session, id, 0)
		receivers[id] = r
		trace := bus.Trace{}
		if i%2 == 0 {
			trace = bus.Trace{Parent: id, State: "a=b"}
		}
		all.Go(func() {
			if err := assign(t, r, id, trace); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	free()
	seen := map[string]bool{}
	ended := make(chan error, dispatches)
	free = p.senders.Busy()
	for range dispatches {
		w := <-works
		id := w.m.GetDispatchId()
		if seen[id] || receivers[id] == nil || w.m.GetSession() != session || !w.m.GetTogether() || !w.m.GetBundles() {
			t.Fatalf("assignment %v", w.m)
		}
		if w.trace.Parent != "" && w.trace != (bus.Trace{Parent: id, State: "a=b"}) {
			t.Fatalf("the trace of %s is %v", id, w.trace)
		}
		seen[id] = true
		all.Go(func() {
			s := p.senders.Open(id, session, p.receivers.Replica(), 0)
			s.Bundle()
			s.Together()
			send(t, s, &runbusv1.RunnerWorkAccepted{}, chunk([]byte(id)))
			s.Deliver(&runbusv1.RunnerWorkResult{Started: true}, func(err error) { ended <- err })
		})
	}
	all.Wait()
	free()
	for id, r := range receivers {
		next[*runbusv1.RunnerWorkAccepted](t, r)
		if c := next[*runbusv1.RunnerWorkChunk](t, r); string(c.GetArrowIpc()) != id || c.GetDispatchId() != id {
			t.Fatalf("%s has the rows %s of %s", id, c.GetArrowIpc(), c.GetDispatchId())
		}
		r.Done(next[*runbusv1.RunnerWorkResult](t, r))
		r.Close()
		if _, ok := told.Load(schemas.ResultCtlSubject(edge, p.receivers.Replica(), id) + " RunnerWorkResult"); ok == (id == unwatched) {
			t.Errorf("that somebody was told of the result of %s is %t", id, ok)
		}
	}
	for range dispatches {
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
	for _, nc := range []*nats.Conn{p.runner.NATS(), watcher} {
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(messages); n >= dispatches {
		t.Errorf("%d messages for %d assignments", n, dispatches)
	}
	if n := len(results); n >= dispatches {
		t.Errorf("%d messages for %d results", n, dispatches)
	}
	if dropped := p.receivers.Dropped(); len(dropped) > 0 || p.senders.Ignored() > 0 {
		t.Errorf("dropped %v, ignored %d credits", dropped, p.senders.Ignored())
	}
}

// A message with several assignments that reaches nobody refuses each of them, and no other; one of them may be sent again.
func TestNobodyHearsSeveralAssignments(t *testing.T) {
	p := newPair(t)
	open := func(session string, n int) (list []*bus.Receiver) {
		for i := range n {
			list = append(list, p.receivers.Open(edge, session, fmt.Sprintf("%sx%d", session, i), 0))
		}
		return list
	}
	deaf := open("gone", 50)
	heard := open(session, 50)
	works := make(chan string, 200)
	if _, err := p.runner.Subscribe(schemas.WorkSubject(edge, session), func(msg *nats.Msg) {
		if err := bus.Assignments(msg, func(m *runbusv1.RunnerWorkAssignment, _ bus.Trace) { works <- m.GetDispatchId() }); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	if err := p.runner.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range deaf {
		all.Go(func() {
			if err := errors.Join(assign(t, deaf[i], "x", bus.Trace{}), assign(t, heard[i], "y", bus.Trace{})); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	for _, r := range deaf {
		if _, err := r.Next(within(t)); !errors.Is(err, bus.ErrNoResponders) {
			t.Fatalf("an assignment to nobody: %v", err)
		}
	}
	for range heard {
		if id := <-works; id != "y" {
			t.Fatalf("the runner got %s", id)
		}
	}
	for _, r := range heard {
		if f, err := r.Try(); f != nil || err != nil {
			t.Fatalf("an assignment that was heard: %v, %v", f, err)
		}
	}
	if err := assign(t, deaf[0], "x", bus.Trace{}); err != nil {
		t.Fatal(err)
	}
	if _, err := deaf[0].Next(within(t)); !errors.Is(err, bus.ErrNoResponders) {
		t.Fatalf("sent again: %v", err)
	}
}

// What cannot leave is the error of its own dispatch.
func TestAssignmentsThatCannotLeave(t *testing.T) {
	p := newPair(t)
	r := p.receivers.Open(edge, session, "d1", 0)
	if err := r.Assign(bus.Trace{}, bus.Abilities{Assignments: true}, make([]byte, bus.MaxPayload)); schemas.CodeOf(err) != schemas.CodeLimit {
		t.Fatalf("too large: %v", err)
	}
	p.replica.NATS().Close()
	var list []*bus.Receiver
	for i := range 50 {
		list = append(list, p.receivers.Open(edge, session, fmt.Sprintf("e%d", i), 0))
	}
	var all sync.WaitGroup
	for _, r := range list {
		all.Go(func() {
			if err := assign(t, r, "x", bus.Trace{}); err != nil {
				return
			}
			if _, err := r.Next(within(t)); !errors.Is(err, bus.ErrNotSent) {
				t.Errorf("an assignment that did not leave: %v", err)
			}
		})
	}
	all.Wait()
}

// Frames of several dispatches in one message are checked one by one: of another runner, of another session, of a dispatch that is
// closed or unknown; the others are taken.
func TestFramesTogetherAreChecked(t *testing.T) {
	p := newPair(t)
	_, mine := p.open("d1", 0)
	other := p.receivers.Open(schemas.RunnerRef{Tenant: edge.Tenant, Runner: "other"}, session, "d2", 0)
	replaced := p.receivers.Open(edge, "0ther", "d3", 0)
	_, closed := p.open("d4", 0)
	closed.Close()
	frame := func(dispatch string) *runbusv1.RunnerWorkFrame {
		return &runbusv1.RunnerWorkFrame{Frame: &runbusv1.RunnerWorkFrame_Accepted{Accepted: &runbusv1.RunnerWorkAccepted{DispatchId: dispatch, Session: session, Seq: 1}}}
	}
	msg, err := bus.NewMsg(schemas.ResultDataSubject(edge, p.receivers.Replica(), "all"), &runbusv1.RunnerWorkFrames{Frames: []*runbusv1.RunnerWorkFrame{
		frame("d2"), frame("d3"), frame("d4"), frame("d5"), frame("d1"), frame("d1"),
	}})
	if err != nil {
		t.Fatal(err)
	}
	bad := nats.NewMsg(msg.Subject)
	bad.Header, bad.Data = msg.Header, msg.Data[:len(msg.Data)-1]
	for _, m := range []*nats.Msg{bad, msg} {
		if err := p.runner.NATS().PublishMsg(m); err != nil {
			t.Fatal(err)
		}
	}
	next[*runbusv1.RunnerWorkAccepted](t, mine)
	for _, r := range []*bus.Receiver{mine, other, replaced} {
		if f, err := r.Try(); f != nil || err != nil {
			t.Errorf("a frame that was not for it: %v, %v", f, err)
		}
	}
	want := map[bus.DropReason]uint64{
		bus.DropForeign: 1, bus.DropSession: 1, bus.DropLate: 1, bus.DropUnknown: 1, bus.DropDuplicate: 1, bus.DropInvalid: 1,
	}
	eventually(t, p.replica, "drops are counted", func() bool {
		got := p.receivers.Dropped()
		reasons := []bus.DropReason{bus.DropForeign, bus.DropSession, bus.DropLate, bus.DropUnknown, bus.DropDuplicate, bus.DropInvalid}
		return !slices.ContainsFunc(reasons, func(r bus.DropReason) bool { return got[r] != want[r] })
	})
}

// A stream that is closed before its result is acknowledged says so, once.
func TestDeliverEndsOnce(t *testing.T) {
	const never = time.Hour // a tick would acknowledge the result that was looked at
	p := newPair(t, bus.OrphanAfter(never), bus.KeepaliveEvery(never), bus.ResumeEvery(never), bus.ProbeAfter(never), bus.ResendEvery(never))
	s, r := p.open("d1", 0)
	ended := make(chan error, 2)
	s.Deliver(&runbusv1.RunnerWorkResult{}, func(err error) { ended <- err })
	next[*runbusv1.RunnerWorkResult](t, r)
	s.Close()
	if err := <-ended; !errors.Is(err, bus.ErrClosed) {
		t.Fatalf("closed: %v", err)
	}
	s.Deliver(&runbusv1.RunnerWorkResult{}, func(err error) { ended <- err })
	if err := <-ended; !errors.Is(err, bus.ErrClosed) {
		t.Fatalf("after Close: %v", err)
	}
	s, r = p.open("d2", 0)
	s.Deliver(&runbusv1.RunnerWorkResult{}, func(err error) { ended <- err })
	r.Done(next[*runbusv1.RunnerWorkResult](t, r))
	r.Close()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if err := s.Send(within(t), &runbusv1.RunnerWorkAccepted{}); !errors.Is(err, bus.ErrClosed) {
		t.Fatalf("after the end: %v", err)
	}
}
