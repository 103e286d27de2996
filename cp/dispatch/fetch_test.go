package dispatch_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/seal"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A fetch passes progress and the result through, in order, and tells its timeline (SPEC D1, D2, D15).
func TestFetch(t *testing.T) {
	e := newEnv(t, nil, nil)
	f := e.start(t, request("edge-1"))
	w := e.accept(t)
	a := rt.Wait(t, "accepted", f.sink.accepted)
	if a.RunnerPID != 4711 || a.RunnerID != "edge-1" || a.Tenant != "acme" || a.DispatchID != w.assignment.GetDispatchId() {
		t.Errorf("accepted = %+v", a)
	}
	r := w.assignment.GetRequest()
	if r.GetMaxRows() != 10_000_000 || r.GetMaxBytes() != 4<<30 || w.assignment.GetCredentialsFollow() ||
		w.assignment.GetSession() != e.runner.Session || w.assignment.GetReplica() != e.d.Replica() ||
		time.Until(w.assignment.GetDeadline().AsTime()) < 9*time.Minute {
		t.Errorf("assignment = %v", w.assignment)
	}
	list := e.d.Running(rt.Tenant)
	if len(list) != 1 || list[0].DispatchID != a.DispatchID || list[0].Person != "wanda" || list[0].Source != "file" {
		t.Errorf("running = %+v", list)
	}
	if len(e.d.Running(rt.Other)) != 0 {
		t.Error("another tenant sees it")
	}
	rt.Send(t, w.Sender, &runbusv1.RunnerWorkProgress{Update: &runbusv1.RunFetchUpdate{Phase: runbusv1.Phase_PHASE_CONNECTING, Message: "opening"}})
	rt.Send(t, w.Sender, &runbusv1.RunnerWorkProgress{Update: &runbusv1.RunFetchUpdate{Phase: runbusv1.Phase_PHASE_QUERYING}})
	var pieces [][]byte
	for i := range 40 { // far more than a window
		pieces = append(pieces, bytes.Repeat([]byte{byte(i)}, bus.ChunkBytes))
	}
	w.chunks(pieces...)
	w.complete()
	o := f.wait(t)
	wantOutcome(t, o, dispatch.OutcomeCompleted, "", "")
	if o.Response.GetRows() != 42 || o.RunnerID != "edge-1" {
		t.Errorf("outcome = %+v", o)
	}
	if !bytes.Equal(f.sink.bytes, bytes.Join(pieces, nil)) {
		t.Error("the result differs from what the runner sent")
	}
	if len(f.sink.progress) != 2 || f.sink.progress[0].GetMessage() != "opening" || f.sink.progress[0].GetAt() == nil {
		t.Errorf("progress = %v", f.sink.progress)
	}
	if got := strings.Join(phases(o), ","); got != "queued,assigned,accepted,connecting,querying,first row,last row,done" {
		t.Errorf("phases = %s", got)
	}
	if o.Phases[0].By != "replica:"+e.d.Replica() || o.Phases[2].By != "runner:edge-1" {
		t.Errorf("phases = %+v", o.Phases)
	}
	// The start is an event of its own if it was written before the end came, which tells as much.
	start, end := e.Events(t, "dispatch.start"), e.Events(t, "dispatch.end")
	if len(end) != 1 || end[0].GetActor() != "person:wanda" || end[0].GetDetails()["rows"] != "400" && end[0].GetDetails()["rows"] != "42" {
		t.Errorf("audit = %v", end)
	}
	ran, err := time.ParseDuration(end[0].GetDetails()["ran"])
	if err != nil || ran < 0 || end[0].GetDetails()["chosen"] != "for this action" || end[0].GetDetails()["runner"] != "edge-1" {
		t.Errorf("audit = %v, %v", end, err)
	}
	if len(start) > 1 || len(start) == 1 && (start[0].GetActor() != "person:wanda" || start[0].GetDetails()["runner"] != "edge-1" || start[0].GetAt().AsTime().Sub(end[0].GetAt().AsTime().Add(-ran)).Abs() > time.Second) {
		t.Errorf("audit = %v %v", start, end)
	}
	if n := e.Metric(t, "runbus_dispatches_total", map[string]string{"outcome": "completed", "code": "ok"}); n != 1 {
		t.Errorf("runbus_dispatches_total = %v", n)
	}
	if len(e.d.Running(rt.Tenant)) != 0 || e.Metric(t, "runbus_dispatches_in_flight", nil) != 0 {
		t.Error("it still runs")
	}
}

