package dispatch_test

import (
	"bytes"
	"slices"
	"testing"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/cp/trace"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// able has the runner able-1, which can all that a hello may list of results, take the work.
func (e *env) able(t *testing.T) {
	t.Helper()
	r := e.Connect(t, e.Mint(t, e.Admin, "able"), "able-1")
	answer := r.Hello(t, func(h *runbusv1.RunnerHello) {
		h.Capabilities = append(h.Capabilities, bus.CapabilityXXH3, bus.CapabilityChunksTell, bus.CapabilityWhole)
	})
	if answer.GetError() != nil {
		t.Fatal(answer.GetError())
	}
	r.Listen(t)
	r.Beat(t, nil)
	e.Await(t, "able-1 is dispatchable", func() bool { return e.Dispatchable(t, "able-1") })
	e.runner = r
}

// A runner gets asked for what its hello lists, and is taken at its word: its checksum is XXH3 alone, its first chunk tells the
// caller that rows come, unless it said so itself, and all of a small dispatch may come in one frame.
func TestAbilities(t *testing.T) {
	e := newEnv(t, nil, nil)
	e.able(t)
	for name, itself := range map[string]bool{"told by the chunk": false, "told by the runner": true} {
		f := e.start(t, request("able-1"))
		w := e.accept(t)
		if !w.assignment.GetXxh3Whole() || !w.assignment.GetChunksTell() || !w.assignment.GetWhole() {
			t.Fatalf("%s: assignment = %v", name, w.assignment)
		}
		if itself {
			rt.Send(t, w.Sender, &runbusv1.RunnerWorkProgress{Update: &runbusv1.RunFetchUpdate{Phase: runbusv1.Phase_PHASE_STREAMING, Message: "reading"}})
		}
		w.chunks([]byte("one"), []byte("two"))
		digest := bus.Digest{Scheme: bus.SchemeOf(w.assignment)}
		digest.Add([]byte("one"))
		digest.Add([]byte("two"))
		rt.Send(t, w.Sender, &runbusv1.RunnerWorkResult{
			Started: true, RestXxh3: digest.XXH3(),
			Outcome: &runbusv1.RunnerWorkResult_Response{Response: &runbusv1.RunFetchResponse{Rows: 20, Bytes: 6}},
		})
		wantOutcome(t, f.wait(t), dispatch.OutcomeCompleted, "", "")
		p := f.sink.progress
		if len(p) != 1 || p[0].GetPhase() != runbusv1.Phase_PHASE_STREAMING || p[0].GetAt() == nil || (p[0].GetMessage() == "reading") != itself || !itself && p[0].GetRows() != 10 {
			t.Errorf("%s: progress = %v", name, p)
		}
		if !bytes.Equal(f.sink.bytes, []byte("onetwo")) {
			t.Errorf("%s: %q came", name, f.sink.bytes)
		}
	}

	// All in one frame, which a runner need not wait with: the same for the caller, and in the timeline.
	for what, sum := range map[string]string{dispatch.OutcomeCompleted: "one", dispatch.OutcomeFailed: "another"} {
		f := e.start(t, request("able-1"))
		m := e.runner.Assignment(t)
		digest := bus.Digest{Scheme: bus.SchemeOf(m)}
		digest.Add([]byte(sum))
		rt.Must(t, e.runner.Conn.Publish(schemas.ResultDataSubject(e.runner.Ref, m.GetReplica(), m.GetDispatchId()), &runbusv1.RunnerWorkWhole{
			DispatchId: m.GetDispatchId(), Session: m.GetSession(), Seq: 1, ArrowIpc: []byte("one"), RestXxh3: digest.XXH3(),
			Updates:  []*runbusv1.RunFetchUpdate{{Phase: runbusv1.Phase_PHASE_QUERYING, Message: "asking"}},
			Response: &runbusv1.RunFetchResponse{Rows: 10, Bytes: 3, RunnerPid: 4711},
		}))
		o := f.wait(t)
		if a := <-f.sink.accepted; a.RunnerPID != 4711 {
			t.Errorf("%s: accepted %+v", what, a)
		}
		p := f.sink.progress
		if o.Code != what || len(p) != 2 || p[0].GetMessage() != "asking" || p[1].GetPhase() != runbusv1.Phase_PHASE_STREAMING || p[1].GetRows() != 10 || string(f.sink.bytes) != "one" {
			t.Errorf("%s: %s, %v, progress %v, %q", what, o.Code, o.Err, p, f.sink.bytes)
		}
		if got := phases(o); o.Code == dispatch.OutcomeCompleted && !slices.Equal(got, []string{
			trace.PhaseQueued, trace.PhaseAssigned, trace.PhaseAccepted, trace.PhaseQuerying, trace.PhaseFirstRow, trace.PhaseLastRow, trace.EndPhase(what),
		}) {
			t.Errorf("%s: steps %v", what, got)
		}
	}
}
