package embedded_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
)

var acme = schemas.RunnerRef{Tenant: "acme", Runner: "a.b"}

// universe is one subject of every kind that anybody may use, and of those that nobody should.
func universe() []string {
	other := schemas.RunnerRef{Tenant: "acme", Runner: "other"}
	foreign := schemas.RunnerRef{Tenant: "evil", Runner: "a.b"}
	all := []string{
		"$SYS.REQ.USER.AUTH", "$SYS._INBOX.x.y", "$SYS.REQ.SERVER.PING", "$SYS.REQ.SERVER.PING.VARZ", "$SYS.REQ.SERVER.PING.PROFILEZ",
		"$SYS.REQ.SERVER.X.KICK", "$SYS.REQ.SERVER.X.RELOAD", "$SYS.REQ.SERVER.X.LDM", "$SYS.REQ.SERVER.X.JSZ", "$SYS.REQ.ACCOUNT.RUN.CONNZ",
		"$SYS.REQ.USER.INFO", "$SYS.ACCOUNT.RUN.CONNECT",
		"$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.INFO.KV_runbus_heartbeats", "$JS.API.STREAM.CREATE.KV_runbus_heartbeats",
		"$JS.API.STREAM.PURGE.RUNBUS_AUDIT", "$JS.API.STREAM.DELETE.RUNBUS_AUDIT", "$JS.API.STREAM.CREATE.KV_runbus_identities",
		"$JS.API.STREAM.MSG.GET.RUNBUS_AUDIT", "$JS.API.STREAM.MSG.DELETE.RUNBUS_AUDIT", "$JS.API.DIRECT.GET.KV_runbus_heartbeats",
		"$JS.API.CONSUMER.CREATE.RUNBUS_AUDIT.x", "$JS.API.CONSUMER.DURABLE.CREATE.RUNBUS_AUDIT.x", "$JS.API.CONSUMER.RESET.RUNBUS_AUDIT.ops",
		"$JS.ACK.x", "$JS.FC.RUNBUS_AUDIT.x.y", "$KV.runbus_identities.x", "$KV.runbus_heartbeats.acme.x", "runbus.audit",
		"runbus.mirror.x", "runbus.sec.CONSUMER.RESET.RUNBUS_AUDIT.ops", "$SRV.PING", "$SRV.PING.runbus", "$SRV.INFO.runbus.x", "$SRV.STATS.other",
		"runbus.ops.status", "_INBOX.x.y", "anything", "*", ">", "runbus.>", "runbus.v1.>", "$SYS.>", "$JS.API.>", "$KV.>", "$SRV.>", "_INBOX.>",
	}
	for _, ref := range []schemas.RunnerRef{acme, other, foreign} {
		all = append(all,
			schemas.HelloSubject(ref), schemas.HeartbeatSubject(ref), schemas.GoodbyeSubject(ref), schemas.WorkSubject(ref, "s"),
			schemas.ControlSubject(ref, "s"), schemas.CreditSubject(ref, "d"), schemas.ResultCtlSubject(ref, "c", "d"),
			schemas.ResultDataSubject(ref, "c", "d"), schemas.ReplySubject(ref, "c", "i"), schemas.InboxPrefix(ref)+".x")
	}
	return append(all, schemas.AllHellos, schemas.AllHeartbeats, schemas.AllGoodbyes, schemas.ResultsOf("c"), schemas.RepliesOf("c"))
}

// matches reports whether the subject, whose wildcards count as what they stand for, lies within pattern.
func matches(pattern, subject string) bool {
	p, s := strings.Split(pattern, "."), strings.Split(subject, ".")
	for i, token := range p {
		if token == ">" {
			return len(s) > i
		}
		if i >= len(s) || token != "*" && token != s[i] || s[i] == ">" {
			return false
		}
	}
	return len(p) == len(s)
}

func within(allowed []string, subject string) bool {
	return slices.ContainsFunc(allowed, func(p string) bool { return matches(p, subject) })
}

// who is a client and all it may do.
type who struct {
	name               string
	conn               *nats.Conn
	publish, subscribe []string
}

