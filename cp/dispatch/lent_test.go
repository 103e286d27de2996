package dispatch_test

import (
	"bytes"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// lending has messages lend their memory as those of a program that `make build` built do, but that the next one has it at once: what is
// given back is overwritten.
type lending struct{ back atomic.Int64 }

type lentMessage struct {
	of  *lending
	msg *nats.Msg
}

func (m lentMessage) Recycle() {
	m.of.back.Add(1)
	for i := range m.msg.Data {
		m.msg.Data[i] = '!'
	}
}

// lend begins it, before the first fetch.
func (e *env) lend() *lending {
	l := &lending{}
	e.d.Receivers().LendBy(func(m *nats.Msg) any { return lentMessage{l, m} })
	return l
}

// lends reports whether messages lend their memory in this build.
func lends() bool {
	_, yes := any(&nats.Msg{}).(interface{ Recycle() })
	return yes
}

// large is a chunk of a large result.
func large(fill byte) []byte { return bytes.Repeat([]byte{fill}, 400<<10) }

// stuckSink reads its first chunk when it is let.
type stuckSink struct {
	reads, abandoned, let chan struct{}
	chunks                int
	changed               int // bytes of it that are not the caller's
}

func (*stuckSink) Accepted(dispatch.Accepted) error        { return nil }
func (*stuckSink) Progress(*runbusv1.RunFetchUpdate) error { return nil }
func (s *stuckSink) Abandon()                              { close(s.abandoned) }

func (s *stuckSink) Chunk(b []byte) error {
	if s.chunks++; s.chunks == 1 {
		close(s.reads)
		<-s.let
		s.changed = len(b) - bytes.Count(b, []byte{'A'})
	}
	return nil
}

// stuckFetch has a caller read the first of two large chunks, and stay there; w is to be told when the runner may end.
func stuckFetch(t *testing.T, e *env, id string, within time.Duration) (s *stuckSink, done chan dispatch.Outcome) {
	t.Helper()
	s = &stuckSink{reads: make(chan struct{}), abandoned: make(chan struct{}), let: make(chan struct{})}
	done = make(chan dispatch.Outcome, 1)
	req := request("edge-1")
	req.Timeout = within
	works := confirm(e, nil)
	go func() { done <- e.d.Fetch(t.Context(), req, id, s) }()
	w := e.accept(t)
	w.chunks(large('A'), large('A'))
	works <- w // ends it when it is to stop
	return s, done
}

// What a caller still reads when its fetch is given up stays what it is, whatever comes for others then.
func TestAStuckCallerReadsNobodyElsesRows(t *testing.T) {
	const id = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
	for how, code := range map[string]string{"cancel": dispatch.OutcomeCancelled, "deadline": dispatch.OutcomeDeadline} {
		t.Run(how, func(t *testing.T) {
			e := newEnv(t, nil, nil)
			lent := &lending{}
			if !lends() {
				lent = e.lend()
			}
			other := e.enrolFor(t, e.Stranger, "other-1")
			var s *stuckSink
			var done chan dispatch.Outcome
			for within := 2 * time.Second; s == nil; within *= 3 { // in which a chunk comes, but on a busy machine
				if how == "cancel" {
					within = 0 // the default
				}
				stuck, over := stuckFetch(t, e, id, within)
				select {
				case <-stuck.reads:
					s, done = stuck, over
				case o := <-over:
					if within == 0 || within > rt.Patience/3 {
						t.Fatalf("no chunk came within %s: %+v", within, o)
					}
				}
			}
			if how == "cancel" {
				rt.Must(t, e.d.Cancel(writer(), id))
			}
			rt.Wait(t, "that the caller is to give up", s.abandoned)
			if n := lent.back.Load(); n != 0 {
				t.Errorf("the memory of %d chunks of a fetch that was given up came back", n)
			}
			f := &fetching{sink: newSink(), done: make(chan dispatch.Outcome, 1)}
			go func() { f.done <- e.d.Fetch(t.Context(), fetchOf(rt.Other, "other-1", "x"), "", f.sink) }()
			a := other.Assignment(t)
			w := &work{t: t, Sender: other.Stream(t, a), assignment: a}
			rt.Send(t, w.Sender, &runbusv1.RunnerWorkAccepted{Pid: 4711})
			for range 6 {
				w.chunks(large('B'))
				rt.Wait(t, "a chunk of the other tenant", f.sink.chunk)
			}
			w.complete()
			wantOutcome(t, f.wait(t), dispatch.OutcomeCompleted, "", "")
			if !bytes.Equal(f.sink.bytes, w.sum) {
				t.Error("the other tenant got other rows than its runner sent")
			}
			close(s.let)
			if o := rt.Wait(t, "the outcome", done); o.Code != code {
				t.Errorf("outcome = %+v", o)
			}
			if s.changed != 0 || s.chunks != 1 {
				t.Errorf("%d bytes of the chunk that the caller read have changed; it got %d chunks", s.changed, s.chunks)
			}
		})
	}
}

// The memory of a chunk comes back once its caller has taken it, and not before: the rows and their checksum are those that were sent. One
// that takes its time, as on a busy machine, may keep it.
func TestMemoryOfChunksComesBack(t *testing.T) {
	e := newEnv(t, nil, nil)
	lent := e.lend()
	for give := time.Now().Add(rt.Patience); lent.back.Load() == 0; {
		if time.Now().After(give) {
			t.Fatal("the memory of no chunk came back")
		}
		e.runner.Beat(t, nil) // or it would be offline before Patience is over
		f := e.start(t, request("edge-1"))
		w := e.accept(t)
		w.chunks(large('A'), large('B'), []byte("C"))
		w.complete()
		wantOutcome(t, f.wait(t), dispatch.OutcomeCompleted, "", "")
		if !bytes.Equal(f.sink.bytes, w.sum) {
			t.Fatal("the caller got other rows than the runner sent")
		}
	}
}
