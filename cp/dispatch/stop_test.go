package dispatch_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/cp/registry"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	never    = runbusv1.CancelState_CANCEL_STATE_NEVER_STARTED
	stopping = runbusv1.CancelState_CANCEL_STATE_STOPPING
)

// confirm has the runner answer the next cancel order and end w with the code of the order. A nil w is given by the channel
// that confirm returns.
func confirm(e *env, w *work) chan<- *work {
	works := make(chan *work, 1)
	if w != nil {
		works <- w
	}
	e.runner.OnCancel(func(c *runbusv1.CancelOrder) runbusv1.CancelState {
		go func() { (<-works).fail(true, c.GetCode(), "stopped") }()
		return stopping
	})
	return works
}

// Whoever may cancel does, the runner confirms, and the work is given up (SPEC D12).
func TestCancel(t *testing.T) {
	e := newEnv(t, nil, nil)
	f := e.start(t, request("edge-1"))
	w := e.accept(t)
	id := rt.Wait(t, "accepted", f.sink.accepted).DispatchID
	confirm(e, w)
	other := writer()
	other.Tenant = rt.Other
	reader := writer()
	reader.Role = auth.RoleReader
	for _, c := range []struct {
		by   auth.Principal
		id   string
		code schemas.Code
	}{{other, id, schemas.CodeNotFound}, {reader, id, schemas.CodeForbidden}, {writer(), "01ARZ3NDEKTSV4RRFFQ69G5FAV", schemas.CodeNotFound}} {
		if err := e.d.Cancel(c.by, c.id); schemas.CodeOf(err) != c.code {
			t.Errorf("cancel of %s by %s of %s: %v", c.id, c.by.Role, c.by.Tenant, err)
		}
	}
	rt.Must(t, e.d.Cancel(writer(), id))
	wantOutcome(t, f.wait(t), dispatch.OutcomeCancelled, "cancelled", "the fetch was cancelled")
	if o := e.runner.Order(t).GetCancel(); o.GetDispatchId() != id || o.GetCode() != "cancelled" {
		t.Errorf("order = %v", o)
	}
	rt.Drain(t, w.Sender)
	if err := e.d.Cancel(writer(), id); schemas.CodeOf(err) != schemas.CodeNotFound {
		t.Errorf("cancel of an ended fetch: %v", err)
	}
}

// A caller that goes away cancels, whether its context ends or it doesn't take what comes.
func TestCallerGone(t *testing.T) {
	e := newEnv(t, nil, nil)
	for _, how := range []string{"context", "sink"} {
		f := e.start(t, request("edge-1"))
		w := e.accept(t)
		confirm(e, w)
		rt.Wait(t, "accepted", f.sink.accepted)
		if how == "context" {
			f.stop()
		} else {
			f.sink.mu.Lock()
			f.sink.refuse = errGone
			f.sink.mu.Unlock()
			w.chunks([]byte("x"))
		}
		wantOutcome(t, f.wait(t), dispatch.OutcomeCancelled, "cancelled", "the fetch was cancelled")
		rt.Drain(t, w.Sender)
	}
}

// A caller that blocks holds the runner back, and can't keep the cancel from reaching it.
func TestStuckCaller(t *testing.T) {
	e := newEnv(t, nil, nil)
	f := e.start(t, request("edge-1"))
	w := e.accept(t)
	id := rt.Wait(t, "accepted", f.sink.accepted).DispatchID
	hold := make(chan struct{})
	f.sink.mu.Lock()
	f.sink.hold = hold
	f.sink.mu.Unlock()
	w.chunks([]byte("x"), []byte("y"))
	rt.Wait(t, "the first chunk", f.sink.chunk)
	confirm(e, w)
	rt.Must(t, e.d.Cancel(writer(), id))
	if o := e.runner.Order(t).GetCancel(); o.GetDispatchId() != id {
		t.Errorf("order = %v", o)
	}
	rt.Drain(t, w.Sender)
	rt.Wait(t, "the sink is told to give up", f.sink.abandoned)
	select {
	case o := <-f.done:
		t.Errorf("it returned while its sink was being called: %+v", o)
	default:
	}
	close(hold)
	wantOutcome(t, f.wait(t), dispatch.OutcomeCancelled, "cancelled", "")
	if n := len(f.sink.chunk); n != 0 {
		t.Errorf("the sink got %d more chunks after the cancel", n)
	}
}

// accepted is a fetch with little time, within, that its runner has accepted in that. before is called before it does.
func accepted(t *testing.T, configure func(*dispatch.Deps), before func(*env, *work)) (e *env, f *fetching, w *work, within time.Duration) {
	t.Helper()
	for within = 2 * time.Second; ; within *= 3 { // in which it has all been done, but on a busy machine
		e = newEnv(t, func(d *dispatch.Deps) { configure(d); d.Timeout = within }, nil)
		f = e.start(t, request("edge-1"))
		w = e.take(t)
		before(e, w)
		rt.Send(t, w.Sender, &runbusv1.RunnerWorkAccepted{Pid: 4711})
		select {
		case <-f.sink.accepted:
			return e, f, w, within
		case o := <-f.done:
			if within > rt.Patience {
				t.Fatalf("not accepted within %s: %+v", within, o)
			}
		}
	}
}

