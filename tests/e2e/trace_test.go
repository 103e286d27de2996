package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/tests/stack"
)

// timeline is what the tests look at in GET /api/fetches.
type timeline struct {
	DispatchID, TenantID, RunnerID, Person, Source, State, Outcome, Code, Session, Link, TraceID string
	RunnerPID, Rows                                                                              int64
	Phases                                                                                       []struct{ Phase, By, Note string }
	Stopped                                                                                      *struct{ From, To, Why string }
}

func (tl timeline) phases() string {
	var names []string
	for _, p := range tl.Phases {
		names = append(names, p.Phase)
	}
	return strings.Join(names, ",")
}

// timelineOf asks for a timeline until the control plane, which may have started just now, can read it.
func timelineOf(t *testing.T, api *stack.API, id string) timeline {
	t.Helper()
	for give := time.Now().Add(stack.Patience); ; <-time.After(50 * time.Millisecond) { // a state, not an event
		status, body := api.Call(t, http.MethodGet, "/api/fetches/"+id, nil)
		if status == http.StatusServiceUnavailable && time.Now().Before(give) {
			continue
		}
		var tl timeline
		if err := json.Unmarshal(body, &tl); err != nil || status != http.StatusOK {
			t.Fatalf("the timeline of %s: %d %s (%v)", id, status, body, err)
		}
		return tl
	}
}

// person makes one with a role, in the tenant of the API's token.
func person(t *testing.T, api *stack.API, name, role string) *stack.API {
	t.Helper()
	var made struct{ Token string }
	api.Must(t, http.MethodPost, "/api/people", map[string]string{"name": name, "role": role}, &made)
	return &stack.API{URL: api.URL, Token: made.Token}
}

// sse is a stream of server-sent events.
type sse struct {
	t    *testing.T
	body *bufio.Reader
}

func follow(t *testing.T, api *stack.API, id string) *sse {
	t.Helper()
	resp := api.Send(t, t.Context(), http.MethodGet, "/api/fetches/"+id+"/events", nil, "text/event-stream")
	t.Cleanup(func() { _ = resp.Body.Close() })
	if resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("%s %s", resp.Status, resp.Header.Get("Content-Type"))
	}
	return &sse{t, bufio.NewReader(resp.Body)}
}

// next is the next event; the name is empty at the end of the stream.
func (s *sse) next(data any) (name string) {
	s.t.Helper()
	for {
		line, err := s.body.ReadString('\n')
		if err == io.EOF {
			return ""
		}
		if err != nil {
			s.t.Fatal(err)
		}
		if n, ok := strings.CutPrefix(line, "event: "); ok {
			name = strings.TrimSpace(n)
		}
		if d, ok := strings.CutPrefix(line, "data: "); ok {
			if err := json.Unmarshal([]byte(d), data); err != nil {
				s.t.Fatalf("%s: %v", d, err)
			}
			return name
		}
	}
}

// D17: what a fetch goes through is seen while it runs and for a day after, by its own tenant alone, and survives a restart.
func TestTheTimelineOfAFetch(t *testing.T) { eachLink(t, theTimelineOfAFetch) }

