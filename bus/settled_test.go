package bus_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// settling is a pair whose runner sees what comes on the work subjects of two sessions, and gets no credit that may wait.
type settling struct {
	*pair
	works chan *nats.Msg
}

func newSettling(t *testing.T) settling {
	t.Helper()
	const never = time.Hour // so that no tick sends what is owed
	s := settling{newPair(t, bus.OrphanAfter(never), bus.KeepaliveEvery(never), bus.ResumeEvery(never), bus.ProbeAfter(never), bus.ResendEvery(never)), make(chan *nats.Msg, 16)}
	s.receivers.Linger()
	for _, id := range []string{session, "other"} {
		if _, err := s.runner.Subscribe(schemas.WorkSubject(edge, id), func(msg *nats.Msg) { s.works <- msg }); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.runner.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	return s
}

// begin opens both ends of a dispatch in a session, and assigns it. It returns what came on the work subject.
func (s settling) begin(t *testing.T, dispatch, session, query string, can bus.Abilities) (*bus.Sender, *bus.Receiver, *nats.Msg) {
	t.Helper()
	r := s.receivers.Open(edge, session, dispatch, 0)
	body, err := proto.Marshal(&runbusv1.RunnerWorkAssignment{DispatchId: dispatch, Session: session, Request: &runbusv1.RunFetchRequest{Query: query}})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Assign(bus.Trace{Parent: "trace of " + dispatch}, can, body); err != nil {
		t.Fatal(err)
	}
	one := s.senders.Open(dispatch, session, s.receivers.Replica(), 0)
	one.Bundle()
	return one, r, <-s.works
}

// end has a dispatch end, and its replica take the result.
func end(t *testing.T, one *bus.Sender, r *bus.Receiver) (ended chan error) {
	t.Helper()
	ended = make(chan error, 1)
	one.Finish(chunk([]byte("rows")), &runbusv1.RunnerWorkResult{Started: true}, func(err error) { ended <- err })
	r.Done(next[*runbusv1.RunnerWorkChunk](t, r))
	r.Done(next[*runbusv1.RunnerWorkResult](t, r))
	r.Close()
	return ended
}

// wantSettled looks at a message on a work subject: what it settles and assigns.
func wantSettled(t *testing.T, msg *nats.Msg, assigned string, settled ...string) {
	t.Helper()
	m := &runbusv1.RunnerWorkAssignments{}
	if bus.TypeOf(msg) == "RunnerWorkAssignments" {
		if err := bus.Decode(msg, m); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	if err := bus.Assignments(msg, func(m *runbusv1.RunnerWorkAssignment, trace bus.Trace) {
		got = append(got, m.GetDispatchId())
		if trace.Parent != "trace of "+m.GetDispatchId() {
			t.Errorf("the trace of %s is %q", m.GetDispatchId(), trace.Parent)
		}
	}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, []string{assigned}) || !slices.Equal(m.GetSettled(), settled) {
		t.Fatalf("a %s assigns %q and settles %q, not %q and %q", bus.TypeOf(msg), got, m.GetSettled(), assigned, settled)
	}
}

var settles = bus.Abilities{Assignments: true, ChunksTell: true, Settled: true}

// Dispatches that have ended are acknowledged by the next assignment to their session, once, and by no other.
func TestEndedDispatchesAreSettledByAnAssignment(t *testing.T) {
	s := newSettling(t)
	one, oneR, msg := s.begin(t, "one", session, "", settles)
	wantSettled(t, msg, "one")
	two, twoR, msg := s.begin(t, "two", session, "", settles)
	wantSettled(t, msg, "two")
	open, openR, _ := s.begin(t, "open", session, "", settles)
	oneEnded, twoEnded := end(t, one, oneR), end(t, two, twoR)

	_, _, msg = s.begin(t, "elsewhere", "other", "", settles)
	wantSettled(t, msg, "elsewhere")
	_, _, msg = s.begin(t, "large", session, strings.Repeat("q", 20<<10), settles)
	wantSettled(t, msg, "large")
	_, _, msg = s.begin(t, "plain", session, "", bus.Abilities{Assignments: true})
	wantSettled(t, msg, "plain")
	_, _, msg = s.begin(t, "three", session, "", settles)
	wantSettled(t, msg, "three", "one", "two")

	// Of another session, unknown, without a result: none of it is heeded.
	for subject, dispatch := range map[string]string{schemas.WorkSubject(edge, "other"): "one", msg.Subject: "nobody's"} {
		s.senders.Settled(settled(t, subject, dispatch, "open"))
	}
	if n := s.senders.Ignored(); n != 4 || len(oneEnded) > 0 {
		t.Fatalf("%d are ignored, not 4; the other session's ended %d", n, len(oneEnded))
	}
	s.senders.Settled(msg)
	for _, ended := range []chan error{oneEnded, twoEnded} {
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
	s.senders.Settled(msg)
	if n := s.senders.Ignored(); n != 6 {
		t.Errorf("%d are ignored, not 6: what is over is over", n)
	}
	_, _, msg = s.begin(t, "four", session, "", settles)
	wantSettled(t, msg, "four")

	// What was not settled is acknowledged as ever.
	openEnded := end(t, open, openR)
	if err := s.receivers.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-openEnded; err != nil {
		t.Fatal(err)
	}
}

// settled is a message that says that dispatches are.
func settled(t *testing.T, subject string, dispatches ...string) *nats.Msg {
	t.Helper()
	msg, err := bus.NewMsg(subject, &runbusv1.RunnerWorkAssignments{Settled: dispatches})
	if err != nil {
		t.Fatal(err)
	}
	return msg
}

// A runner that doesn't read it gets credit, and so does each while ops watches: the credit of all, of one dispatch, or anything else.
func TestNotSettledByAnAssignment(t *testing.T) {
	for name, c := range map[string]struct {
		can     bus.Abilities
		watched string // the subject that ops watches
	}{
		"not able":          {can: bus.Abilities{Assignments: true, ChunksTell: true}},
		"alone":             {can: bus.Abilities{Settled: true}},
		"all watched":       {settles, schemas.CreditSubject(edge, "all")},
		"one watched":       {settles, schemas.CreditSubject(edge, "one")},
		"something watched": {settles, "runbus.other"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSettling(t)
			credits := make(chan *nats.Msg, 16)
			if _, err := s.runner.Subscribe(schemas.CreditSubject(edge, "*"), func(msg *nats.Msg) { credits <- msg }); err != nil {
				t.Fatal(err)
			}
			if err := s.runner.NATS().Flush(); err != nil {
				t.Fatal(err)
			}
			if c.watched != "" {
				s.receivers.OnBundled(func(string, proto.Message) {})
				s.receivers.TellIf(func() bool { return true }, func(subject string) bool { return subject == c.watched })
			}
			one, oneR, _ := s.begin(t, "one", session, "", c.can)
			ended := end(t, one, oneR)
			_, _, msg := s.begin(t, "two", session, "", c.can)
			wantSettled(t, msg, "two")
			if err := s.receivers.Close(); err != nil {
				t.Fatal(err)
			}
			if err := <-ended; err != nil {
				t.Fatal(err)
			}
			if got, want := (<-credits).Subject, schemas.CreditSubject(edge, "one"); got != want {
				t.Errorf("the last credit came on %s, not %s", got, want)
			}
		})
	}
}

// Many ended dispatches that no assignment follows don't wait for one.
func TestManyEndedDispatchesAreAcknowledgedByThemselves(t *testing.T) {
	s := newSettling(t)
	type both struct {
		sender   *bus.Sender
		receiver *bus.Receiver
	}
	var all []both
	for i := range 32 {
		one, r, _ := s.begin(t, fmt.Sprintf("d%d", i), session, "", settles)
		all = append(all, both{one, r})
	}
	var ended []chan error
	for _, one := range all {
		ended = append(ended, end(t, one.sender, one.receiver))
	}
	for _, e := range ended {
		if err := <-e; err != nil {
			t.Fatal(err)
		}
	}
}

// A dispatch may be assigned while its stream, or all of them, are closed: by whoever does that.
func TestAssignWhileClosing(t *testing.T) {
	for name, end := range map[string]func(p *pair, r *bus.Receiver) error{
		"the stream": func(_ *pair, r *bus.Receiver) error { r.Close(); return nil },
		"all":        func(p *pair, _ *bus.Receiver) error { return p.receivers.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPair(t)
			s, r := p.open("d1", 0)
			send(t, s, &runbusv1.RunnerWorkAccepted{Pid: 1})
			next[*runbusv1.RunnerWorkAccepted](t, r)
			body, err := proto.Marshal(&runbusv1.RunnerWorkAssignment{DispatchId: "d1", Session: session})
			if err != nil {
				t.Fatal(err)
			}
			assigned := make(chan error, 1)
			go func() {
				assigned <- r.Assign(bus.Trace{}, bus.Abilities{Assignments: true, ChunksTell: true, Settled: true}, body)
			}()
			if err := end(p, r); err != nil {
				t.Fatal(err)
			}
			if err := <-assigned; err != nil {
				t.Fatal(err)
			}
			if _, err := r.Try(); !errors.Is(err, bus.ErrClosed) {
				t.Errorf("the stream is closed, and says %v", err)
			}
		})
	}
}
