package security

import (
	"slices"
	"strings"

	"github.com/org-runink/runbus/schemas"
)

// from is who publishes something real where an intruder tries to listen.
type from string

const (
	byServe from = "serve" // the control plane, to runners
	byOther from = "a2"    // another runner of the tenant
	byB     from = "b1"    // a runner of tenant B
	bySec   from = "sec"   // the control plane in SEC
	bySys   from = "sys"   // the control plane in SYS
	byOps   from = "ops"   // ops, in OPS
)

// realMessage is a message that its publisher may send, and that no intruder may get.
type realMessage struct {
	by      from
	subject string
}

// traffic is real traffic of every kind, on every side of the wall. Nothing in it changes anything: no stream stores its
// subjects, and of what runners say the heartbeats are true ones.
func traffic(a2, b1 *runner) []realMessage {
	all := []realMessage{
		{bySec, "$KV.runbus_nothing.x"},
		{bySec, "$JS.API.NOTHING"}, {bySec, "$JS.API.STREAM.NAMES"}, {bySec, "$JS.ACK.nothing"}, {bySec, "$JS.FC.nothing"}, {bySec, "$O.nothing"},
		{bySec, "_INBOX.sec.x"}, {bySec, "runbus.nothing"}, {bySec, "runbus.sec.nothing"}, {bySec, "runbus.mirror.nothing"},
		{bySys, "$SYS.NOTHING.x"}, {bySys, "$SYS.ACCOUNT.RUN.NOTHING"}, {bySys, "$SYS._INBOX.x.y"}, {bySys, "_INBOX.sys.x"},
		{byOps, "$SRV.PING"}, {byOps, "$SRV.INFO"}, {byOps, "runbus.ops.status"},
	}
	for by, r := range map[from]*runner{byOther: a2, byB: b1} {
		for _, s := range []string{
			schemas.WorkSubject(r.ref, r.session), schemas.ControlSubject(r.ref, r.session), schemas.CreditSubject(r.ref, "d"), schemas.InboxPrefix(r.ref) + ".x",
		} {
			all = append(all, realMessage{byServe, s})
		}
		for _, s := range []string{
			schemas.HeartbeatSubject(r.ref), schemas.ResultCtlSubject(r.ref, "c", "d"), schemas.ResultDataSubject(r.ref, "c", "d"), schemas.ReplySubject(r.ref, "c", "i"),
		} {
			all = append(all, realMessage{by, s})
		}
	}
	return all
}

// shapes are all subjects of one runner, those with wildcards too.
func shapes(ref schemas.RunnerRef, session string) []string {
	p := strings.TrimSuffix(schemas.InboxPrefix(ref), "inbox")
	return []string{
		schemas.HelloSubject(ref), schemas.HeartbeatSubject(ref), schemas.GoodbyeSubject(ref),
		schemas.WorkSubject(ref, session), p + "work.*", p + "work.>",
		schemas.ControlSubject(ref, session), p + "control.*",
		schemas.CreditSubject(ref, "d"), p + "credit.*",
		schemas.ResultCtlSubject(ref, "c", "d"), schemas.ResultDataSubject(ref, "c", "d"), p + "result.>", p + "result.*.*.data",
		schemas.ReplySubject(ref, "c", "i"), p + "reply.>",
		schemas.InboxPrefix(ref) + ".x", p + "inbox.>",
		p + ">", p + "*", p + "*.*", strings.TrimSuffix(p, "."), p + "unheard.of",
	}
}

