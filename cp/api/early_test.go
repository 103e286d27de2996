package api

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// interim is an answer to a caller who does something as soon as the interim response is there.
type interim struct {
	*httptest.ResponseRecorder
	then func(id string)
}

func (i *interim) WriteHeader(status int) {
	if status == http.StatusProcessing {
		i.then(i.Header().Get("Runbus-Dispatch-Id"))
		return
	}
	i.ResponseRecorder.WriteHeader(status)
}

// A fetch that is cancelled by an id that was told early ends so, though its dispatch had not begun: its runner hears nothing of it. Only
// those of its tenant who may cancel do.
func TestACancelBeforeTheDispatch(t *testing.T) {
	stack := rt.Start(t, nil)
	d, err := dispatch.New(dispatch.Deps{
		Bus: bus.NewConn(stack.Conn(t, embedded.UserDispatch)), Registry: stack.Registry, Audit: stack.Audit, Log: stack.Log, Now: stack.Clock.Now,
		AcceptWithin: rt.Patience,
	})
	rt.Must(t, err)
	t.Cleanup(func() { rt.Must(t, d.Close(context.Background())) })
	runner := stack.Enrol(t, stack.Mint(t, stack.Admin, "edge"), "edge-1")
	runner.OnCancel(func(*runbusv1.CancelOrder) runbusv1.CancelState {
		return runbusv1.CancelState_CANCEL_STATE_NEVER_STARTED
	})
	s := &server{Deps: Deps{Dispatch: d, Audit: stack.Audit, Log: stack.Log}}

	until := time.Now().Add(time.Hour)
	walt := auth.Principal{Tenant: rt.Tenant, Name: "walt", Role: auth.RoleWriter, ExpiresAt: until}
	rita := auth.Principal{Tenant: rt.Tenant, Name: "rita", Role: auth.RoleReader, ExpiresAt: until}
	cancel := func(by auth.Principal, id string) schemas.Code {
		_, err := s.cancelFetch(context.WithValue(t.Context(), principalKey{}, by), &dispatchID{ID: id})
		var p *Problem
		if errors.As(err, &p) {
			return p.Code
		}
		return ""
	}
	request := func() dispatch.Request {
		return dispatch.Request{Caller: walt, Runner: "edge-1", Fetch: &runbusv1.RunFetchRequest{Source: &runbusv1.Source{Kind: "file"}}}
	}
	w := &interim{ResponseRecorder: httptest.NewRecorder(), then: func(id string) {
		if code := cancel(stack.Stranger, id); code != schemas.CodeNotFound {
			t.Errorf("another tenant's cancel: %q", code)
		}
		if code := cancel(rita, id); code != schemas.CodeForbidden {
			t.Errorf("a reader's cancel: %q", code)
		}
		if code := cancel(walt, id); code != "" {
			t.Errorf("the caller's cancel: %q", code)
		}
	}}
	outcome := s.streamFetch(t.Context(), w, mediaCSV, request(), true)
	if outcome.Code != dispatch.OutcomeCancelled || outcome.RunnerID != "edge-1" {
		t.Errorf("it ended %+v", outcome)
	}
	if code := cancel(walt, outcome.DispatchID); code != schemas.CodeNotFound {
		t.Errorf("the cancel of what has ended: %q", code)
	}
	var told []string
	for _, e := range stack.Events(t, "dispatch.cancel") { // of this tenant
		told = append(told, e.GetOutcome())
	}
	if want := []string{"forbidden", "ok", "not_found"}; !slices.Equal(told, want) {
		t.Errorf("the audit has the cancels %q, not %q", told, want)
	}

	// What the runner is given next is what was asked next.
	next := make(chan dispatch.Outcome, 1)
	go func() {
		next <- s.streamFetch(t.Context(), &interim{ResponseRecorder: httptest.NewRecorder(), then: func(string) {}}, mediaCSV, request(), true)
	}()
	work := runner.Assignment(t)
	if work.GetDispatchId() == outcome.DispatchID {
		t.Error("the cancelled work was handed out")
	}
	if code := cancel(walt, work.GetDispatchId()); code != "" {
		t.Errorf("the cancel of what runs: %q", code)
	}
	if o := rt.Wait(t, "the end", next); o.DispatchID != work.GetDispatchId() || o.Code != dispatch.OutcomeCancelled {
		t.Errorf("the next ended %+v", o)
	}
	if len(s.early.all) != 0 {
		t.Errorf("%d fetches were not forgotten", len(s.early.all))
	}
}