func theTimelineOfAFetch(t *testing.T, link stack.Link) {
	data := t.TempDir() + "/data"
	plane := stack.StartPlane(t, true, map[string]string{"RUNBUS_DATA_DIR": data})
	runner := plane.StartLinked(t, link, "edge", nil)
	way := "outbound"
	if link == stack.OverDials {
		way = "dialled"
	}
	reader := person(t, plane.Admin, "rita", "READER")
	operator := &stack.API{URL: plane.HTTP, Token: stack.ReadToken(t, data+"/operator.token")}
	var made struct{ Token string }
	operator.Must(t, http.MethodPost, "/api/tenants", map[string]string{"name": "umbrella"}, &made)
	stranger := &stack.API{URL: plane.HTTP, Token: made.Token}

	src := newSource(t)
	f := plane.Admin.Fetch(t, src.body("edge"))
	await(t, "the request", src.opened)
	var list []timeline
	reader.Must(t, http.MethodGet, "/api/fetches", nil, &list)
	if len(list) == 0 || list[0].DispatchID != f.Dispatch || list[0].State != "running" || list[0].Outcome != "" {
		t.Errorf("while it runs: %+v", list)
	}
	events := follow(t, reader, f.Dispatch)
	var seen []string
	for len(seen) == 0 || seen[len(seen)-1] != "querying" {
		var step struct{ Phase, By string }
		if name := events.next(&step); name == "phase" {
			seen = append(seen, step.Phase)
		} else if name == "" || name == "end" {
			t.Fatalf("the events ended after %v", seen)
		}
	}
	src.let()
	if end := f.End(); end.Outcome != "completed" {
		t.Fatalf("%+v", end)
	}
	var last timeline
	for name := "phase"; name != "end"; {
		var raw json.RawMessage
		switch name = events.next(&raw); name {
		case "":
			t.Fatal("the events ended without an end")
		case "end":
			if err := json.Unmarshal(raw, &last); err != nil {
				t.Fatal(err)
			}
		}
	}
	var nothing any
	if name := events.next(&nothing); name != "" {
		t.Errorf("%s after the end", name)
	}
	if got := last.phases(); got != "queued,assigned,accepted,connecting,querying,first row,last row,done" {
		t.Errorf("steps %s", got)
	}
	if last.TenantID != "local" || last.RunnerID != runner.ID || last.RunnerPID != int64(runner.PID) || last.Person != "owner" || last.Source != "http" ||
		last.Rows != rowsBefore+rowsAfter || last.Session == "" || last.Link != way || last.Stopped != nil || last.Phases[2].By != "runner:"+runner.ID {
		t.Errorf("%+v", last)
	}
	// An ended one: the timeline, and the stream ends.
	events, names := follow(t, reader, f.Dispatch), []string{}
	for name := "x"; name != ""; {
		name = events.next(&nothing)
		names = append(names, name)
	}
	if all := strings.Join(names, ","); !strings.HasSuffix(all, "phase,progress,end,") {
		t.Errorf("events of an ended fetch: %s", all)
	}

	// A refusal is a timeline too; the command line shows both.
	refused := plane.Admin.Fetch(t, src.body("nobody"))
	if tl := timelineOf(t, reader, refused.Dispatch); tl.Outcome != "refused" || tl.Code != "runner_unknown" || tl.Stopped == nil || tl.Stopped.From != "queued" || tl.RunnerID != "nobody" {
		t.Errorf("%+v", tl)
	}
	out, errs, status := plane.Runink(t, "fetch", "trace", refused.Dispatch)
	if status != 0 || !strings.Contains(out, `stopped at queued → assigned: runner "nobody" is not registered`) {
		t.Errorf("status %d: %s%s", status, out, errs)
	}
	out, errs, status = plane.Runink(t, "fetch", "list", "--outcome", "completed", "--runner", "edge")
	if status != 0 || !strings.Contains(out, f.Dispatch) || strings.Contains(out, refused.Dispatch) {
		t.Errorf("status %d: %s%s", status, out, errs)
	}
	out, _, status = plane.Runink(t, "fetch", "list", "--json", "--limit", "1")
	if err := json.Unmarshal([]byte(out), &list); err != nil || status != 0 || len(list) != 1 || list[0].DispatchID != refused.Dispatch {
		t.Errorf("status %d: %s", status, out)
	}
	if _, errs, status = plane.Runink(t, "fetch", "trace", "01J00000000000000000000000"); status != 3 || !strings.Contains(errs, "no fetch of this id") {
		t.Errorf("status %d: %s", status, errs)
	}

	// Nobody else's.
	for _, path := range []string{"/api/fetches/" + f.Dispatch, "/api/fetches/" + f.Dispatch + "/events"} {
		if status, body := stranger.Call(t, http.MethodGet, path, nil); status != http.StatusNotFound {
			t.Errorf("%s as a stranger: %d %s", path, status, body)
		}
		if status, _ := operator.Call(t, http.MethodGet, path, nil); status != http.StatusForbidden {
			t.Errorf("%s as the operator: %d", path, status)
		}
	}
	stranger.Must(t, http.MethodGet, "/api/fetches?runner=edge", nil, &list)
	if len(list) != 0 {
		t.Errorf("a stranger sees %+v", list)
	}

	runner.Stop(t)
	plane.Stop(t)
	plane = stack.StartPlane(t, true, map[string]string{"RUNBUS_DATA_DIR": data})
	if tl := timelineOf(t, plane.Admin, f.Dispatch); tl.Outcome != "completed" || tl.phases() != last.phases() {
		t.Errorf("after a restart: %+v", tl)
	}
}

