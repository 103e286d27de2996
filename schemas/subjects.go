package schemas

import (
	"strings"
)

// Root is the first part of every subject of the bus.
const Root = "runbus.v1"

// Kind says what a subject is for. It is the word behind the runner's id.
type Kind string

// The kinds of subject. Direction, message and who may use them: docs/architecture.md, "Subjects".
const (
	KindHello      Kind = "hello"     // runner → any replica, request: RunnerHello
	KindHeartbeat  Kind = "heartbeat" // runner → any replica: RunnerHeartbeat
	KindGoodbye    Kind = "goodbye"   // runner → any replica: RunnerGoodbye
	KindWork       Kind = "work"      // replica → one session of a runner: RunnerWorkAssignment, RunnerWorkCredentials
	KindControl    Kind = "control"   // replica → one session of a runner: RunnerControl
	KindCredit     Kind = "credit"    // replica → runner, per dispatch: RunnerWorkCredit
	KindResultCtl  Kind = "ctl"       // runner → waiting replica, per dispatch: accepted, progress, resume, result
	KindResultData Kind = "data"      // runner → waiting replica, per dispatch: what has rows, RunnerWorkChunk and RunnerWorkWhole
	KindReply      Kind = "reply"     // runner → replica: RunnerControlReply
	KindInbox      Kind = "inbox"     // replica → runner: answers to requests
)

// Subject is one subject of the grammar, taken apart. Which fields are set depends on Kind; Parse and String are each
// other's inverse. The zero Subject is invalid.
type Subject struct {
	Kind     Kind
	Ref      RunnerRef
	Session  string // work, control
	Replica  string // ctl, data, reply: random id of the waiting replica's boot
	Dispatch string // credit, ctl, data
	ID       string // reply
	Inbox    string // inbox: what follows `inbox.`, one or more tokens
}

// The builders. Each takes parts that already follow their grammar.

// HelloSubject is where a runner says hello.
func HelloSubject(r RunnerRef) string { return Subject{Kind: KindHello, Ref: r}.String() }

// HeartbeatSubject is where a runner reports.
func HeartbeatSubject(r RunnerRef) string { return Subject{Kind: KindHeartbeat, Ref: r}.String() }

// GoodbyeSubject is where a runner takes leave.
func GoodbyeSubject(r RunnerRef) string { return Subject{Kind: KindGoodbye, Ref: r}.String() }

// WorkSubject is where one session of a runner gets its assignments and credentials.
func WorkSubject(r RunnerRef, session string) string {
	return Subject{Kind: KindWork, Ref: r, Session: session}.String()
}

// ControlSubject is where one session of a runner gets its orders.
func ControlSubject(r RunnerRef, session string) string {
	return Subject{Kind: KindControl, Ref: r, Session: session}.String()
}

// CreditSubject is where a runner gets the credit of one dispatch.
func CreditSubject(r RunnerRef, dispatch string) string {
	return Subject{Kind: KindCredit, Ref: r, Dispatch: dispatch}.String()
}

// ResultCtlSubject is where the frames of one dispatch go, but the chunks.
func ResultCtlSubject(r RunnerRef, replica, dispatch string) string {
	return Subject{Kind: KindResultCtl, Ref: r, Replica: replica, Dispatch: dispatch}.String()
}

// ResultDataSubject is where the chunks of one dispatch go.
func ResultDataSubject(r RunnerRef, replica, dispatch string) string {
	return Subject{Kind: KindResultData, Ref: r, Replica: replica, Dispatch: dispatch}.String()
}

// ReplySubject is where a runner answers one control message.
func ReplySubject(r RunnerRef, replica, id string) string {
	return Subject{Kind: KindReply, Ref: r, Replica: replica, ID: id}.String()
}

// InboxPrefix is the inbox prefix of a runner's connection (nats.CustomInboxPrefix): no other inbox is open to it.
func InboxPrefix(r RunnerRef) string { return prefix(r) + "inbox" }

// Wildcards a control plane subscribes.
const (
	AllHellos     = Root + ".*.runner.*.hello"
	AllHeartbeats = Root + ".*.runner.*.heartbeat"
	AllGoodbyes   = Root + ".*.runner.*.goodbye"
)

// ResultsOf matches the frames for one replica's boot.
func ResultsOf(replica string) string { return Root + ".*.runner.*.result." + replica + ".*.*" }

// RepliesOf matches the control replies for one replica's boot.
func RepliesOf(replica string) string { return Root + ".*.runner.*.reply." + replica + ".*" }

// RunnerPermissions are all subjects a runner may publish and subscribe: allow-lists, nothing else is open to it.
func RunnerPermissions(r RunnerRef) (publish, subscribe []string) {
	p := prefix(r)
	return []string{p + "hello", p + "heartbeat", p + "goodbye", p + "result.>", p + "reply.>"},
		[]string{p + "work.*", p + "control.*", p + "credit.*", p + "inbox.>"}
}