// Out of time: a runner that confirms ends it as deadline, one that doesn't leaves it unknown, with the literal text (SPEC D4).
func TestDeadline(t *testing.T) {
	e, f, _, within := accepted(t, func(*dispatch.Deps) {}, func(e *env, w *work) { confirm(e, w) })
	wantOutcome(t, f.wait(t), dispatch.OutcomeDeadline, "deadline", fmt.Sprintf(`runner "edge-1" did not finish within %s and was stopped`, within))
	if o := e.runner.Order(t).GetCancel(); o.GetCode() != "deadline" {
		t.Errorf("order = %v", o)
	}

	e, f, w, within := accepted(t, unconfirmed, func(*env, *work) {})
	wantOutcome(t, f.wait(t), dispatch.OutcomeUnknown, "outcome_unknown",
		fmt.Sprintf(`runner "edge-1" accepted the work and has not answered within %s — the run may still be in progress there`, within))

	// Its result comes late: dropped, counted, and acknowledged, so that the runner can forget it.
	w.complete()
	e.awaitMetric(t, "runbus_results_dropped_total", map[string]string{"reason": "late"})
}

// D4 in its default form.
func TestOutcomeUnknownText(t *testing.T) {
	want := `runner "edge-1" accepted the work and has not answered within 10m0s — the run may still be in progress there`
	if got := schemas.ErrOutcomeUnknown("edge-1", 10*time.Minute).Error(); got != want {
		t.Errorf("text = %s", got)
	}
}

// A runner that doesn't accept in time is asked: only its own word that it never started makes it a refusal.
func TestNotAccepted(t *testing.T) {
	hasty := func(d *dispatch.Deps) { d.AcceptWithin = 200 * time.Millisecond }
	e := newEnv(t, hasty, nil)
	secret := secretRequest()

	e.runner.OnCancel(func(*runbusv1.CancelOrder) runbusv1.CancelState { return never })
	f := e.start(t, secret)
	e.runner.Assignment(t)
	wantOutcome(t, f.wait(t), dispatch.OutcomeRefused, "runner_offline", `runner "edge-1" is offline: no answer`)

	works := confirm(e, nil)
	f = e.start(t, secret)
	works <- e.take(t)
	o := f.wait(t)
	if o.Code != dispatch.OutcomeFailed || !strings.Contains(o.Err.Message, "too late") {
		t.Errorf("accepted too late: %+v", o)
	}
	if events := e.Events(t, "credential.read"); len(events) != 0 {
		t.Errorf("credentials were read: %v", events)
	}

	e = newEnv(t, func(d *dispatch.Deps) { hasty(d); unconfirmed(d) }, nil)
	f = e.start(t, secret)
	e.runner.Assignment(t)
	wantOutcome(t, f.wait(t), dispatch.OutcomeUnknown, "outcome_unknown", "")
	if events := e.Events(t, "credential.read"); len(events) != 0 {
		t.Errorf("credentials were read: %v", events)
	}
}

// A runner that dies fails its fetch at once (SPEC D13).
func TestRunnerLost(t *testing.T) {
	e := newEnv(t, nil, func(d *registry.Deps) { d.Grace = 200 * time.Millisecond })
	for _, c := range []struct {
		lose func()
		why  string
	}{
		{func() { e.runner = e.Enrol(t, e.cred, "edge-1") }, "a new process took its id"},
		{func() { e.runner.Goodbye(t, "bye"); e.runner = nil }, "it said goodbye (bye)"},
		{func() { e.runner.Cut() }, "its link was cut and was not back within 200ms"},
	} {
		if e.runner == nil {
			e.runner = e.Enrol(t, e.cred, "edge-1")
		}
		f := e.start(t, request("edge-1"))
		e.accept(t)
		rt.Wait(t, "accepted", f.sink.accepted)
		c.lose()
		wantOutcome(t, f.wait(t), dispatch.OutcomeRunnerLost, "runner_lost", `runner "edge-1" was lost while it ran this fetch: `+c.why)
	}
}

