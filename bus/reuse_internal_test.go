package bus

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// wholeIn sends all of a small dispatch in memory of the test's; nothing of it is published.
func wholeIn(t *testing.T, s *Senders, one *Sender, dispatch string, ended func(error)) {
	t.Helper()
	beginWhole(t, s, one, Opening{Dispatch: dispatch, Replica: "c"}, ended)
}

// beginWhole is wholeIn for who says more of the stream.
func beginWhole(t *testing.T, s *Senders, one *Sender, o Opening, ended func(error)) {
	t.Helper()
	o.Session, o.Bundle, o.Together, o.Whole = testSession, true, true, true
	s.OpenIn(one, o, time.Now())
	if err := one.Send(t.Context(), &runbusv1.RunnerWorkAccepted{Pid: 1}); err != nil {
		t.Fatal(err)
	}
	one.Finish(nil, &runbusv1.RunnerWorkResult{
		Started: true, Outcome: &runbusv1.RunnerWorkResult_Response{Response: &runbusv1.RunFetchResponse{RunnerPid: 1}},
	}, ended)
}

// acknowledge is what a credit for all of a stream of one frame does. It reports whether that was the end of it.
func acknowledge(one *Sender, dispatch string) bool {
	_, ended := one.credit(credit{dispatch: dispatch, session: testSession, acknowledged: 1, window: MaxWindow}, time.Now())
	if ended != nil {
		ended(nil)
	}
	return ended != nil
}

// A stream in memory that was another's is not touched by what is left of that: a copy of its frame that is being written when the first
// one is acknowledged, credits, errors of the link.
func TestAStreamIsNotTouchedByTheOneBefore(t *testing.T) {
	s := idleSenders()
	occupy(&s.mu, &s.writing)
	one, over := &Sender{}, 0
	var failed error
	ended := func(err error) { over++; failed = err }
	wholeIn(t, s, one, "d1", ended)
	b := &batch{replica: "c"}
	if _, _, _, full := one.gather(b, true); full || len(b.parts) != 1 {
		t.Fatalf("%d parts, full %t", len(b.parts), full)
	}
	if !acknowledge(one, "d1") || over != 1 || failed != nil || !one.Spent() {
		t.Fatalf("acknowledged, and ended %d times, spent %t", over, one.Spent())
	}
	wholeIn(t, s, one, "d2", ended)
	if one.Spent() || acknowledge(one, "d1") || over != 1 {
		t.Fatal("the new stream has ended with the old one")
	}
	old := b.parts[0]
	for _, err := range []error{nats.ErrConnectionReconnecting, nats.ErrMaxPayload} {
		old.sender.unsent(old.seq, old.epoch, err)
	}
	if one.err != nil || one.out.stalled || !one.out.ready() {
		t.Fatalf("the new stream took over that the old one's frame was not sent: %v", one.err)
	}
	if got, want := b.message(s.ref).Subject, schemas.ResultDataSubject(s.ref, "c", "d1"); got != want {
		t.Errorf("the old one's frame leaves on %s, not %s", got, want)
	}
	if _, _, _, full := one.gather(b, true); full || len(b.parts) != 2 {
		t.Fatalf("%d parts, full %t", len(b.parts), full)
	}
	if got, want := b.message(s.ref).Subject, schemas.ResultDataSubject(s.ref, "c", together); got != want {
		t.Errorf("frames of both leave on %s, not %s", got, want)
	}
	b.parts[1].sender.unsent(b.parts[1].seq, b.parts[1].epoch, nats.ErrMaxPayload)
	if !errors.Is(failed, nats.ErrMaxPayload) || over != 2 || one.Spent() {
		t.Errorf("the new stream does not fail with its own frame: %v, ended %d times", failed, over)
	}
}

