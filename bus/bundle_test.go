package bus_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// What a small dispatch sends leaves in one message, whose frames but the rows are told to who asked for them; many results are
// acknowledged by fewer messages than there are.
func TestSmallDispatchesAreBundled(t *testing.T) {
	p := newPair(t, bus.ProbeAfter(time.Hour), bus.KeepaliveEvery(time.Hour)) // no credit for time's sake
	type copied struct {
		subject string
		frame   proto.Message
	}
	copies := make(chan copied, 1000)
	p.receivers.OnBundled(func(subject string, m proto.Message) { copies <- copied{subject, m} })
	watcher := p.bus.Conn(t, embedded.UserDispatch)
	results := make(chan *nats.Msg, 1000)
	if _, err := watcher.ChanSubscribe(schemas.ResultsOf(p.receivers.Replica()), results); err != nil {
		t.Fatal(err)
	}
	credits := make(chan *nats.Msg, 1000)
	runner := p.dial(t, edge)
	t.Cleanup(runner.Close)
	if _, err := runner.ChanSubscribe(schemas.CreditSubject(edge, "*"), credits); err != nil {
		t.Fatal(err)
	}
	for _, nc := range []*nats.Conn{watcher, runner} {
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
	}

	const dispatches = 50
	var senders []*bus.Sender
	for range dispatches {
		id := schemas.NewID()
		s, r := p.open(id, 0)
		s.Bundle()
		free := p.senders.Busy() // else a pause of this test between two frames splits a bundle
		send(t, s, &runbusv1.RunnerWorkAccepted{}, chunk([]byte("rows")), &runbusv1.RunnerWorkResult{Started: true})
		free()
		next[*runbusv1.RunnerWorkAccepted](t, r)
		if c := next[*runbusv1.RunnerWorkChunk](t, r); string(c.GetArrowIpc()) != "rows" || c.GetSeq() != 2 || c.GetDispatchId() != id {
			t.Fatalf("chunk %v", c)
		}
		r.Done(next[*runbusv1.RunnerWorkResult](t, r))
		r.Close()
		senders = append(senders, s)
	}
	for _, s := range senders {
		if err := s.Drain(within(t)); err != nil {
			t.Fatal(err)
		}
		s.Close()
	}
	for _, nc := range []*nats.Conn{watcher, runner} {
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	told := map[string]int{}
	for len(copies) > 0 {
		c := <-copies
		subject, err := schemas.Parse(c.subject)
		if err != nil || subject.Kind != schemas.KindResultCtl || subject.Ref != edge || subject.Replica != p.receivers.Replica() {
			t.Fatalf("told on %s: %v", c.subject, err)
		}
		told[string(c.frame.ProtoReflect().Descriptor().Name())]++
	}
	if told["RunnerWorkChunk"] > 0 || told["RunnerWorkResult"] != dispatches || told["RunnerWorkAccepted"] != dispatches {
		t.Errorf("told %v of %d dispatches", told, dispatches)
	}
	if n := len(results); n != dispatches {
		t.Errorf("%d messages for %d dispatches of three frames", n, dispatches)
	}
	if n := len(credits); n > dispatches {
		t.Errorf("%d messages of credit for %d dispatches", n, dispatches)
	}
	if n := p.senders.Ignored(); n != 0 {
		t.Errorf("%d credits were ignored", n)
	}
}