// everybody are the clients of a running server, each with the allow-lists written down here once more: the test must not
// take them from where the server has them.
func everybody(t *testing.T, b *bustest.Bus) []who {
	toRunner := []string{"runbus.v1.*.runner.*.work.*", "runbus.v1.*.runner.*.control.*", "runbus.v1.*.runner.*.credit.*"}
	all := []string{">"}
	configured := map[embedded.User]who{
		embedded.UserAuth:     {publish: []string{"$SYS._INBOX.>"}, subscribe: []string{"$SYS.REQ.USER.AUTH"}},
		embedded.UserSys:      {publish: all, subscribe: all},
		embedded.UserSec:      {publish: all, subscribe: all},
		embedded.UserDispatch: {publish: toRunner, subscribe: []string{"runbus.v1.*.runner.*.result.>", "runbus.v1.*.runner.*.reply.>", "_INBOX.>"}},
		embedded.UserServe: {
			publish:   append([]string{"runbus.v1.*.runner.*.inbox.>"}, toRunner...),
			subscribe: []string{schemas.AllHellos, schemas.AllHeartbeats, schemas.AllGoodbyes, "runbus.v1.*.runner.*.reply.>"},
		},
		embedded.UserJail:   {publish: []string{"runbus.v1.*.runner.*.inbox.>"}, subscribe: []string{schemas.AllHellos}},
		embedded.UserMirror: {publish: []string{"$JS.API.INFO", "$JS.API.STREAM.*.KV_runbus_heartbeats", "$JS.API.STREAM.*.RUNBUS_AUDIT", "$JS.API.STREAM.*.RUNBUS_TRACE"}, subscribe: []string{"_INBOX.>"}},
		embedded.UserMicro: {
			publish:   []string{"_INBOX.>", "runbus.v1.*.runner.*.work.*", "runbus.v1.*.runner.*.control.*", "runbus.v1.*.runner.*.result.*.*.ctl"},
			subscribe: []string{"$SRV.PING", "$SRV.PING.runbus", "$SRV.INFO", "$SRV.INFO.runbus.*", "$SRV.STATS", "runbus.ops.*"},
		},
	}
	var clients []who
	for _, u := range embedded.Users() {
		w := configured[u]
		w.name, w.conn = string(u), b.Conn(t, u)
		clients = append(clients, w)
	}
	own := "runbus.v1.acme.runner.a=2Eb."
	return append(clients,
		who{
			name: "runner", conn: b.RunnerConn(t, acme),
			publish:   []string{own + "hello", own + "heartbeat", own + "goodbye", own + "result.>", own + "reply.>"},
			subscribe: []string{own + "work.*", own + "control.*", own + "credit.*", own + "inbox.>"},
		},
		who{
			name: "ops", conn: b.OpsConn(t), subscribe: []string{"runbus.v1.>", "_INBOX.>"},
			publish: []string{
				"$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.INFO.*", "$JS.API.STREAM.MSG.GET.*", "$JS.API.DIRECT.GET.>", "$JS.API.CONSUMER.CREATE.>",
				"$JS.ACK.>", "$JS.FC.>", "$SRV.PING", "$SRV.PING.*", "$SRV.INFO.*.*", "$SRV.STATS.*", "runbus.ops.*", "$SYS.REQ.USER.INFO",
			},
		},
		who{
			name: "ops-sys", conn: b.OpsSysConn(t), subscribe: []string{"_INBOX.>"},
			publish: []string{"$SYS.REQ.USER.INFO", "$SYS.REQ.SERVER.PING", "$SYS.REQ.SERVER.PING.VARZ", "$SYS.REQ.SERVER.X.JSZ"},
		})
}

// denied flushes and reports whether the server refused the operation on subject: its error comes before the answer to
// the flush.
func denied(t *testing.T, nc *nats.Conn, operation, subject string) bool {
	t.Helper()
	if err := nc.FlushTimeout(soon); err != nil {
		t.Fatalf("flush: %v", err)
	}
	err := nc.LastError()
	return err != nil && strings.Contains(strings.ToLower(err.Error()), strings.ToLower(`permissions violation for `+operation+` to "`+subject+`"`))
}

// Every client against every subject: publish, request, subscribe and queue subscribe are open exactly where the list says.
func TestPermissionMatrix(t *testing.T) {
	b := bustest.Start(t)
	for _, w := range everybody(t, b) {
		t.Run(w.name, func(t *testing.T) {
			for _, subject := range universe() {
				want := within(w.subscribe, subject)
				for _, queue := range []string{"", "q"} {
					sub, err := w.conn.QueueSubscribeSync(subject, queue)
					if err != nil {
						t.Fatal(err)
					}
					text := subject
					if queue != "" {
						text += `" using queue "` + queue
					}
					if got := !denied(t, w.conn, "subscription", text); got != want {
						t.Errorf("subscribe %q, queue %q: allowed %v, want %v", subject, queue, got, want)
					}
					_ = sub.Unsubscribe() // fails where the server refused
				}
				if strings.ContainsAny(subject, "*>") {
					continue
				}
				want = within(w.publish, subject)
				if err := w.conn.Publish(subject, []byte("x")); err != nil {
					t.Fatal(err)
				}
				if got := !denied(t, w.conn, "publish", subject); got != want {
					t.Errorf("publish %q: allowed %v, want %v", subject, got, want)
				}
			}
		})
	}
}

// What is within a list is checked above; this is the list itself: no subject of it changes anything.
func TestOpsListsAreReadOnly(t *testing.T) {
	forbidden := []string{"CREATE.", "UPDATE", "PURGE", "STREAM.DELETE", "MSG.DELETE", "RESTORE", "SNAPSHOT", "STEPDOWN", "KICK", "RELOAD", "LDM", "PROFILEZ", "$KV", "RESET"}
	opsPublish, opsSubscribe := embedded.OpsPermissions()
	sysPublish, sysSubscribe := embedded.OpsSysPermissions()
	for _, p := range append(opsPublish, sysPublish...) {
		if p == ">" || p == "$JS.API.>" || p == "$SYS.>" || strings.HasPrefix(p, "$SYS.REQ.SERVER.*.*") || strings.HasPrefix(p, "runbus.v1") {
			t.Errorf("%q is too wide", p)
		}
		for _, f := range forbidden {
			if strings.Contains(p, f) && p != "$JS.API.CONSUMER.CREATE.>" {
				t.Errorf("%q is open to ops", p)
			}
		}
	}
	if !slices.Equal(opsSubscribe, []string{"_INBOX.>", "runbus.v1.>"}) || !slices.Equal(sysSubscribe, []string{"_INBOX.>"}) {
		t.Errorf("ops may subscribe %v, ops-sys %v", opsSubscribe, sysSubscribe)
	}
}
