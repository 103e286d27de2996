package dispatch_test

import (
	"bytes"
	"testing"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A runner gets asked for what its hello lists, and is taken at its word: its checksum is XXH3 alone, and its first chunk tells the
// caller that rows come, unless it said so itself.
func TestAbilities(t *testing.T) {
	e := newEnv(t, nil, nil)
	r := e.Connect(t, e.Mint(t, e.Admin, "able"), "able-1")
	answer := r.Hello(t, func(h *runbusv1.RunnerHello) {
		h.Capabilities = append(h.Capabilities, bus.CapabilityXXH3, bus.CapabilityChunksTell)
	})
	if answer.GetError() != nil {
		t.Fatal(answer.GetError())
	}
	r.Listen(t)
	r.Beat(t, nil)
	e.Await(t, "able-1 is dispatchable", func() bool { return e.Dispatchable(t, "able-1") })
	e.runner = r
	for name, itself := range map[string]bool{"told by the chunk": false, "told by the runner": true} {
		f := e.start(t, request("able-1"))
		w := e.accept(t)
		if !w.assignment.GetXxh3Whole() || !w.assignment.GetChunksTell() {
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
}