// A runner has two seconds to accept, where nothing else is said.
func TestTheTimeToAccept(t *testing.T) {
	e := newEnv(t, func(d *dispatch.Deps) { d.AcceptWithin = 0 }, nil)
	e.runner.OnCancel(func(*runbusv1.CancelOrder) runbusv1.CancelState { return never })
	before := e.Clock.Now()
	f := e.start(t, request("edge-1"))
	by := e.runner.Assignment(t).GetAcceptBy().AsTime()
	if after := e.Clock.Now(); by.Before(before.Add(2*time.Second)) || by.After(after.Add(2*time.Second)) {
		t.Errorf("a work that was assigned between %s and %s is to be accepted by %s", before, after, by)
	}
	wantOutcome(t, f.wait(t), dispatch.OutcomeRefused, "runner_offline", `runner "edge-1" is offline: no answer`)
}

// Secrets are read only after the runner accepted, recorded before they are sealed, and open with the runner's key alone.
func TestCredentials(t *testing.T) {
	e := newEnv(t, nil, nil)
	f := e.start(t, secretRequest())
	w := e.take(t)
	if !w.assignment.GetCredentialsFollow() {
		t.Fatal("the assignment doesn't say that credentials follow")
	}
	if events := e.Events(t, "credential.read"); len(events) != 0 {
		t.Fatalf("read before the work was accepted: %v", events)
	}
	rt.Send(t, w.Sender, &runbusv1.RunnerWorkAccepted{Pid: 1})
	var creds runbusv1.RunnerWorkCredentials
	rt.Must(t, bus.Decode(rt.Wait(t, "the credentials", e.runner.Work), &creds))
	events := e.Events(t, "credential.read")
	if len(events) != 1 || events[0].GetDetails()["names"] != "password" || strings.Contains(events[0].String(), "hunter2") {
		t.Fatalf("audit events = %v", events)
	}
	e.startStandsBefore(t, events[0])
	context := seal.Context{Tenant: "acme", Runner: "edge-1", Session: e.runner.Session, Dispatch: w.assignment.GetDispatchId()}
	bundle, err := e.runner.Key.Open(context, creds.GetSealed())
	rt.Must(t, err)
	if bundle.GetSecrets()["password"] != "hunter2" || bundle.GetCaller().GetPerson() != "wanda" || bundle.GetCaller().GetRole() != "WRITER" || bundle.GetCaller().GetTenant() != "acme" {
		t.Errorf("bundle = %v", bundle)
	}
	w.chunks([]byte("x"))
	w.complete()
	wantOutcome(t, f.wait(t), dispatch.OutcomeCompleted, "", "")
	for _, m := range e.copies.all {
		if c, ok := m.(*runbusv1.RunnerWorkCredentials); ok && len(c.GetSealed().GetCiphertext()) != 0 {
			t.Error("ops got sealed credentials")
		}
	}
	if len(e.copies.all) != 2 {
		t.Errorf("ops got %v", e.copies.all)
	}
}

// Credentials whose reading can't be recorded are not read: the work is given up.
func TestAuditUnavailable(t *testing.T) {
	e := newEnv(t, func(d *dispatch.Deps) { d.Audit = nil }, nil)
	f := e.start(t, secretRequest())
	w := e.take(t)
	confirm(e, w)
	rt.Send(t, w.Sender, &runbusv1.RunnerWorkAccepted{Pid: 1})
	o := f.wait(t)
	if o.Code != dispatch.OutcomeFailed || o.Err.Code != "unavailable" {
		t.Errorf("outcome = %+v", o)
	}
	if o := e.runner.Order(t).GetCancel(); o.GetDispatchId() != w.assignment.GetDispatchId() {
		t.Errorf("order = %v", o)
	}
	if len(e.runner.Work) != 0 {
		t.Error("credentials were sent")
	}
}

// What the runner refuses itself reads no credential (SPEC D6, D14).
func TestRunnerRefuses(t *testing.T) {
	e := newEnv(t, nil, nil)
	for _, c := range [][2]string{
		{"runner_busy", `runner "edge-1" is busy: it runs 4 of 4 works`},
		{"runner_offline", `runner "edge-1" is offline: draining`},
	} {
		f := e.start(t, secretRequest())
		w := e.take(t)
		w.fail(false, c[0], c[1])
		wantOutcome(t, f.wait(t), dispatch.OutcomeRefused, c[0], c[1])
		rt.Drain(t, w.Sender)
	}
	if events := e.Events(t, "credential.read"); len(events) != 0 {
		t.Errorf("a refusal read credentials: %v", events)
	}
	if events := e.Events(t, "dispatch.refuse"); len(events) != 2 || events[0].GetOutcome() != "runner_busy" {
		t.Errorf("audit = %v", events)
	}
}

