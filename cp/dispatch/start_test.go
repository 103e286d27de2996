package dispatch_test

import (
	"runtime"
	"testing"
	"time"

	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
)

// The start of a fetch that doesn't end soon is in the audit while it runs, once, with the time at which it was accepted.
func TestTheStartOfALongFetchIsAudited(t *testing.T) {
	e := newEnv(t, nil, nil)
	f := e.start(t, request("edge-1"))
	w := e.accept(t)
	accepted := rt.Wait(t, "the acceptance", f.sink.accepted)
	for give := time.Now().Add(rt.Patience); len(e.Events(t, "dispatch.start")) == 0; runtime.Gosched() {
		if time.Now().After(give) {
			t.Fatal("a fetch that runs is not in the audit")
		}
	}
	w.chunks([]byte("x"))
	w.complete()
	o := f.wait(t)
	wantOutcome(t, o, dispatch.OutcomeCompleted, "", "")
	start, end := e.Events(t, "dispatch.start"), e.Events(t, "dispatch.end")
	if len(start) != 1 || len(end) != 1 {
		t.Fatalf("audited are %v and %v", start, end)
	}
	s := start[0]
	if s.GetSubject() != "dispatch:"+o.DispatchID || s.GetActor() != "person:wanda" || s.GetDetails()["runner"] != "edge-1" ||
		s.GetDetails()["source"] != "file" || s.GetDetails()["chosen"] != "for this action" {
		t.Errorf("the start is %v", s)
	}
	if !s.GetAt().AsTime().Equal(accepted.At) || end[0].GetAt().AsTime().Before(accepted.At) {
		t.Errorf("accepted at %v, audited %v and %v", accepted.At, s.GetAt().AsTime(), end[0].GetAt().AsTime())
	}
}