// everywhere are the subjects that are nobody's in particular: wildcards over runners and tenants, the server's own, the
// streams, the services, other people's inboxes.
func everywhere(serverID string, a2 *runner) []string {
	return []string{
		">", "*", "*.>", "*.*", "*.*.*", "anything",
		"runbus.>", "runbus.*", "runbus.*.>", "runbus.v1.>", "runbus.v1.*.>", "runbus.v1.local.>", "runbus.v1.local.runner.>", "runbus.v1.local.runner.*.>",
		"runbus.v1.*.runner.a1.work.*", "runbus.v1.*.runner.a1.inbox.>", "runbus.v1.local.runner.*.work.*", "runbus.v1.local.runner.*.inbox.>",
		"runbus.v1.*.runner.*.work.*", "runbus.v1.*.runner.*.control.*", "runbus.v1.*.runner.*.credit.*", "runbus.v1.*.runner.*.inbox.>",
		"runbus.v1.*.runner.*.result.>", "runbus.v1.*.runner.*.reply.>", "*.*.local.runner.a2.>",
		schemas.AllHellos, schemas.AllHeartbeats, schemas.AllGoodbyes, schemas.ResultsOf("c"), schemas.RepliesOf("c"),
		"$JS.>", "$JS.API.>", "$JS.API.*.*", "$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.INFO.RUNBUS_AUDIT",
		"$JS.API.STREAM.CREATE.KV_runbus_identities", "$JS.API.STREAM.PURGE.KV_runbus_heartbeats", "$JS.API.STREAM.DELETE.RUNBUS_AUDIT",
		"$JS.API.STREAM.MSG.GET.KV_runbus_identities", "$JS.API.STREAM.MSG.DELETE.RUNBUS_AUDIT", "$JS.API.DIRECT.GET.KV_runbus_identities",
		"$JS.API.CONSUMER.CREATE.RUNBUS_AUDIT.x", "$JS.API.CONSUMER.RESET.RUNBUS_AUDIT.ops", "$JS.ACK.>", "$JS.ACK.RUNBUS_AUDIT.ops.1.1.1.1.0", "$JS.FC.>", "$JS.EVENT.>",
		"$KV.>", "$KV.*.>", "$KV.runbus_identities.x", "$KV.runbus_known." + schemas.RunnerKey(a2.ref), "$KV.runbus_heartbeats." + schemas.RunnerKey(a2.ref), "$O.>",
		"runbus.audit", "runbus.mirror.*", "runbus.mirror.RUNBUS_AUDIT", "runbus.sec.>", "runbus.sec.CONSUMER.RESET.RUNBUS_AUDIT.ops", "runbus.ops.*", "runbus.ops.status",
		"$SYS.>", "$SYS.*.>", "$SYS.REQ.>", "$SYS.REQ.USER.AUTH", "$SYS.REQ.USER.INFO", "$SYS.REQ.SERVER.PING", "$SYS.REQ.SERVER.PING.CONNZ",
		"$SYS.REQ.SERVER." + serverID + ".KICK", "$SYS.REQ.SERVER." + serverID + ".RELOAD", "$SYS.REQ.ACCOUNT.RUN.CONNZ", "$SYS.ACCOUNT.>", "$SYS.ACCOUNT.RUN.CONNECT",
		"$SYS._INBOX.>", "$SYS._INBOX.x.y", "$NRG.>",
		"$SRV.>", "$SRV.PING", "$SRV.PING.runbus", "$SRV.INFO.runbus", "$SRV.STATS.>",
		"_INBOX.>", "_INBOX.x", "_INBOX.sec.x", "_INBOX_local.x", "_R_.>", "_R_.x.y", "_GR_.>", "_GR_.x.y", "$GR.x",
	}
}

// forbidden are what a1 may neither publish nor subscribe, whatever the direction.
func forbidden(serverID string, a1, a2, b1 *runner) []string {
	all := everywhere(serverID, a2)
	all = append(all, shapes(a2.ref, a2.session)...)
	all = append(all, shapes(b1.ref, b1.session)...)
	// Its own id in another tenant, ids that only look like its own, a tenant that is none.
	for _, ref := range []schemas.RunnerRef{
		{Tenant: b1.ref.Tenant, Runner: a1.ref.Runner}, {Tenant: a1.ref.Tenant, Runner: "A1"}, {Tenant: a1.ref.Tenant, Runner: "a1.x"}, {Tenant: schemas.NoTenant, Runner: a1.ref.Runner},
	} {
		all = append(all, schemas.HelloSubject(ref), schemas.HeartbeatSubject(ref), schemas.WorkSubject(ref, a1.session), schemas.ResultCtlSubject(ref, "c", "d"), schemas.InboxPrefix(ref)+".x")
	}
	own := strings.TrimSuffix(schemas.InboxPrefix(a1.ref), "inbox")
	all = append(all, own+">", own+"*", own+"*.*", own+"unheard.of", own+"work", own+"inbox", strings.TrimSuffix(own, "."), strings.Replace(own, "runbus.v1", "runbus.v2", 1)+"hello")
	slices.Sort(all)
	return slices.Compact(all)
}

// ownSend is what a1 may send and so must not listen to; ownReceive the other way round.
func ownSend(a1 *runner) []string {
	p := strings.TrimSuffix(schemas.InboxPrefix(a1.ref), "inbox")
	return []string{
		schemas.HelloSubject(a1.ref), schemas.HeartbeatSubject(a1.ref), schemas.GoodbyeSubject(a1.ref), schemas.ResultCtlSubject(a1.ref, "c", "d"),
		schemas.ResultDataSubject(a1.ref, "c", "d"), schemas.ReplySubject(a1.ref, "c", "i"), p + "result.>", p + "reply.>", p + "result.*.*.*",
	}
}

func ownReceive(a1 *runner) []string {
	p := strings.TrimSuffix(schemas.InboxPrefix(a1.ref), "inbox")
	return []string{
		schemas.WorkSubject(a1.ref, a1.session), schemas.ControlSubject(a1.ref, a1.session), schemas.CreditSubject(a1.ref, "d"), schemas.InboxPrefix(a1.ref) + ".x",
		p + "work.*", p + "control.*", p + "credit.*", p + "inbox.>",
	}
}

// matches reports whether the literal subject lies within pattern.
func matches(pattern, subject string) bool {
	p, s := strings.Split(pattern, "."), strings.Split(subject, ".")
	for i, token := range p {
		if token == ">" {
			return len(s) > i
		}
		if i >= len(s) || token != "*" && token != s[i] {
			return false
		}
	}
	return len(p) == len(s)
}
