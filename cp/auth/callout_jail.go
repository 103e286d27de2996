package auth

import (
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const jailQueue = "runbus-jail"

// answerJailed tells a client in JAIL why it is there. Any replica can: the reason is found again from what the hello
// says. A hello in there is worth nothing but a text.
func (s *callout) answerJailed(msg *nats.Msg) {
	subject, err := schemas.Parse(msg.Subject)
	if err != nil || subject.Kind != schemas.KindHello {
		s.logRefusal("unreadable hello in JAIL", "subject", clip(msg.Subject))
		return
	}
	var hello runbusv1.RunnerHello
	why, fatal := s.whyJailed(subject.Ref, &hello, bus.Decode(msg, &hello))
	err = s.c.Jail.Answer(msg, &runbusv1.EnrollmentAccepted{
		Error: schemas.ToDetail(why), Fatal: fatal, ServerTime: timestamppb.New(s.a.now()),
	})
	if err != nil {
		s.logRefusal("hello in JAIL not answered", "error", err)
	}
}

// whyJailed is the reason to refuse a client with that hello, and whether it can't heal.
func (s *callout) whyJailed(ref schemas.RunnerRef, hello *runbusv1.RunnerHello, decoded error) (why *schemas.Error, fatal bool) {
	if decoded != nil {
		return asError(decoded), true
	}
	if err := schemas.ValidRunnerID(hello.GetRunnerId()); err != nil && (hello.GetPublicKey() != "" || ref.Runner == jailNobody) {
		return asError(err), true
	}
	public := hello.GetPublicKey()
	if public == "" {
		return schemas.ErrPersonCannotEnrol(), true
	}
	if !signedHello(ref, hello) {
		return schemas.Errorf(schemas.CodeInvalid, "the hello is not signed by the key that it names"), true
	}
	key, err := s.a.KeyByPublic(public)
	switch {
	case err != nil && key.PublicKey == "":
		return asError(err), false // one that another replica knows already, perhaps
	case err != nil:
		return asError(err), true
	}
	if err := outboundID(hello.GetRunnerId()); err != nil {
		return err, true
	}
	if s.heldByOther(schemas.RunnerRef{Tenant: key.Tenant, Runner: hello.GetRunnerId()}, public) {
		return schemas.ErrRunnerBound(hello.GetRunnerId()), true
	}
	if ref.Runner == jailNobody && hello.GetRunnerId() != jailNobody {
		return schemas.Errorf(schemas.CodeInvalid, "the name of the connection must be <runner id>/<process nonce>"), true
	}
	return schemas.Errorf(schemas.CodeUnavailable, "the reason for which this runner was refused is gone").WithHint("connect again"), false
}

// signedHello reports whether the key that a hello names signed it.
func signedHello(ref schemas.RunnerRef, hello *runbusv1.RunnerHello) bool {
	if !nkeys.IsValidPublicUserKey(hello.GetPublicKey()) {
		return false
	}
	key, err := nkeys.FromPublicKey(hello.GetPublicKey())
	return err == nil && key.Verify(schemas.HelloSigningInput(ref, hello), hello.GetSignature()) == nil
}

// noteJailed notes a refusal in the audit log, the same one once a minute: a client may come back as often as it likes.
func (s *callout) noteJailed(v verdict) {
	if !s.notes.first(v.actor + "\x00" + v.tenant + "\x00" + v.runner + "\x00" + v.reason.Message) {
		return
	}
	s.a.audit.Note(&runbusv1.AuditEvent{
		Tenant: v.tenant, Actor: v.actor, Action: "runner.connect", Subject: "runner:" + v.runner,
		Outcome: string(v.reason.Code), Details: map[string]string{"reason": v.reason.Message},
	})
}

// notes remembers for a minute what was noted. It is bounded: when full, it forgets all.
type notes struct {
	now  func() time.Time
	mu   sync.Mutex
	seen map[string]time.Time
}

func newNotes(now func() time.Time) *notes { return &notes{now: now, seen: map[string]time.Time{}} }

// first reports whether key was not noted within the last minute, and remembers it.
func (n *notes) first(key string) bool {
	const most = 10_000
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.now()
	if at, ok := n.seen[key]; ok && now.Sub(at) < time.Minute {
		return false
	}
	if len(n.seen) >= most {
		clear(n.seen)
	}
	n.seen[key] = now
	return true
}
