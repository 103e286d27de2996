package registry_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/registry"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A hello is answered with a session; the first heartbeat makes the runner fit for work; its own tenant sees it, and nobody
// else.
func TestEnrolment(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Connect(t, s.Mint(t, s.Admin, "edge"), "edge.1")
	a := r.Hello(t, nil)
	if a.GetRunnerId() != "acme/edge.1" || a.GetTenantId() != "acme" || a.GetHeartbeatIntervalSeconds() != 15 ||
		len(a.GetSession()) != 32 || a.GetServerTime() == nil || a.GetGrace().AsDuration().Seconds() != 15 || a.GetError() != nil {
		t.Fatalf("answer = %v", a)
	}
	if e := s.Events(t, "runner.enrol"); len(e) != 1 || e[0].GetActor() != "key:sa-edge" || e[0].GetSubject() != "runner:edge.1" || e[0].GetOutcome() != "ok" {
		t.Fatalf("audit events = %v", e)
	}
	s.Await(t, "the link is seen, and whose the id is", func() bool {
		_, bound := s.Registry.Bound(r.Ref)
		return bound && s.Candidate(t, "edge.1").Connected
	})
	if c := s.Candidate(t, "edge.1"); c.Offline != "no heartbeat yet" {
		t.Fatalf("before the first heartbeat: %+v", c)
	}
	r.Listen(t)
	r.Beat(t, nil)
	s.Await(t, "it is dispatchable", func() bool { return s.Dispatchable(t, "edge.1") })
	c := s.Candidate(t, "edge.1")
	if c.Session != a.GetSession() || c.Pid != 4711 || c.Limit != 4 || c.Link != "outbound" || c.SessionAt.IsZero() || c.LinkAt.IsZero() {
		t.Errorf("candidate = %+v", c)
	}
	if key, err := s.Registry.SealingKey(t.Context(), r.Ref, c.Session); err != nil || string(key) != string(r.Key.Public()) {
		t.Errorf("sealing key = %x, %v", key, err)
	}

	list, err := s.Registry.List(rt.Tenant)
	rt.Must(t, err)
	body, err := json.Marshal(list)
	rt.Must(t, err)
	for _, part := range []string{
		`"id":"edge.1"`, `"displayName":"Edge edge.1"`, `"kind":"self_hosted"`, `"address":""`, `"zone":""`, `"labels":{}`,
		`"state":"ACTIVE"`, `"link":"outbound"`, `"claims":{"name":"Edge edge.1","version":"1.2.3","capabilities":["fetch","source:file"]`,
		`"connected":true`, `"limit":4`, `"limitEnforced":true`, `"signals":{"connection":"up","heartbeat":"fresh","responders":"not asked"}`,
	} {
		if !strings.Contains(string(body), part) {
			t.Errorf("the list lacks %s: %s", part, body)
		}
	}
	if list := s.SelfHosted(t, rt.Other); len(list) != 0 {
		t.Errorf("another tenant sees %v", list)
	}
	if key, ok := s.Registry.Bound(r.Ref); !ok || !strings.HasPrefix(key, "U") {
		t.Errorf("Bound = %q, %v", key, ok)
	}

	r.Beat(t, func(b *runbusv1.RunnerHeartbeat) { b.Draining, b.InFlight = true, 2 })
	s.Await(t, "it is draining", func() bool { return s.Candidate(t, "edge.1").Offline == "draining" })
	if c := s.Candidate(t, "edge.1"); !c.Draining || !c.Connected {
		t.Errorf("draining: %+v", c)
	}
}