// D17: the timeline of a dispatch that was lost names the hop on which it stopped.
func TestWhereALostDispatchStopped(t *testing.T) {
	eachLink(t, whereALostDispatchStopped)
}

func whereALostDispatchStopped(t *testing.T, link stack.Link) {
	data := t.TempDir() + "/data"
	plane := stack.StartPlane(t, true, map[string]string{"RUNNER_GRACE": "500ms", "RUNBUS_DATA_DIR": data})
	stopped := func(id, outcome, hop, why string) {
		t.Helper()
		tl := timelineOf(t, plane.Admin, id)
		if tl.Outcome != outcome || tl.Stopped == nil || tl.Stopped.From+" → "+tl.Stopped.To != hop || !strings.Contains(tl.Stopped.Why, why) {
			t.Errorf("%+v, stopped %+v; want %s at %s: %s", tl, tl.Stopped, outcome, hop, why)
		}
		out, _, _ := plane.Runink(t, "fetch", "trace", id)
		if !strings.Contains(out, "stopped at "+hop+": ") || !strings.Contains(out, why) {
			t.Errorf("the command line says\n%s", out)
		}
	}

	// Killed while the source works.
	killed := plane.StartLinked(t, link, "killed", nil)
	src := newSource(t)
	f := plane.Admin.Fetch(t, src.body("killed"))
	await(t, "the request", src.opened)
	for f.Await("progress").Phase != "querying" {
	}
	killed.Signal(t, syscall.SIGKILL)
	if end := f.End(); end.Outcome != "runner_lost" {
		t.Fatalf("%+v", end)
	}
	stopped(f.Dispatch, "runner_lost", "querying → first row", "was lost")

	// Stopped before it got the work: linked, and without an answer.
	still := plane.StartLinked(t, link, "still", nil)
	still.Signal(t, syscall.SIGSTOP)
	f = plane.Admin.Fetch(t, src.body("still"))
	if end := f.End(); end.Outcome != "outcome_unknown" {
		t.Errorf("%+v", end)
	}
	still.Signal(t, syscall.SIGCONT)
	stopped(f.Dispatch, "outcome_unknown", "assigned → accepted", "no answer from the runner within 2s; to the cancel: no answer either")

	// The source's own failure is where it was read.
	broken := httptest.NewServer(http.NotFoundHandler())
	defer broken.Close()
	body := src.body("still")
	body["source"].(map[string]any)["settings"] = map[string]string{"url": broken.URL, "format": "jsonl"}
	plane.Admin.AwaitRunner(t, "still", true)
	f = plane.Admin.Fetch(t, body)
	if end := f.End(); end.Outcome != "failed" {
		t.Errorf("%+v", end)
	}
	tl := timelineOf(t, plane.Admin, f.Dispatch)
	if tl.Outcome != "failed" || tl.Stopped == nil || tl.Stopped.To != "querying" && tl.Stopped.To != "first row" {
		t.Errorf("%+v, stopped %+v", tl, tl.Stopped)
	}

	// The control plane itself is killed: its successor says what it can't know.
	f = plane.Admin.Fetch(t, src.body("still"))
	await(t, "the request", src.opened)
	running := asSEC(t, plane)
	give := time.Now().Add(stack.Patience)
	for {
		m, err := mustStream(t, running, "RUNBUS_TRACE").GetLastMsgForSubject(t.Context(), "runbus.trace.local.running.*")
		var told struct{ Timelines []timeline }
		if err == nil {
			err = json.Unmarshal(m.Data, &told)
		}
		if err == nil && slices.ContainsFunc(told.Timelines, func(tl timeline) bool {
			return tl.DispatchID == f.Dispatch && strings.HasSuffix(tl.phases(), ",querying")
		}) {
			break
		}
		if time.Now().After(give) {
			t.Fatalf("a long fetch is not in the stream: %v, %+v", err, told)
		}
		<-time.After(50 * time.Millisecond) // a state, not an event
	}
	plane.Signal(t, syscall.SIGKILL)
	plane.Exit(t)
	plane = stack.StartPlane(t, true, map[string]string{"RUNBUS_DATA_DIR": data})
	for give = time.Now().Add(stack.Patience); ; {
		tl := timelineOf(t, plane.Admin, f.Dispatch)
		if tl.State == "ended" {
			break
		}
		if time.Now().After(give) {
			t.Fatalf("it is said to run: %+v", tl)
		}
		<-time.After(200 * time.Millisecond) // a state, not an event
	}
	stopped(f.Dispatch, "outcome_unknown", "querying → first row", "the replica of the control plane that waited has gone")
}