// A runner that dies while its sealing key is looked for is lost as any other, and no credential is read for it.
func TestRunnerLostBeforeTheCredentials(t *testing.T) {
	e := newEnv(t, nil, nil)
	js, err := natsjs.New(e.Conn(t, embedded.UserSec))
	rt.Must(t, err)
	keys, err := js.KeyValue(t.Context(), string(jetstream.SealingKeys))
	rt.Must(t, err)
	for _, c := range []struct {
		lose func()
		why  string
	}{
		{func() { e.runner = e.Enrol(t, e.cred, "edge-1") }, "a new process took its id"},
		{func() { e.runner.Goodbye(t, "bye") }, "it said goodbye (bye)"},
	} {
		rt.Must(t, keys.Purge(t.Context(), schemas.RunnerKey(e.runner.Ref)))
		f := e.start(t, secretRequest())
		e.accept(t)
		if order := e.runner.Order(t); order.GetRehello() == nil {
			t.Fatalf("got %v", order)
		}
		c.lose()
		wantOutcome(t, f.wait(t), dispatch.OutcomeRunnerLost, "runner_lost", `runner "edge-1" was lost while it ran this fetch: `+c.why)
	}
	if events := e.Events(t, "credential.read"); len(events) != 0 {
		t.Errorf("credentials were read: %v", events)
	}
}

// What a runner had sent before it took leave still counts.
func TestResultBeforeGoodbye(t *testing.T) {
	e := newEnv(t, nil, nil)
	f := e.start(t, request("edge-1"))
	w := e.accept(t)
	w.chunks([]byte("abc"))
	w.complete()
	e.runner.Goodbye(t, "drained")
	wantOutcome(t, f.wait(t), dispatch.OutcomeCompleted, "", "")
}

// Results of a dispatch that nobody waits for, of another runner, or of another session are dropped and counted (SPEC D5).
func TestForeignResults(t *testing.T) {
	e := newEnv(t, nil, nil)
	thief := e.Enrol(t, e.Mint(t, e.Admin, "thief"), "thief")
	f := e.start(t, request("edge-1"))
	w := e.accept(t)
	rt.Wait(t, "accepted", f.sink.accepted)
	id, replica := w.assignment.GetDispatchId(), w.assignment.GetReplica()
	forged := func(dispatch, session string, seq uint64) *runbusv1.RunnerWorkResult {
		return &runbusv1.RunnerWorkResult{DispatchId: dispatch, Session: session, Seq: seq, Started: true,
			Outcome: &runbusv1.RunnerWorkResult_Error{Error: &runbusv1.ErrorDetail{Code: "failed", Message: "forged"}}}
	}
	session := e.runner.Session
	rt.Must(t, thief.Conn.Publish(schemas.ResultCtlSubject(thief.Ref, replica, id), forged(id, session, 2)))
	rt.Must(t, thief.Conn.NATS().Flush())
	const unknown = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
	own := e.runner.Conn
	rt.Must(t, own.Publish(schemas.ResultCtlSubject(e.runner.Ref, replica, unknown), forged(unknown, session, 2)))
	rt.Must(t, own.Publish(schemas.ResultCtlSubject(e.runner.Ref, replica, id), forged(id, "another", 2)))
	rt.Must(t, own.Publish(schemas.ResultCtlSubject(e.runner.Ref, replica, id), forged(id, session, 1)))
	w.chunks([]byte("abc"))
	w.complete()
	wantOutcome(t, f.wait(t), dispatch.OutcomeCompleted, "", "")
	if string(f.sink.bytes) != "abc" {
		t.Errorf("the caller got %q", f.sink.bytes)
	}
	// A second result of the same dispatch.
	rt.Must(t, own.Publish(schemas.ResultCtlSubject(e.runner.Ref, replica, id), forged(id, session, 4)))
	f = e.start(t, request("edge-1")) // behind it on the same subject
	w = e.accept(t)
	w.complete()
	wantOutcome(t, f.wait(t), dispatch.OutcomeCompleted, "", "")
	for reason, more := range map[string]bool{
		"foreign": false, "unknown": false, "session": false, "duplicate": true, "late": true, // the runner sends again what is not acknowledged within 5 s
	} {
		if n := e.Metric(t, "runbus_results_dropped_total", map[string]string{"reason": reason}); n < 1 || n > 1 && !more {
			t.Errorf("dropped as %s: %v", reason, n)
		}
	}
}

// Close takes no new work and lets what runs end; when its time is over, it cancels at the runner.
func TestClose(t *testing.T) {
	e := newEnv(t, nil, nil)
	f := e.start(t, request("edge-1"))
	w := e.accept(t)
	rt.Wait(t, "accepted", f.sink.accepted)
	confirm(e, w)
	ctx, cancel := context.WithCancel(t.Context())
	closed := make(chan error, 1)
	go func() { closed <- e.d.Close(ctx) }()
	for {
		o := e.d.Fetch(t.Context(), request("nobody"), "", newSink())
		if o.Err.Code == schemas.CodeUnavailable {
			break
		}
	}
	if len(f.done) != 0 {
		t.Error("closing cancelled what runs")
	}
	cancel()
	if err := rt.Wait(t, "the close", closed); !errors.Is(err, context.Canceled) {
		t.Errorf("close: %v", err)
	}
	wantOutcome(t, f.wait(t), dispatch.OutcomeCancelled, "cancelled", "the fetch was cancelled")
}