// The writer waits for the link with a stream in hand. When that has ended meanwhile, and its memory is another's, nothing of the new one
// leaves as if it were the old one's: to its replica, and with its trace.
func TestTheWriterTakesNothingOfTheNextStream(t *testing.T) {
	s := idleSenders()
	s.conn = NewConn(nil) // refuses all that is published, at once
	occupy(&s.mu, &s.writing)
	one, failed := &Sender{}, 0
	waiting := &Sender{} // is in the batch when the writer comes to one, so that it leaves first
	left := 0
	wholeIn(t, s, waiting, "waiting", func(error) {
		left++
		if !acknowledge(one, "d1") || !one.Spent() {
			t.Fatal("the old one is not over")
		}
		beginWhole(t, s, one, Opening{Dispatch: "d2", Replica: "c2"}, func(error) { failed++ })
	})
	if s.publish(waiting, 1) {
		t.Fatal("there is more")
	}
	beginWhole(t, s, one, Opening{Dispatch: "d1", Replica: "c", Trace: Trace{Parent: "trace of d1"}}, func(error) {})
	more := s.publish(one, burst)
	if left != 1 {
		t.Fatalf("what was in the batch left %d times", left)
	}
	if failed > 0 || !more || one.out.cursor != 1 {
		t.Fatalf("the new one's frame went to the old one's replica: %d failed, %d is next, more %t", failed, one.out.cursor, more)
	}
	s.flushAll()
	if s.publish(one, burst) || one.out.cursor != 2 || s.batch("c2").parts[0].dispatch != "d2" {
		t.Errorf("the new one's frame is not in the batch of its own replica: %d is next", one.out.cursor)
	}
}

// Memory is not another's when there was more to a stream than one frame that was acknowledged.
func TestStreamsThatAreNotSpent(t *testing.T) {
	for name, end := range map[string]func(one *Sender){
		"open":         func(*Sender) {},
		"closed":       func(one *Sender) { one.Close() },
		"failed":       func(one *Sender) { one.fail(ErrClosed); acknowledge(one, "d") },
		"silent":       func(one *Sender) { one.look(time.Now().Add(time.Hour), one.all.timing); acknowledge(one, "d") },
		"watched":      func(one *Sender) { one.Orphaned(); acknowledge(one, "d") },
		"acknowledged": func(one *Sender) { acknowledge(one, "d") },
	} {
		s := idleSenders()
		occupy(&s.mu, &s.writing)
		one := &Sender{}
		wholeIn(t, s, one, "d", func(error) {})
		end(one)
		if got, want := one.Spent(), name == "acknowledged"; got != want {
			t.Errorf("%s: spent %t, want %t", name, got, want)
		}
	}
	s := idleSenders()
	occupy(&s.mu, &s.writing)
	one := s.Open("d", testSession, "c", 0)
	if err := one.Send(t.Context(), &runbusv1.RunnerWorkAccepted{Pid: 1}); err != nil {
		t.Fatal(err)
	}
	one.Deliver(&runbusv1.RunnerWorkResult{Started: true}, func(error) {})
	one.credit(credit{dispatch: "d", session: testSession, acknowledged: 2, window: MaxWindow}, time.Now())
	if !one.settled || one.Spent() {
		t.Errorf("a stream of two frames: settled %t, spent %t", one.settled, one.Spent())
	}
}

// OpenIn leaves nothing of the stream before but what tells them apart.
func TestOpenInBeginsAnew(t *testing.T) {
	s := idleSenders()
	occupy(&s.mu, &s.writing)
	one := &Sender{}
	s.OpenIn(one, Opening{Dispatch: "*", Session: testSession, Replica: "c"}, time.Now())
	if one.bad == nil || !strings.Contains(one.bad.Error(), "subject") {
		t.Errorf("a dispatch that is a wildcard: %v", one.bad)
	}
	for _, dispatch := range []string{"d1", "d2"} {
		wholeIn(t, s, one, dispatch, func(error) {})
		if one.bad != nil || one.out.last != 1 || one.out.acked != 0 || !one.out.final || one.dispatch != dispatch {
			t.Errorf("%s: %v, %d frames, %d acknowledged", dispatch, one.bad, one.out.last, one.out.acked)
		}
		if !acknowledge(one, dispatch) {
			t.Errorf("%s does not end", dispatch)
		}
	}
}
