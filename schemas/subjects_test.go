package schemas_test

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/org-runink/runbus/schemas"
)

func TestSubjectsAsTheyGoOverTheWire(t *testing.T) {
	ref := schemas.RunnerRef{Tenant: "acme", Runner: "edge.1"}
	for got, want := range map[string]string{
		schemas.HelloSubject(ref):                                   "runbus.v1.acme.runner.edge=2E1.hello",
		schemas.HeartbeatSubject(ref):                               "runbus.v1.acme.runner.edge=2E1.heartbeat",
		schemas.GoodbyeSubject(ref):                                 "runbus.v1.acme.runner.edge=2E1.goodbye",
		schemas.WorkSubject(ref, "s1"):                              "runbus.v1.acme.runner.edge=2E1.work.s1",
		schemas.ControlSubject(ref, "s1"):                           "runbus.v1.acme.runner.edge=2E1.control.s1",
		schemas.CreditSubject(ref, "d1"):                            "runbus.v1.acme.runner.edge=2E1.credit.d1",
		schemas.ResultCtlSubject(ref, "c1", "d1"):                   "runbus.v1.acme.runner.edge=2E1.result.c1.d1.ctl",
		schemas.ResultDataSubject(ref, "c1", "d1"):                  "runbus.v1.acme.runner.edge=2E1.result.c1.d1.data",
		schemas.ReplySubject(ref, "c1", "i1"):                       "runbus.v1.acme.runner.edge=2E1.reply.c1.i1",
		schemas.InboxPrefix(ref):                                    "runbus.v1.acme.runner.edge=2E1.inbox",
		schemas.ResultsOf("c1"):                                     "runbus.v1.*.runner.*.result.c1.*.*",
		schemas.RepliesOf("c1"):                                     "runbus.v1.*.runner.*.reply.c1.*",
		schemas.RunnerKey(ref):                                      "acme.edge=2E1",
		schemas.ConnectName("edge.1", "n1"):                         "edge.1/n1",
		ref.String():                                                "acme/edge.1",
		strings.Join(first(schemas.RefusedPermissions("a.b")), " "): "runbus.v1.*.runner.a=2Eb.hello",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func first(a, _ []string) []string { return a }

func TestParseRefusesWhatStringWouldNotWrite(t *testing.T) {
	for _, s := range []string{
		"", "runbus.v1", "runbus.v1.acme", "runbus.v1.acme.runner.r", "runbus.v2.acme.runner.r.hello",
		"runbus.v1.*.runner.r.hello", "runbus.v1.acme.runner.*.hello", "runbus.v1.acme.runner.>", "runbus.v1.acme.runner.r.>",
		"runbus.v1.Acme.runner.r.hello", "runbus.v1.acme.runner.r.hello.x", "runbus.v1.acme.runner.r.work", "runbus.v1.acme.runner.r.work.*",
		"runbus.v1.acme.runner.r.work.s.x", "runbus.v1.acme.runner.r.result.c.d", "runbus.v1.acme.runner.r.result.c.d.other",
		"runbus.v1.acme.runner.r.ctl.c.d.ctl", "runbus.v1.acme.runner.r.inbox", "runbus.v1.acme.runner.r.inbox.", "runbus.v1.acme.runner.r.inbox.a..b",
		"runbus.v1.acme.runner.r.inbox.*", "runbus.v1.acme.runner.r.inbox.>", "runbus.v1.acme.runner.r=2e.hello", "runbus.v1.acme.runner.r=2F.hello",
		"runbus.v1.acme.runner.r .hello", "$JS.API.STREAM.DELETE.X", "_INBOX.x", "runbus.v1.acme.runner.r.reply.c", "runbus.v1.acme.runner.r.unknown",
	} {
		if got, err := schemas.Parse(s); err == nil {
			t.Errorf("Parse(%q) = %+v, want an error", s, got)
		} else if schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("Parse(%q): code %s", s, schemas.CodeOf(err))
		}
	}
}

func refs() *rapid.Generator[schemas.RunnerRef] {
	return rapid.Custom(func(t *rapid.T) schemas.RunnerRef {
		return schemas.RunnerRef{
			Tenant: rapid.StringMatching(`[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?`).Filter(func(s string) bool { return schemas.ValidTenant(s) == nil }).Draw(t, "tenant"),
			Runner: rapid.StringMatching(`[A-Za-z0-9._-]{1,64}`).Draw(t, "runner"),
		}
	})
}

func TestSubjectRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		token := rapid.StringMatching(`[A-Za-z0-9]{1,32}`)
		s := schemas.Subject{Ref: refs().Draw(t, "ref"), Kind: rapid.SampledFrom([]schemas.Kind{
			schemas.KindHello, schemas.KindHeartbeat, schemas.KindGoodbye, schemas.KindWork, schemas.KindControl, schemas.KindCredit,
			schemas.KindResultCtl, schemas.KindResultData, schemas.KindReply, schemas.KindInbox,
		}).Draw(t, "kind")}
		switch s.Kind {
		case schemas.KindWork, schemas.KindControl:
			s.Session = token.Draw(t, "session")
		case schemas.KindCredit:
			s.Dispatch = token.Draw(t, "dispatch")
		case schemas.KindResultCtl, schemas.KindResultData:
			s.Replica, s.Dispatch = token.Draw(t, "replica"), token.Draw(t, "dispatch")
		case schemas.KindReply:
			s.Replica, s.ID = token.Draw(t, "replica"), token.Draw(t, "id")
		case schemas.KindInbox:
			s.Inbox = rapid.StringMatching(`[A-Za-z0-9_-]{1,20}(\.[A-Za-z0-9_-]{1,20}){0,2}`).Draw(t, "inbox")
		}
		got, err := schemas.Parse(s.String())
		if err != nil || got != s {
			t.Fatalf("Parse(%q) = %+v, %v; want %+v", s.String(), got, err, s)
		}
		key, err := schemas.ParseRunnerKey(schemas.RunnerKey(s.Ref))
		if err != nil || key != s.Ref {
			t.Fatalf("key of %v came back as %v, %v", s.Ref, key, err)
		}
	})
}

