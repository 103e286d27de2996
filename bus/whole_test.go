package bus_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const wholePid = 4711

// wholly is a stream whose runner may send all in one frame.
func (p *pair) wholly(dispatch string) (*bus.Sender, *bus.Receiver) {
	s, r := p.open(dispatch, 0)
	s.Bundle()
	s.Together()
	s.Whole()
	return s, r
}

// response is a result that fits to rows in the last chunk.
func response() *runbusv1.RunnerWorkResult {
	return &runbusv1.RunnerWorkResult{Started: true, RestXxh3: []byte("0123456789abcdef"), Outcome: &runbusv1.RunnerWorkResult_Response{
		Response: &runbusv1.RunFetchResponse{Rows: 3, Bytes: 40, WireBytes: 4, RunnerPid: wholePid},
	}}
}

func lastChunk(b []byte) *runbusv1.RunnerWorkChunk {
	return &runbusv1.RunnerWorkChunk{ArrowIpc: b, Rows: 3, Bytes: 40}
}

// progress is one update.
func progress(text string) *runbusv1.RunnerWorkProgress {
	return &runbusv1.RunnerWorkProgress{Update: &runbusv1.RunFetchUpdate{Phase: runbusv1.Phase_PHASE_QUERYING, Message: text}}
}

// A small dispatch leaves in one message, on the data subject; who waits gets its frames as ever, and ops is told all but the rows.
// What was not whole within 4 ms, as may be on a busy machine, comes in the frames that it always had.
func TestSmallDispatchIsOneFrame(t *testing.T) {
	p := newPair(t)
	told := make(chan proto.Message, 100)
	p.receivers.OnBundled(func(subject string, m proto.Message) {
		if parsed, err := schemas.Parse(subject); err != nil || parsed.Kind != schemas.KindResultCtl {
			t.Errorf("told on %s", subject)
		}
		told <- m
	})
	watcher := p.bus.Conn(t, embedded.UserDispatch)
	messages := make(chan *nats.Msg, 100)
	if _, err := watcher.ChanSubscribe(schemas.ResultsOf(p.receivers.Replica()), messages); err != nil {
		t.Fatal(err)
	}
	if err := watcher.Flush(); err != nil {
		t.Fatal(err)
	}
	at := timestamppb.Now()
	for give := time.Now().Add(patience); ; {
		id := schemas.NewID()
		s, r := p.wholly(id)
		send(t, s, &runbusv1.RunnerWorkAccepted{Pid: wholePid, At: at}, progress("one"), progress("two"))
		ended := make(chan error, 1)
		s.Finish(lastChunk([]byte("rows")), response(), func(err error) { ended <- err })

		accepted := next[*runbusv1.RunnerWorkAccepted](t, r)
		if accepted.GetPid() != wholePid || !proto.Equal(accepted.GetAt(), at) || accepted.GetDispatchId() != id || accepted.GetSession() != session || accepted.GetSeq() != 1 {
			t.Fatalf("accepted %v", accepted)
		}
		r.Done(accepted)
		for _, text := range []string{"one", "two"} {
			if f := next[*runbusv1.RunnerWorkProgress](t, r); f.GetUpdate().GetMessage() != text || f.GetDispatchId() != id {
				t.Fatalf("progress %v", f)
			}
		}
		chunk := next[*runbusv1.RunnerWorkChunk](t, r)
		if string(chunk.GetArrowIpc()) != "rows" || chunk.GetRows() != 3 || chunk.GetBytes() != 40 || chunk.GetDispatchId() != id {
			t.Fatalf("chunk %v", chunk)
		}
		r.Done(chunk)
		result := next[*runbusv1.RunnerWorkResult](t, r)
		whole := result.GetSeq() == 1
		if want := response(); !proto.Equal(want.GetResponse(), result.GetResponse()) || !bytes.Equal(want.GetRestXxh3(), result.GetRestXxh3()) || !result.GetStarted() {
			t.Fatalf("result %v", result)
		}
		r.Done(result)
		r.Close()
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		if whole {
			var msg *nats.Msg
			var subject schemas.Subject
			for subject.Dispatch != id { // behind what is left of those before
				var err error
				msg = <-messages
				if subject, err = schemas.Parse(msg.Subject); err != nil {
					t.Fatal(err)
				}
			}
			if subject.Kind != schemas.KindResultData || bus.TypeOf(msg) != "RunnerWorkWhole" {
				t.Errorf("it came as %s on %s", bus.TypeOf(msg), msg.Subject)
			}
			var names []string
			for len(told) > 0 {
				m := <-told
				names = append(names, string(m.ProtoReflect().Descriptor().Name()))
				if body, err := proto.Marshal(m); err != nil || bytes.Contains(body, []byte("rows")) {
					t.Errorf("told of rows: %v, %v", m, err)
				}
			}
			if len(names) != 4 || names[0] != "RunnerWorkAccepted" || names[1] != "RunnerWorkProgress" || names[2] != "RunnerWorkProgress" || names[3] != "RunnerWorkResult" {
				t.Errorf("ops was told of %v", names)
			}
			break
		}
		if time.Now().After(give) {
			t.Fatal("no dispatch left in one frame")
		}
		for len(told) > 0 {
			<-told
		}
		for len(messages) > 0 {
			<-messages
		}
	}
}

