package dispatch_test

import (
	"sync"
	"testing"

	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
)

// Dispatches get the memory of those that have ended. Nobody gets to see another's, whoever looks on meanwhile.
func TestMemoryIsUsedAgain(t *testing.T) {
	const fetchers, each = 4, 25
	e := newEnv(t, nil, nil)
	type ended struct {
		outcome dispatch.Outcome
		sink    *sink
	}
	results := make(chan ended, fetchers*each)
	var callers, lookers sync.WaitGroup
	for range fetchers {
		callers.Go(func() {
			for range each {
				s := newSink()
				results <- ended{e.d.Fetch(t.Context(), request("edge-1"), "", s), s}
			}
		})
	}
	over := make(chan struct{})
	lookers.Go(func() {
		for {
			select {
			case <-over:
				return
			default:
			}
			for _, r := range e.d.Running(rt.Tenant) {
				live := e.record.Live(rt.Tenant, r.DispatchID)
				if live == nil {
					continue
				}
				if shown, _ := live.Snapshot(); shown.DispatchID != r.DispatchID || len(shown.Phases) == 0 || shown.Phases[0].Phase != dispatch.PhaseQueued {
					t.Errorf("the timeline of %s is %+v", r.DispatchID, shown)
				}
			}
			if e.d.Cancel(writer(), "01ARZ3NDEKTSV4RRFFQ69G5FAV") == nil {
				t.Error("a fetch is cancelled that never was")
			}
		}
	})
	for n := range fetchers * each {
		if n%10 == 0 {
			e.runner.Beat(t, nil) // else it gets no work after 45 s
		}
		w := e.accept(t)
		w.chunks([]byte(w.assignment.GetDispatchId()))
		w.complete()
	}
	callers.Wait()
	close(over)
	lookers.Wait()
	for range fetchers * each {
		r := <-results
		wantOutcome(t, r.outcome, dispatch.OutcomeCompleted, "", "")
		if string(r.sink.bytes) != r.outcome.DispatchID || r.outcome.Response.GetBytes() != int64(len(r.outcome.DispatchID)) {
			t.Errorf("%s got %q, %v", r.outcome.DispatchID, r.sink.bytes, r.outcome.Response)
		}
		if p := phases(r.outcome); len(p) != 6 {
			t.Errorf("phases = %v", p)
		}
	}
}