// collector is an OpenTelemetry collector in the test.
func collector(t *testing.T) (url string, spans <-chan *tracepb.ResourceSpans) {
	t.Helper()
	all := make(chan *tracepb.ResourceSpans, 256)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		stack.Inspect(t, "exported spans", b, nil)
		var data tracepb.TracesData
		if err == nil {
			err = proto.Unmarshal(b, &data)
		}
		if err != nil || r.URL.Path != "/v1/traces" {
			t.Errorf("%s: %v", r.URL.Path, err)
		}
		for _, s := range data.GetResourceSpans() {
			all <- s
		}
	}))
	t.Cleanup(server.Close)
	return server.URL, all
}

// tracedFetch runs a fetch of src to its end for a caller that has a trace, and returns its id and the answer.
func tracedFetch(t *testing.T, plane *stack.Plane, src *source, traceparent string) (id, answer string) {
	t.Helper()
	body, err := json.Marshal(src.body("edge"))
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, plane.HTTP+"/api/fetches", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+plane.Admin.Token)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Traceparent", traceparent)
	client := http.Client{Transport: stack.Listen(t, http.DefaultTransport)}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(resp.Body)
	if closed := resp.Body.Close(); err != nil || closed != nil {
		t.Fatalf("%s, %v, %v", text, err, closed)
	}
	return resp.Header.Get("Runbus-Dispatch-Id"), string(text)
}

// D17, O7: one trace goes through the caller, the control plane and the runner.
func TestATraceCrossesTheBus(t *testing.T) { eachLink(t, aTraceCrossesTheBus) }

func aTraceCrossesTheBus(t *testing.T, link stack.Link) {
	url, exported := collector(t)
	traced := map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
	plane := stack.StartPlane(t, true, traced)
	runner := plane.StartLinked(t, link, "edge", traced)
	src := newSource(t)
	src.let()
	const parent = "b7ad6b7169203331"
	traceID := "0af7651916cd43dd8448eb211c80319c"
	id, answer := tracedFetch(t, plane, src, "00-"+traceID+"-"+parent+"-01")
	if stack.Late(answer) {
		stack.Excuse(t, id, answer)
		traceID = "4bf92f3577b34da6a3ce929d0e0e4736"
		id, answer = tracedFetch(t, plane, src, "00-"+traceID+"-"+parent+"-01")
	}
	if !strings.Contains(answer, `"outcome":"completed"`) {
		t.Fatal(answer)
	}
	if tl := timelineOf(t, plane.Admin, id); tl.TraceID != traceID {
		t.Errorf("the timeline has trace %q", tl.TraceID)
	}
	runner.Stop(t) // each sends what it has
	plane.Stop(t)

	type found struct {
		service string
		*tracepb.Span
	}
	spans := map[string]found{}
	for len(exported) > 0 {
		rs := <-exported
		service := ""
		for _, a := range rs.GetResource().GetAttributes() {
			if a.GetKey() == "service.name" {
				service = a.GetValue().GetStringValue()
			}
		}
		for _, scope := range rs.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				if hexOf(s.GetTraceId()) == traceID { // what else is asked of the control plane has traces of its own
					spans[s.GetName()] = found{service, s}
				}
			}
		}
	}
	above := parent
	for _, want := range []struct{ name, service string }{
		{"POST /api/fetches", "runbus-control-plane"}, {"dispatch", "runbus-control-plane"}, {"run fetch", "runbus-runner"}, {"read http", "runbus-runner"},
	} {
		s, ok := spans[want.name]
		if !ok {
			t.Fatalf("no span %q among those of trace %s: %v", want.name, traceID, spans)
		}
		if s.service != want.service || hexOf(s.GetParentSpanId()) != above {
			t.Errorf("span %q of %s is below %s; want it below %s of %s", want.name, s.service, hexOf(s.GetParentSpanId()), above, want.service)
		}
		if s.GetEndTimeUnixNano() < s.GetStartTimeUnixNano() || s.GetStatus().GetCode() != tracepb.Status_STATUS_CODE_UNSET {
			t.Errorf("span %q: %v", want.name, s.Span)
		}
		above = hexOf(s.GetSpanId())
	}
	if n := len(spans["dispatch"].GetEvents()); n < 7 {
		t.Errorf("%d steps are events of the dispatch", n)
	}
}