// What may not wait, or does not fit, leaves in frames of its own, in the same order.
func TestNotAllIsWhole(t *testing.T) {
	p := newPair(t)
	wait := func(s *bus.Sender, r *bus.Receiver) {
		f := next[*runbusv1.RunnerWorkAccepted](t, r) // nothing follows: it has left when its 4 ms were over
		if f.GetSeq() != 1 || f.GetPid() != wholePid || s.Holds(1) {
			t.Errorf("accepted %v, and more is held back", f)
		}
	}
	failed := &runbusv1.RunnerWorkResult{Started: true, Outcome: &runbusv1.RunnerWorkResult_Error{Error: &runbusv1.ErrorDetail{Code: "failed"}}}
	noticed := response()
	noticed.GetResponse().Notices = []*runbusv1.Notice{{Message: "x"}}
	other := response()
	other.GetResponse().RunnerPid = 1
	for name, c := range map[string]struct {
		before func(*bus.Sender, *bus.Receiver)
		last   *runbusv1.RunnerWorkChunk
		result *runbusv1.RunnerWorkResult
		chunks int
	}{
		"late":              {before: wait, last: lastChunk([]byte("rows")), result: response(), chunks: 1},
		"failed":            {result: failed},
		"with notices":      {last: lastChunk([]byte("rows")), result: noticed, chunks: 1},
		"of other rows":     {last: chunk([]byte("rows")), result: response(), chunks: 1},
		"of another pid":    {last: lastChunk([]byte("rows")), result: other, chunks: 1},
		"a large chunk":     {last: lastChunk(make([]byte, 64<<10)), result: response(), chunks: 1},
		"more than a chunk": {before: func(s *bus.Sender, _ *bus.Receiver) { send(t, s, chunk([]byte("rows"))) }, last: lastChunk([]byte("rows")), result: response(), chunks: 2},
	} {
		s, r := p.wholly(schemas.NewID())
		send(t, s, &runbusv1.RunnerWorkAccepted{Pid: wholePid})
		if err := s.Send(within(t), &runbusv1.RunnerWorkAccepted{}); schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("%s: a second acceptance: %v", name, err)
		}
		if c.before != nil {
			c.before(s, r)
		}
		ended := make(chan error, 1)
		s.Finish(c.last, c.result, func(err error) { ended <- err })
		seq := uint64(1)
		if name != "late" {
			next[*runbusv1.RunnerWorkAccepted](t, r)
		}
		for range c.chunks {
			seq++
			if f := next[*runbusv1.RunnerWorkChunk](t, r); f.GetSeq() != seq {
				t.Errorf("%s: chunk %d is number %d", name, seq-1, f.GetSeq())
			}
		}
		result := next[*runbusv1.RunnerWorkResult](t, r)
		if result.GetSeq() != seq+1 || !proto.Equal(result.GetResponse(), c.result.GetResponse()) || !proto.Equal(result.GetError(), c.result.GetError()) {
			t.Errorf("%s: result %v", name, result)
		}
		r.Done(result)
		r.Close()
		if err := <-ended; err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}

	// Progress that does not fit is sent as ever, behind what waited.
	s, r := p.wholly("many")
	send(t, s, &runbusv1.RunnerWorkAccepted{Pid: wholePid})
	for range 3 {
		send(t, s, progress("x"))
	}
	send(t, s, progress(string(make([]byte, 4000))))
	if s.Holds(1) {
		t.Error("more is held back")
	}
	next[*runbusv1.RunnerWorkAccepted](t, r)
	for i := range 4 {
		if f := next[*runbusv1.RunnerWorkProgress](t, r); f.GetSeq() != uint64(i+2) {
			t.Errorf("progress %v", f)
		}
	}
	r.Close()

	// A stream that is closed says so, whatever waited.
	s, _ = p.wholly("closed")
	send(t, s, &runbusv1.RunnerWorkAccepted{Pid: wholePid})
	s.Close()
	ended := make(chan error, 1)
	s.Finish(lastChunk([]byte("rows")), response(), func(err error) { ended <- err })
	if err := <-ended; !errors.Is(err, bus.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	for what, f := range map[string]bus.Frame{"a whole": &runbusv1.RunnerWorkWhole{Seq: 1}, "a chunk over the limit": chunk(make([]byte, bus.ChunkBytes+1))} {
		s, _ = p.wholly(schemas.NewID())
		if err := s.Send(within(t), f); schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("%s: %v", what, err)
		}
	}
	s, _ = p.wholly(schemas.NewID())
	s.Finish(chunk(make([]byte, bus.ChunkBytes+1)), response(), func(err error) { ended <- err })
	if err := <-ended; schemas.CodeOf(err) != schemas.CodeInvalid {
		t.Errorf("a last chunk over the limit: %v", err)
	}
}