// What a hello may not say is refused with a text, for good, and enrols nobody.
func TestHelloRefused(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Connect(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	stranger := s.Mint(t, s.Stranger, "theirs")
	for name, c := range map[string]struct {
		change func(*runbusv1.RunnerHello)
		after  func(*runbusv1.RunnerHello) // the signature
		code   schemas.Code
		text   string
		heals  bool
	}{
		"empty id":        {change: func(h *runbusv1.RunnerHello) { h.RunnerId = "" }, code: schemas.CodeInvalid, text: "the runner id is empty"},
		"long id":         {change: func(h *runbusv1.RunnerHello) { h.RunnerId = strings.Repeat("a", 65) }, code: schemas.CodeInvalid, text: "65 characters"},
		"wildcard id":     {change: func(h *runbusv1.RunnerHello) { h.RunnerId = ">" }, code: schemas.CodeInvalid, text: "only A-Z"},
		"another's id":    {change: func(h *runbusv1.RunnerHello) { h.RunnerId = "edge-2" }, code: schemas.CodeInvalid, text: `names the runner id "edge-2"`},
		"no nonce":        {change: func(h *runbusv1.RunnerHello) { h.ProcessNonce = "" }, code: schemas.CodeInvalid, text: "process nonce"},
		"long name":       {change: func(h *runbusv1.RunnerHello) { h.Name = strings.Repeat("n", 129) }, code: schemas.CodeInvalid, text: "at most 128"},
		"control in name": {change: func(h *runbusv1.RunnerHello) { h.Name = "a\x1b[2J" }, code: schemas.CodeInvalid, text: "not plain text"},
		"long version":    {change: func(h *runbusv1.RunnerHello) { h.Version = strings.Repeat("1", 65) }, code: schemas.CodeInvalid, text: "at most 64"},
		"many abilities":  {change: func(h *runbusv1.RunnerHello) { h.Capabilities = make([]string, 65) }, code: schemas.CodeInvalid, text: "65 capabilities"},
		"many rules":      {change: func(h *runbusv1.RunnerHello) { h.Policy = &runbusv1.RunnerPolicy{RuleNames: make([]string, 101)} }, code: schemas.CodeInvalid, text: "101 rules"},
		"long rule name": {change: func(h *runbusv1.RunnerHello) {
			h.Policy = &runbusv1.RunnerPolicy{RuleNames: []string{strings.Repeat("r", 65)}}
		}, code: schemas.CodeInvalid, text: "at most 64"},
		"control in rule": {change: func(h *runbusv1.RunnerHello) { h.Policy = &runbusv1.RunnerPolicy{Digest: "\x1b[2J"} }, code: schemas.CodeInvalid, text: "not plain text"},
		"no sealing key":  {change: func(h *runbusv1.RunnerHello) { h.SealingKey = nil }, code: schemas.CodeInvalid, text: "sealing key"},
		"swapped key":     {after: func(h *runbusv1.RunnerHello) { h.SealingKey[0] ^= 1 }, code: schemas.CodeForbidden, text: "signature"},
		"no signature":    {after: func(h *runbusv1.RunnerHello) { h.Signature = nil }, code: schemas.CodeForbidden, text: "signature"},
		"another's key":   {change: func(h *runbusv1.RunnerHello) { h.PublicKey = stranger.PublicKey }, code: schemas.CodeForbidden, text: `not one of the tenant "acme"`},
		"unknown key":     {change: func(h *runbusv1.RunnerHello) { h.PublicKey = "UNOBODY" }, code: schemas.CodeUnauthorized, text: "not known", heals: true},
	} {
		t.Run(name, func(t *testing.T) {
			h := r.HelloMessage(t, c.change)
			if c.after != nil {
				c.after(h)
			}
			a := r.Say(t, h)
			if a.GetError().GetCode() != string(c.code) || !strings.Contains(a.GetError().GetMessage(), c.text) || a.GetFatal() == c.heals || a.GetSession() != "" {
				t.Errorf("answer = %v", a)
			}
		})
	}
	if list := s.SelfHosted(t, rt.Tenant); len(list) != 0 {
		t.Errorf("somebody enrolled: %v", list)
	}
	if e := s.Events(t, "runner.enrol"); len(e) != 3 { // one for each code
		t.Errorf("audit events = %v", e)
	}
}

// A message before the hello is dropped, counted, and answered in the sender's own inbox and nowhere else (SPEC E6).
func TestHelloFirst(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Connect(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	inbox := r.Conn.NATS().NewInbox()
	answers, err := r.Conn.NATS().SubscribeSync(inbox)
	rt.Must(t, err)
	for _, reply := range []string{"$JS.API.STREAM.DELETE.KV_runbus_known", schemas.InboxPrefix(schemas.RunnerRef{Tenant: "acme", Runner: "edge-2"}) + ".x", inbox} {
		rt.Must(t, r.Conn.PublishWithReply(schemas.HeartbeatSubject(r.Ref), reply, &runbusv1.RunnerHeartbeat{ProcessNonce: r.Nonce}))
	}
	msg, err := answers.NextMsg(rt.Patience)
	rt.Must(t, err)
	var a runbusv1.EnrollmentAccepted
	rt.Must(t, bus.Decode(msg, &a))
	if a.GetError().GetCode() != "HELLO_FIRST" || a.GetSession() != "" {
		t.Errorf("answer = %v", &a)
	}
	rt.Must(t, r.Conn.PublishWithReply(schemas.GoodbyeSubject(r.Ref), inbox, &runbusv1.RunnerGoodbye{Session: "not a session"}))
	if _, err := answers.NextMsg(rt.Patience); err != nil {
		t.Fatal(err)
	}
	// A session that nobody was given is no hello either.
	rt.Must(t, r.Conn.PublishWithReply(schemas.HeartbeatSubject(r.Ref), inbox, &runbusv1.RunnerHeartbeat{Session: schemas.NewID(), ProcessNonce: r.Nonce}))
	if _, err := answers.NextMsg(rt.Patience); err != nil {
		t.Fatal(err)
	}
	if n := s.Metric(t, "runbus_registry_dropped_total", map[string]string{"reason": "hello_first"}); n < 3 || n > 5 {
		t.Errorf("counted %v", n)
	}
	if list := s.SelfHosted(t, rt.Tenant); len(list) != 0 {
		t.Errorf("a heartbeat enrolled: %v", list)
	}
}

// The same process gets its session again; another one takes the id over, the former is told and never gets it back (SPEC E8).
func TestReplaced(t *testing.T) {
	s := rt.Start(t, nil)
	key := s.Mint(t, s.Admin, "edge")
	first := s.Enrol(t, key, "edge-1")
	was := first.Session
	if again := first.Hello(t, nil); again.GetSession() != was {
		t.Fatalf("a resume got another session: %v", again)
	}
	if n := len(s.Events(t, "runner.enrol")); n != 1 {
		t.Errorf("a resume was audited: %d events", n)
	}
	if !s.Dispatchable(t, "edge-1") {
		t.Errorf("a resume takes a fit runner off: %+v", s.Candidate(t, "edge-1"))
	}

	second := s.Enrol(t, key, "edge-1")
	if order := first.Order(t); order.GetReplaced() == nil {
		t.Fatalf("the first process got %v", order)
	}
	if second.Session == was {
		t.Fatal("both processes have one session")
	}
	a := first.Hello(t, nil)
	if a.GetError().GetCode() != string(schemas.CodeReplaced) || !a.GetFatal() {
		t.Fatalf("the replaced process came back: %v", a)
	}
	// Whoever had a session once isn't new, even if nobody remembers it.
	third := s.Connect(t, key, "edge-1")
	a = third.Hello(t, func(h *runbusv1.RunnerHello) { h.Session = schemas.NewID() })
	if a.GetError().GetCode() != string(schemas.CodeReplaced) || !a.GetFatal() {
		t.Fatalf("a process with a session of its own took the id: %v", a)
	}
	first.Beat(t, nil)
	if order := first.Order(t); order.GetReplaced() == nil {
		t.Fatalf("its heartbeat was answered with %v", order)
	}
	if c := s.Candidate(t, "edge-1"); c.Session != second.Session || c.Offline != "" {
		t.Errorf("the second process lost its place: %+v", c)
	}
}

// The old link of a process may be given up after the new one came: that is no end.
func TestStaleLink(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Enrol(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	old, oldAt := r.Conn.NATS(), s.Candidate(t, "edge-1").LinkAt
	r.Dial(t, s)
	r.Hello(t, nil)
	s.Await(t, "the new link is seen", func() bool { return s.Candidate(t, "edge-1").LinkAt.After(oldAt) })
	linkAt := s.Candidate(t, "edge-1").LinkAt
	changed := s.Registry.Changed()
	old.Close()
	rt.Wait(t, "the end of the old link", changed)
	if c := s.Candidate(t, "edge-1"); !c.Connected || !c.LinkAt.Equal(linkAt) {
		t.Errorf("the end of the old link counted: %+v", c)
	}
}

// A replica that starts later learns the links by asking the servers.
func TestScanAtStart(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Enrol(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	late := s.Replica(t, nil)
	list, err := late.Snapshot(rt.Tenant)
	rt.Must(t, err)
	if len(list) != 2 || list[1].Session != r.Session || list[1].Offline != "" {
		t.Errorf("the late replica sees %+v", list)
	}
}

// A second key of the tenant can't take a bound id, until the first is revoked or an admin releases the id (SPEC E4).
func TestBinding(t *testing.T) {
	s := rt.Start(t, nil)
	first := s.Mint(t, s.Admin, "one")
	second := s.Mint(t, s.Admin, "two")
	third := s.Mint(t, s.Admin, "three")
	s.Enrol(t, first, "edge-1")

	thief := s.Connect(t, second, "edge-1")
	a := thief.Hello(t, nil)
	if a.GetError().GetMessage() != schemas.ErrRunnerBound("edge-1").Message || !a.GetFatal() {
		t.Fatalf("a second key: %v", a)
	}
	for _, by := range []struct {
		who  string
		code schemas.Code
		id   string
	}{{"stranger", schemas.CodeNotFound, "edge-1"}, {"admin", schemas.CodeNotFound, "edge-9"}, {"admin", schemas.CodeInvalid, "*"}} {
		who := s.Admin
		if by.who == "stranger" {
			who = s.Stranger
		}
		if err := s.Registry.ReleaseID(t.Context(), who, by.id); schemas.CodeOf(err) != by.code {
			t.Errorf("release of %q by %s: %v", by.id, by.who, err)
		}
	}
	writer := s.Admin
	writer.Role = "WRITER"
	if err := s.Registry.ReleaseID(t.Context(), writer, "edge-1"); schemas.CodeOf(err) != schemas.CodeForbidden {
		t.Errorf("release by a WRITER: %v", err)
	}
	rt.Must(t, s.Registry.ReleaseID(t.Context(), s.Admin, "edge-1"))
	if a := thief.Hello(t, nil); a.GetError() != nil {
		t.Fatalf("after the release: %v", a)
	}

	heir := s.Connect(t, third, "edge-1")
	if a := heir.Hello(t, nil); a.GetError().GetCode() != string(schemas.CodeForbidden) {
		t.Fatalf("the id is not bound to the second key: %v", a)
	}
	s.Await(t, "the id is seen to be the second key's", func() bool { return s.BoundTo(thief.Ref, second) })
	_, err := s.Auth.RevokeKey(t.Context(), s.Admin, second.ID)
	rt.Must(t, err)
	if c := s.Candidate(t, "edge-1"); !c.Revoked {
		t.Errorf("its key was revoked: %+v", c)
	}
	if a := heir.Hello(t, nil); a.GetError() != nil {
		t.Fatalf("after the revocation: %v", a)
	}
	released := 0
	for _, e := range s.Events(t, "runner.release") {
		if e.GetOutcome() == "ok" {
			released++
		}
	}
	if released != 1 {
		t.Errorf("%d releases were audited", released)
	}
}

// An outbound runner whose key was revoked stays on the list until an admin removes it; one whose key holds can't be removed.
func TestRemove(t *testing.T) {
	s := rt.Start(t, nil)
	key := s.Mint(t, s.Admin, "one")
	r := s.Enrol(t, key, "edge-1")
	refused := func(by auth.Principal, id string, code schemas.Code, text string) {
		t.Helper()
		if err := s.Registry.Remove(t.Context(), by, id); schemas.CodeOf(err) != code || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", id, err)
		}
	}
	writer := s.Admin
	writer.Role = "WRITER"
	refused(writer, "edge-1", schemas.CodeForbidden, "ORG_ADMIN")
	refused(s.Stranger, "edge-1", schemas.CodeNotFound, "edge-1")
	refused(s.Admin, "edge-9", schemas.CodeNotFound, "edge-9")
	refused(s.Admin, "edge-1", schemas.CodeConflict, "holds its id")
	rt.Must(t, s.Registry.ReleaseID(t.Context(), s.Admin, "edge-1"))
	refused(s.Admin, "edge-1", schemas.CodeConflict, "is connected")
	s.Await(t, "the release is seen", func() bool { return !s.BoundTo(r.Ref, key) })
	if a := r.Hello(t, nil); a.GetError() != nil { // binds it again
		t.Fatal(a)
	}
	r.Goodbye(t, "")
	s.Await(t, "it left, and its id is bound", func() bool {
		return s.Candidate(t, "edge-1").Offline == "not connected" && s.BoundTo(r.Ref, key)
	})
	_, err := s.Auth.RevokeKey(t.Context(), s.Admin, key.ID)
	rt.Must(t, err)
	if list := s.SelfHosted(t, rt.Tenant); len(list) != 1 || list[0].State != registry.StateRevoked {
		t.Errorf("revoked: %+v", list)
	}
	rt.Must(t, s.Registry.Remove(t.Context(), s.Admin, "edge-1"))
	s.Await(t, "it is off the list", func() bool { return len(s.SelfHosted(t, rt.Tenant)) == 0 })
	removed := 0
	for _, e := range s.Events(t, "runner.remove") {
		if e.GetOutcome() == "ok" {
			removed++
		}
	}
	if removed != 1 {
		t.Errorf("%d removals were audited", removed)
	}
	s.Enrol(t, s.Mint(t, s.Admin, "two"), "edge-1") // as a new one
}

// Whoever asks the control plane to answer elsewhere gets no answer, and nothing is written there.
func TestHelloWithForeignReply(t *testing.T) {
	said := make(logged, 64)
	var serve *bus.Conn
	s := rt.Start(t, func(d *registry.Deps) { d.Log, serve = slog.New(said), d.Serve })
	r := s.Connect(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	victim := s.Connect(t, s.Mint(t, s.Admin, "victim"), "victim")
	reply := schemas.WorkSubject(victim.Ref, "s1")
	got := make(chan *nats.Msg, 2)
	_, err := victim.Conn.Subscribe(reply, func(m *nats.Msg) { got <- m })
	rt.Must(t, err)
	rt.Must(t, victim.Conn.NATS().Flush())
	rt.Must(t, r.Conn.PublishWithReply(schemas.HelloSubject(r.Ref), reply, r.HelloMessage(t, nil)))
	for rt.Wait(t, "the log", said) != "a hello was not answered" {
	}
	// What the registry sends comes in order: a marker behind the answer that must not be there.
	rt.Must(t, serve.Publish(reply, &runbusv1.RunnerWorkCredit{}))
	if m := rt.Wait(t, "the marker", got); bus.TypeOf(m) != "RunnerWorkCredit" {
		t.Errorf("a hello was answered on %s", m.Subject)
	}
}

// logged passes the messages of a log on.
type logged chan string

func (l logged) Enabled(context.Context, slog.Level) bool { return true }
func (l logged) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l logged) WithGroup(string) slog.Handler            { return l }

func (l logged) Handle(_ context.Context, r slog.Record) error {
	select {
	case l <- r.Message:
	default: // nobody reads: not the message that is waited for
	}
	return nil
}

// What a runner tells of its policy and journal is shown as its claim (SPEC E12).
func TestAPolicyIsShownAsAClaim(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Connect(t, s.Mint(t, s.Admin, "edge"), "edge.1")
	shown := func() *registry.Policy {
		list := s.SelfHosted(t, rt.Tenant)
		if len(list) != 1 {
			return nil
		}
		return list[0].Claims.Policy
	}
	r.Hello(t, nil)
	s.Await(t, "the runner is listed", func() bool { return len(s.SelfHosted(t, rt.Tenant)) == 1 })
	if p := shown(); p != nil {
		t.Errorf("a runner that told nothing: %+v", p)
	}
	r.Hello(t, func(h *runbusv1.RunnerHello) {
		h.Policy = &runbusv1.RunnerPolicy{
			Digest: "abc", DefaultVerdict: "deny", AllowRules: 2, DenyRules: -1, RuleNames: []string{"no-hr", "allow #1"}, Journal: true, JournalSeq: 7, JournalHead: "def",
		}
	})
	s.Await(t, "the policy is shown", func() bool { return shown() != nil })
	body, err := json.Marshal(shown())
	rt.Must(t, err)
	if want := `{"digest":"abc","default":"deny","allowRules":2,"denyRules":0,"ruleNames":["no-hr","allow #1"],"journal":true,"journalHead":"7:def"}`; string(body) != want {
		t.Errorf("got %s", body)
	}
}