// What can't be dispatched is refused before anything reaches a runner (SPEC D3, D7, D8).
func TestRefused(t *testing.T) {
	e := newEnv(t, nil, nil)
	token := schemas.NewSessionToken()
	for name, c := range map[string]struct {
		change func(*dispatch.Request)
		code   string
		text   string
	}{
		"no runner":     {func(r *dispatch.Request) { r.Runner = "" }, "no_runner", "no runner is selected"},
		"bad name":      {func(r *dispatch.Request) { r.Runner = ">" }, "invalid", "not a runner name (a DNS label, or `console` for the Runink managed runner)"},
		"a token":       {func(r *dispatch.Request) { r.Runner = token }, "invalid", schemas.ErrNotARunnerName().Message},
		"unknown":       {func(r *dispatch.Request) { r.Runner = "edge-2" }, "runner_unknown", `runner "edge-2" is not registered`},
		"other tenant":  {func(r *dispatch.Request) { r.Caller.Tenant = rt.Other }, "runner_unknown", `runner "edge-1" is not registered`},
		"reader":        {func(r *dispatch.Request) { r.Caller.Role = auth.RoleReader }, "forbidden", "to run a fetch takes a WRITER of the tenant"},
		"operator":      {func(r *dispatch.Request) { r.Caller = auth.Principal{Role: auth.RoleOperator} }, "forbidden", ""},
		"no source":     {func(r *dispatch.Request) { r.Fetch = nil }, "invalid", "the fetch names no source"},
		"negative rows": {func(r *dispatch.Request) { r.Fetch.MaxRows = -1 }, "invalid", ""},
		"negative time": {func(r *dispatch.Request) { r.Timeout = -1 }, "invalid", ""},
		"huge query":    {func(r *dispatch.Request) { r.Fetch.Query = strings.Repeat("x", 600<<10) }, "invalid", ""},
		"huge secrets":  {func(r *dispatch.Request) { r.Secrets = map[string]string{"a": strings.Repeat("x", 300<<10)} }, "invalid", ""},
	} {
		t.Run(name, func(t *testing.T) {
			req := request("edge-1")
			c.change(&req)
			o := e.d.Fetch(t.Context(), req, "", newSink())
			wantOutcome(t, o, dispatch.OutcomeRefused, c.code, c.text)
		})
	}
	if o := e.d.Fetch(t.Context(), request("edge-1"), "not-a-ulid", newSink()); o.Err == nil || o.Err.Code != "invalid" {
		t.Errorf("a foreign id: %+v", o)
	}
	select {
	case m := <-e.runner.Work:
		t.Errorf("the runner got %s", bus.TypeOf(m))
	default:
	}
	for _, ev := range e.Events(t, "dispatch.refuse") {
		if ev.GetOutcome() == "ok" || strings.Contains(ev.String(), token) {
			t.Errorf("audit = %v", ev)
		}
	}
}

// Limits and the time budget are clamped before the runner sees them.
func TestLimits(t *testing.T) {
	e := newEnv(t, func(d *dispatch.Deps) { d.Timeout = time.Minute }, nil)
	req := request("edge-1")
	req.Timeout, req.Fetch.MaxRows, req.Fetch.MaxBytes = time.Hour, 1<<40, 1000
	f := e.start(t, req)
	w := e.accept(t)
	if r := w.assignment.GetRequest(); r.GetMaxRows() != dispatch.MaxRows || r.GetMaxBytes() != 1000 {
		t.Errorf("request = %v", r)
	}
	if d := time.Until(w.assignment.GetDeadline().AsTime()); d > time.Minute || d < 30*time.Second {
		t.Errorf("deadline in %s", d)
	}
	w.complete()
	wantOutcome(t, f.wait(t), dispatch.OutcomeCompleted, "", "")
	if req.Fetch.MaxRows != 1<<40 {
		t.Error("the caller's request was changed")
	}
}

// A session younger than 2 s may not have spread its interest yet: a 503 is tried again, for 500 ms.
func TestYoungSession(t *testing.T) {
	published := make(chan struct{}, 1000)
	e := newEnv(t, nil, nil)
	e.copies.told = published
	e.runner.Deafen(t)
	e.young(t)
	f := e.start(t, request("edge-1"))
	again := func() float64 { return e.Metric(t, "runbus_dispatch_assignments_republished_total", nil) }
	for range 3 {
		rt.Wait(t, "a publish", published)
	}
	e.Clock.Advance(time.Second)
	wantOutcome(t, f.wait(t), dispatch.OutcomeRefused, "runner_offline", `runner "edge-1" is offline: not connected`)
	if again() == 0 {
		t.Error("nothing was published again")
	}
	before := again()
	e.Clock.Advance(3 * time.Second)
	f = e.start(t, request("edge-1"))
	wantOutcome(t, f.wait(t), dispatch.OutcomeRefused, "runner_offline", `runner "edge-1" is offline: not connected`)
	if n := again() - before; n != 0 {
		t.Errorf("for an old session it was published again %v times", n)
	}
}