// A frame that says it is all of a dispatch is checked as any other, alone and among those of others: what is foreign, of another
// session, late, a second one, unknown or no such frame is dropped and counted. One that is late is acknowledged.
func TestWholeFramesAreChecked(t *testing.T) {
	p := newPair(t, bus.ResendEvery(time.Hour), bus.TombstoneFor(time.Hour))
	replica := p.receivers.Replica()
	other := schemas.RunnerRef{Tenant: "acme", Runner: "edge.2"}
	thief := bus.NewConn(p.dial(t, other))
	defer thief.NATS().Close()
	credits, err := p.runner.NATS().SubscribeSync(schemas.CreditSubject(edge, "*"))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.runner.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	whole := func(dispatch, session string, seq uint64) *runbusv1.RunnerWorkWhole {
		return &runbusv1.RunnerWorkWhole{DispatchId: dispatch, Session: session, Seq: seq, ArrowIpc: []byte("rows"), Response: response().GetResponse()}
	}
	together := func(m *runbusv1.RunnerWorkWhole) proto.Message {
		return &runbusv1.RunnerWorkFrames{Frames: []*runbusv1.RunnerWorkFrame{{Frame: &runbusv1.RunnerWorkFrame_Whole{Whole: m}}}}
	}
	for _, several := range []bool{false, true} {
		d1, gone := "d1", "gone"
		if several {
			d1, gone = "d2", "gone2"
		}
		r := p.receivers.Open(edge, session, d1, 0)
		p.receivers.Open(edge, session, gone, 0).Close()
		data := func(ref schemas.RunnerRef, dispatch string) string {
			if several {
				dispatch = "all"
			}
			return schemas.ResultDataSubject(ref, replica, dispatch)
		}
		unknown := whole(d1, "0000", 1)
		talkative := whole(d1, session, 1)
		for range 100_000 {
			talkative.Updates = append(talkative.Updates, &runbusv1.RunFetchUpdate{})
		}
		large := whole(d1, session, 1)
		large.ArrowIpc = make([]byte, bus.ChunkBytes+1)
		for _, c := range []struct {
			reason  bus.DropReason
			from    *bus.Conn
			subject string
			m       *runbusv1.RunnerWorkWhole
		}{
			{bus.DropForeign, thief, data(other, d1), whole(d1, session, 1)},
			{bus.DropForeign, thief, data(other, gone), whole(gone, session, 1)},
			{bus.DropUnknown, p.runner, data(edge, "never"), whole("never", session, 1)},
			{bus.DropLate, p.runner, data(edge, gone), whole(gone, session, 1)},
			{bus.DropSession, p.runner, data(edge, d1), unknown},
			{bus.DropSession, p.runner, data(edge, gone), whole(gone, "0000", 1)},
			{bus.DropInvalid, p.runner, data(edge, d1), whole(d1, session, 0)},
			{bus.DropInvalid, p.runner, data(edge, d1), whole(d1, session, 2)},
			{bus.DropInvalid, p.runner, data(edge, d1), large},
			{bus.DropInvalid, p.runner, data(edge, d1), talkative},
			{bus.DropInvalid, p.runner, schemas.ResultCtlSubject(edge, replica, d1), whole(d1, session, 1)},
		} {
			before := p.receivers.Dropped()
			m := proto.Message(c.m)
			if several {
				m = together(c.m)
			}
			forge(t, c.from, c.subject, m)
			eventually(t, c.from, string(c.reason), func() bool { return p.receivers.Dropped()[c.reason] > before[c.reason] })
		}
		before := p.receivers.Dropped()
		second := whole(d1, session, 1)
		second.ArrowIpc, second.Response.RunnerPid, second.Updates = []byte("lies"), wholePid+1, []*runbusv1.RunFetchUpdate{{Message: "a lie"}}
		for _, w := range []*runbusv1.RunnerWorkWhole{whole(d1, session, 1), second} {
			m := proto.Message(w)
			if several {
				m = together(w)
			}
			forge(t, p.runner, data(edge, d1), m)
		}
		eventually(t, p.runner, "a second one", func() bool { return p.receivers.Dropped()[bus.DropDuplicate] == before[bus.DropDuplicate]+1 })
		forge(t, p.runner, schemas.ResultCtlSubject(edge, replica, d1), &runbusv1.RunnerWorkResult{DispatchId: d1, Session: session, Seq: 2})
		eventually(t, p.runner, "after the end", func() bool { return p.receivers.Dropped()[bus.DropOverrun] == before[bus.DropOverrun]+1 })
		if f := next[*runbusv1.RunnerWorkAccepted](t, r); f.GetPid() != wholePid {
			t.Errorf("of two, the second was accepted: %v", f)
		}
		if f := next[*runbusv1.RunnerWorkChunk](t, r); string(f.GetArrowIpc()) != "rows" {
			t.Errorf("of two, the second has the rows: %v", f)
		}
		result := next[*runbusv1.RunnerWorkResult](t, r)
		if result.GetResponse().GetRunnerPid() != wholePid {
			t.Errorf("of two, the second has the result: %v", result)
		}
		r.Done(result)
		acknowledged := map[string]bool{gone: true, d1: true}
		for len(acknowledged) > 0 {
			msg, err := credits.NextMsgWithContext(within(t))
			if err != nil {
				t.Fatalf("without credit: %v: %v", acknowledged, err)
			}
			list := &runbusv1.RunnerWorkCredits{}
			if bus.TypeOf(msg) == "RunnerWorkCredit" {
				one := &runbusv1.RunnerWorkCredit{}
				if err := bus.Decode(msg, one); err != nil {
					t.Fatal(err)
				}
				list.Credits = append(list.Credits, one)
			} else if err := bus.Decode(msg, list); err != nil {
				t.Fatal(err)
			}
			for _, c := range list.GetCredits() {
				if c.GetAcknowledged() == 1 {
					delete(acknowledged, c.GetDispatchId())
				}
			}
		}
		r.Close()
	}
}

// What left as one frame and was lost comes again as one, once.
func TestWholeFrameIsSentAgain(t *testing.T) {
	p := newPair(t, bus.ResumeEvery(20*time.Millisecond))
	down := p.runner.NATS().StatusChanged(nats.RECONNECTING)
	defer p.runner.NATS().RemoveStatusListener(down)
	p.proxy.Cut(true)
	<-down
	s, r := p.wholly("d1")
	send(t, s, &runbusv1.RunnerWorkAccepted{Pid: wholePid})
	ended := make(chan error, 1)
	s.Finish(lastChunk([]byte("rows")), response(), func(err error) { ended <- err })
	p.proxy.Cut(false)
	<-p.reconnected
	p.senders.Resume()
	next[*runbusv1.RunnerWorkAccepted](t, r)
	next[*runbusv1.RunnerWorkChunk](t, r)
	r.Done(next[*runbusv1.RunnerWorkResult](t, r))
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if f, err := r.Try(); f != nil || err != nil {
		t.Errorf("after the end: %v, %v", f, err)
	}
}