func FuzzParse(f *testing.F) {
	ref := schemas.RunnerRef{Tenant: "acme", Runner: "a.b"}
	f.Add(schemas.HelloSubject(ref))
	f.Add(schemas.ResultDataSubject(ref, "c", "d"))
	f.Add(schemas.InboxPrefix(ref) + ".x.y")
	f.Add("runbus.v1.*.runner.>.work.s")
	f.Fuzz(func(t *testing.T, subject string) {
		s, err := schemas.Parse(subject)
		if err != nil {
			return
		}
		if s.String() != subject {
			t.Fatalf("%q came back as %q", subject, s.String())
		}
		if strings.ContainsAny(subject, "*> \t\r\n\x00") {
			t.Fatalf("%q parsed", subject)
		}
	})
}

func FuzzParseConnectName(f *testing.F) {
	f.Add("edge.1/abc")
	f.Add("a/b/c")
	f.Add("*/x")
	f.Fuzz(func(t *testing.T, name string) {
		id, nonce, err := schemas.ParseConnectName(name)
		if err != nil {
			return
		}
		if schemas.ConnectName(id, nonce) != name {
			t.Fatalf("%q came back as %q", name, schemas.ConnectName(id, nonce))
		}
		if err := schemas.ValidRunnerID(id); err != nil {
			t.Fatal(err)
		}
		for _, perm := range append(first(schemas.RunnerPermissions(schemas.RunnerRef{Tenant: "t", Runner: id})), first(schemas.RefusedPermissions(id))...) {
			if strings.Count(strings.TrimSuffix(perm, ">"), ">") > 0 || strings.ContainsAny(id, "*>") {
				t.Fatalf("permission %q from %q", perm, id)
			}
		}
	})
}