// RefusedPermissions are the subjects of a client in JAIL: it may ask once more and be told why not. Its tenant is not
// trusted, so the tenant is left open.
func RefusedPermissions(runnerID string) (publish, subscribe []string) {
	p := Root + ".*.runner." + escapeRunner(runnerID) + "."
	return []string{p + "hello"}, []string{p + "inbox.>"}
}

func prefix(r RunnerRef) string {
	return Root + "." + r.Tenant + ".runner." + escapeRunner(r.Runner) + "."
}

// String is the subject as it goes over the wire.
func (s Subject) String() string {
	tenant, runner := s.Ref.Tenant, escapeRunner(s.Ref.Runner)
	switch s.Kind { // each in one piece, since every dispatch has several
	case KindHello, KindHeartbeat, KindGoodbye:
		return Root + "." + tenant + ".runner." + runner + "." + string(s.Kind)
	case KindWork, KindControl:
		return Root + "." + tenant + ".runner." + runner + "." + string(s.Kind) + "." + s.Session
	case KindCredit:
		return Root + "." + tenant + ".runner." + runner + ".credit." + s.Dispatch
	case KindResultCtl, KindResultData:
		return Root + "." + tenant + ".runner." + runner + ".result." + s.Replica + "." + s.Dispatch + "." + string(s.Kind)
	case KindReply:
		return Root + "." + tenant + ".runner." + runner + ".reply." + s.Replica + "." + s.ID
	case KindInbox:
		return Root + "." + tenant + ".runner." + runner + ".inbox." + s.Inbox
	}
	return ""
}

// Parse takes a subject apart. A subject that String would not write is an error of CodeInvalid.
func Parse(subject string) (Subject, error) {
	bad := func() (Subject, error) {
		return Subject{}, Errorf(CodeInvalid, "%q is not a subject of %s", clip(subject), Root)
	}
	rest, ok := strings.CutPrefix(subject, Root+".")
	if !ok {
		return bad()
	}
	part := strings.Split(rest, ".")
	if len(part) < 4 || part[1] != "runner" {
		return bad()
	}
	runner, ok := unescapeRunner(part[2])
	if !ok || !isLabel(part[0]) {
		return bad()
	}
	s := Subject{Kind: Kind(part[3]), Ref: RunnerRef{Tenant: part[0], Runner: runner}}
	args := part[4:]
	for _, a := range args {
		if s.Kind != KindInbox && !isToken(a) {
			return bad()
		}
	}
	switch {
	case len(args) == 0 && (s.Kind == KindHello || s.Kind == KindHeartbeat || s.Kind == KindGoodbye):
	case len(args) == 1 && (s.Kind == KindWork || s.Kind == KindControl):
		s.Session = args[0]
	case len(args) == 1 && s.Kind == KindCredit:
		s.Dispatch = args[0]
	case len(args) == 3 && part[3] == "result" && (args[2] == string(KindResultCtl) || args[2] == string(KindResultData)):
		s.Kind, s.Replica, s.Dispatch = Kind(args[2]), args[0], args[1]
	case len(args) == 2 && s.Kind == KindReply:
		s.Replica, s.ID = args[0], args[1]
	case len(args) >= 1 && s.Kind == KindInbox:
		for _, a := range args {
			if !isInboxToken(a) {
				return bad()
			}
		}
		s.Inbox = strings.Join(args, ".")
	default:
		return bad()
	}
	return s, nil
}

// isInboxToken accepts what nats.go makes: letters, digits, `-` and `_`. Never a wildcard.
func isInboxToken(s string) bool {
	if s == "" || len(s) > 128 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return true
}

// escapeRunner writes the dots of a runner id as `=2E`; `=` is not in the id's grammar, so nothing else needs escaping.
func escapeRunner(id string) string { return strings.ReplaceAll(id, ".", "=2E") }

func unescapeRunner(s string) (string, bool) {
	id := strings.ReplaceAll(s, "=2E", ".")
	return id, ValidRunnerID(id) == nil && escapeRunner(id) == s
}

// RunnerKey is the runner's key in a KV bucket: `<tenant>.<escaped id>`.
func RunnerKey(r RunnerRef) string { return r.Tenant + "." + escapeRunner(r.Runner) }

// ParseRunnerKey reads what RunnerKey wrote.
func ParseRunnerKey(key string) (RunnerRef, error) {
	tenant, escaped, ok := strings.Cut(key, ".")
	runner, valid := unescapeRunner(escaped)
	if !ok || !valid || !isLabel(tenant) {
		return RunnerRef{}, Errorf(CodeInvalid, "%q is not a runner's key", clip(key))
	}
	return RunnerRef{Tenant: tenant, Runner: runner}, nil
}