// A runner that starts to listen while the assignment is tried again gets it once.
func TestListensLate(t *testing.T) {
	published := make(chan struct{}, 100)
	e := newEnv(t, nil, nil)
	e.copies.told = published
	e.runner.Deafen(t)
	e.young(t)
	f := e.start(t, request("edge-1"))
	rt.Wait(t, "the first publish", published)
	e.runner.Listen(t)
	w := e.accept(t)
	w.complete()
	wantOutcome(t, f.wait(t), dispatch.OutcomeCompleted, "", "")
	if len(e.runner.Work) != 0 {
		t.Error("the runner got the assignment twice")
	}
}

// Isolation says so in its own text, as an error and as a notice (SPEC D10).
func TestIsolation(t *testing.T) {
	e := newEnv(t, func(d *dispatch.Deps) { d.Isolation = true }, nil)
	e.runner.Goodbye(t, "")
	e.Await(t, "it left", func() bool { return !e.Dispatchable(t, "edge-1") })
	o := e.d.Fetch(t.Context(), request("edge-1"), "", newSink())
	want := `runner "edge-1" is offline: not connected: runner isolation enforced but runner unreachable — refusing control-plane execution for file fetch ` + o.DispatchID
	wantOutcome(t, o, dispatch.OutcomeRefused, "runner_offline", want)
	if len(o.Notices) != 1 || o.Notices[0].GetCode() != runbusv1.NoticeCode_NOTICE_CODE_RUNNER_ISOLATION || o.Notices[0].GetMessage() != want {
		t.Errorf("notices = %v", o.Notices)
	}
}

// A registry that can't be read fails the fetch, and is never an unknown runner (SPEC D7).
func TestRegistryUnreadable(t *testing.T) {
	e := newEnv(t, nil, nil)
	e.LoseHeartbeats(t)
	e.Clock.Advance(16 * time.Second)
	for _, name := range []string{"edge-1", "nobody"} {
		o := e.d.Fetch(t.Context(), request(name), "", newSink())
		wantOutcome(t, o, dispatch.OutcomeFailed, "failed", "runner registry unavailable")
	}
}

// A damaged stream is never a completed one.
func TestChecksum(t *testing.T) {
	e := newEnv(t, nil, nil)
	f := e.start(t, request("edge-1"))
	w := e.accept(t)
	w.chunks([]byte("abc"))
	w.sum = []byte("abd")
	w.complete()
	o := f.wait(t)
	if o.Code != dispatch.OutcomeFailed || !strings.Contains(o.Err.Message, "damaged") {
		t.Errorf("outcome = %+v", o)
	}
}

// The source's own error comes through.
func TestSourceFails(t *testing.T) {
	e := newEnv(t, nil, nil)
	f := e.start(t, request("edge-1"))
	w := e.accept(t)
	w.fail(true, "source_failed", "no such table")
	o := f.wait(t)
	wantOutcome(t, o, dispatch.OutcomeFailed, "source_failed", "no such table")
	if slices.Contains(phases(o), dispatch.PhaseFirstRow) {
		t.Errorf("phases = %v", phases(o))
	}
}

// A runner's words are foreign text: bounded, in the audit too, and under codes of this platform only.
func TestRunnersWordsAreBounded(t *testing.T) {
	e := newEnv(t, nil, nil)
	for _, c := range []struct{ code, want string }{
		{"source_failed", "source_failed"}, {"unauthorized", "failed"}, {"ok", "failed"}, {"", "failed"}, {"of its own", "failed"},
	} {
		f := e.start(t, request("edge-1"))
		w := e.accept(t)
		w.fail(true, c.code, strings.Repeat("é", 400<<10))
		o := f.wait(t)
		wantOutcome(t, o, dispatch.OutcomeFailed, c.want, "")
		if n := len(o.Err.Message); n > 9<<10 || !utf8.ValidString(o.Err.Message) {
			t.Errorf("code %q: a message of %d bytes", c.code, n)
		}
		if ends := e.Events(t, "dispatch.end"); len(ends) == 0 || ends[len(ends)-1].GetSubject() != "dispatch:"+o.DispatchID {
			t.Errorf("code %q: its end is not in the audit", c.code)
		}
	}
}
