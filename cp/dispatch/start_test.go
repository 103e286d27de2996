package dispatch_test

import (
	"context"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
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

// A fetch that was accepted just before the audit log ends, because a part of the control plane fails, is in it.
func TestTheStartBeforeTheEndOfTheLogIsAudited(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	defer end()
	e := newEnv(t, nil, nil)
	log, err := audit.New(ctx, e.Store, "own", e.Log)
	rt.Must(t, err)
	ended := make(chan error, 1)
	go func() { ended <- log.Run(ctx) }()
	rt.Must(t, e.d.Close(t.Context()))
	e.d, err = dispatch.New(dispatch.Deps{
		Bus: bus.NewConn(e.Conn(t, embedded.UserDispatch)), Registry: e.Registry, Audit: log, Log: e.Log, Now: e.Clock.Now,
		AcceptWithin: rt.Patience, ConfirmWithin: rt.Patience,
	})
	rt.Must(t, err)
	f := e.start(t, request("edge-1"))
	w := e.accept(t)
	rt.Wait(t, "the acceptance", f.sink.accepted)
	end()
	rt.Must(t, rt.Wait(t, "the log's end", ended))
	if starts := e.Events(t, "dispatch.start"); len(starts) != 1 || starts[0].GetSubject() != "dispatch:"+w.assignment.GetDispatchId() {
		t.Errorf("audited are %v", starts)
	}
	w.complete()
	wantOutcome(t, f.wait(t), dispatch.OutcomeCompleted, "", "")
}

// startStandsBefore wants that of the dispatch that read a credential the audit has one event before that, its start, and no other start.
func (e *env) startStandsBefore(t *testing.T, read *runbusv1.AuditEvent) {
	t.Helper()
	all, err := e.Audit.List(t.Context(), rt.Tenant, 1000)
	rt.Must(t, err)
	var actions []string
	for _, a := range all {
		if a.GetSubject() == read.GetSubject() {
			actions = append(actions, a.GetAction())
		}
	}
	if !slices.Equal(actions, []string{"dispatch.start", "credential.read"}) {
		t.Errorf("of a dispatch that runs with a credential is audited %q", actions)
	}
}
