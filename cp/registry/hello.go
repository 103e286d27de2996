package registry

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// What a hello may say of itself at most; more is refused, never cut.
const (
	maxName         = 128    // bytes
	maxVersion      = 64     // bytes
	maxCapabilities = 64     // entries
	maxCapability   = 64     // bytes each
	maxRuleNames    = 100    // entries
	maxPolicyText   = 64     // bytes each
	maxSealingKey   = 4096   // bytes
	maxLimit        = 10_000 // works at once
	maxReplaced     = 16     // processes that a record remembers
)

// casTries is how often a compare-and-set that was lost is decided anew.
const casTries = 8

// refusedEvery is how often the same refusal of the same runner is audited.
const refusedEvery = time.Minute

// serveHello answers a hello with a session or with a refusal.
func (r *Registry) serveHello(ctx context.Context, msg *nats.Msg, ref schemas.RunnerRef) {
	answer, err := r.hello(ctx, msg, ref)
	result := "ok"
	if err != nil {
		result = string(schemas.CodeOf(err))
		answer = &runbusv1.EnrollmentAccepted{
			RunnerId: ref.String(), ServerTime: timestamppb.New(r.d.Now()),
			Error: schemas.ToDetail(err), Fatal: cannotHeal(err),
		}
		r.noteRefusal(ref, err)
	}
	r.metrics.hellos.WithLabelValues(result).Inc()
	if err := r.d.Serve.Answer(msg, answer); err != nil {
		r.metrics.dropped.WithLabelValues("foreign_reply").Inc()
		r.d.Log.Warn("a hello was not answered", "runner", ref.Runner, "tenant", ref.Tenant, "error", err)
	}
}

// hello enrols the process that says it: check what it says, bind the id to its key, record it, give it the session. The
// process that held the id is told.
func (r *Registry) hello(ctx context.Context, msg *nats.Msg, ref schemas.RunnerRef) (*runbusv1.EnrollmentAccepted, error) {
	var hello runbusv1.RunnerHello
	if err := bus.Decode(msg, &hello); err != nil {
		return nil, err
	}
	key, err := r.verify(ref, &hello)
	if err != nil {
		return nil, err
	}
	if hello.GetProbe() {
		return r.probed(ctx, ref, key)
	}
	if key.PublicKey != managedHolder { // which nobody can take, so that nothing is stored of it (SPEC R2)
		if err := r.bind(ctx, ref, key, &hello); err != nil {
			return nil, err
		}
	}
	now, former, err := r.claim(ctx, ref, key, &hello)
	if err != nil {
		return nil, err
	}
	if former != "" {
		r.order(ref, former, &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Replaced{
			Replaced: &runbusv1.ReplacedOrder{Reason: replacedText(ref).Message},
		}})
	}
	if err := r.keepSealingKey(ctx, ref, now.Session, hello.GetSealingKey()); err != nil { // the id is taken: SealingKey asks for what is missing
		r.d.Log.Warn("the sealing key of a runner was not stored", "runner", ref.Runner, "tenant", ref.Tenant, "error", err)
	}
	r.notes.add(ref, now.Name, now.Version, now.LastSeen)
	return &runbusv1.EnrollmentAccepted{
		RunnerId: ref.String(), TenantId: key.Tenant, Session: now.Session,
		HeartbeatIntervalSeconds: int32(HeartbeatInterval / time.Second),
		ServerTime:               timestamppb.New(r.d.Now()),
		Grace:                    durationpb.New(r.d.Grace),
	}, nil
}

// probed answers whether a hello of ref with key would be taken, from what the leader says, and changes nothing (SPEC E11).
func (r *Registry) probed(ctx context.Context, ref schemas.RunnerRef, key auth.Key) (*runbusv1.EnrollmentAccepted, error) {
	row, err := r.known.Get(ctx, schemas.RunnerKey(ref))
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
	case err != nil:
		return nil, unavailable(err)
	case row.Value.PublicKey != key.PublicKey && r.held(row.Value):
		return nil, schemas.ErrRunnerBound(ref.Runner)
	}
	return &runbusv1.EnrollmentAccepted{
		RunnerId: ref.String(), TenantId: key.Tenant,
		HeartbeatIntervalSeconds: int32(HeartbeatInterval / time.Second),
		ServerTime:               timestamppb.New(r.d.Now()),
		Grace:                    durationpb.New(r.d.Grace),
	}, nil
}

// verify checks everything that a hello says against its subject and its key, and returns the key.
func (r *Registry) verify(ref schemas.RunnerRef, h *runbusv1.RunnerHello) (auth.Key, error) {
	if err := schemas.ValidRunnerID(h.GetRunnerId()); err != nil {
		return auth.Key{}, err
	}
	if h.GetRunnerId() != ref.Runner {
		return auth.Key{}, schemas.Errorf(schemas.CodeInvalid, "the hello names the runner id %q on the subject of %q", h.GetRunnerId(), ref.Runner)
	}
	if err := checkStatements(h); err != nil {
		return auth.Key{}, err
	}
	if ref.Runner == schemas.ConsoleRunner {
		return r.verifyManaged(ref, h)
	}
	if fingerprint, ok := schemas.LeafFingerprint(h.GetPublicKey()); ok {
		return r.verifyLeaf(ref, fingerprint, h)
	}
	if schemas.IsDialledID(ref.Runner) {
		return auth.Key{}, schemas.ErrDialledID(ref.Runner)
	}
	key, err := r.d.Auth.KeyByPublic(h.GetPublicKey())
	if err != nil {
		return auth.Key{}, err
	}
	if key.Tenant != ref.Tenant {
		return auth.Key{}, schemas.Errorf(schemas.CodeForbidden, "the service-account key is not one of the tenant %q", ref.Tenant)
	}
	public, err := nkeys.FromPublicKey(key.PublicKey)
	if err != nil {
		return auth.Key{}, schemas.Wrap(schemas.CodeForbidden, err, "the service-account key is not a user's nkey")
	}
	if err := public.Verify(schemas.HelloSigningInput(ref, h), h.GetSignature()); err != nil {
		return auth.Key{}, schemas.Wrap(schemas.CodeForbidden, err, "the signature of the hello does not verify").
			WithHint("something between the runner and the control plane changes messages, or their versions differ")
	}
	return key, nil
}

// checkStatements bounds what a runner says about itself.
func checkStatements(h *runbusv1.RunnerHello) error {
	if _, _, err := schemas.ParseConnectName(schemas.ConnectName(h.GetRunnerId(), h.GetProcessNonce())); err != nil {
		return schemas.Errorf(schemas.CodeInvalid, "the process nonce of the hello is not 1-64 letters and digits")
	}
	if err := checkText("name", h.GetName(), maxName); err != nil {
		return err
	}
	if err := checkText("version", h.GetVersion(), maxVersion); err != nil {
		return err
	}
	if n := len(h.GetCapabilities()); n > maxCapabilities {
		return schemas.Errorf(schemas.CodeInvalid, "the hello lists %d capabilities: at most %d are allowed", n, maxCapabilities)
	}
	for _, c := range h.GetCapabilities() {
		if err := checkText("capability", c, maxCapability); err != nil {
			return err
		}
	}
	if err := checkPolicy(h.GetPolicy()); err != nil {
		return err
	}
	switch n := len(h.GetSealingKey()); {
	case h.GetProbe() && n > 0:
		return schemas.Errorf(schemas.CodeInvalid, "the hello is a probe and has a sealing key: only one that enrols has")
	case !h.GetProbe() && n == 0, n > maxSealingKey:
		return schemas.Errorf(schemas.CodeInvalid, "the sealing key of the hello has %d bytes: 1-%d are allowed", n, maxSealingKey)
	}
	return nil
}

// checkPolicy bounds what a runner says about its policy and journal.
func checkPolicy(p *runbusv1.RunnerPolicy) error {
	if n := len(p.GetRuleNames()); n > maxRuleNames {
		return schemas.Errorf(schemas.CodeInvalid, "the hello lists %d rules of its policy: at most %d are allowed", n, maxRuleNames)
	}
	for _, s := range append([]string{p.GetDigest(), p.GetDefaultVerdict(), p.GetJournalHead()}, p.GetRuleNames()...) {
		if err := checkText("policy", s, maxPolicyText); err != nil {
			return err
		}
	}
	return nil
}

// checkText accepts valid UTF-8 of at most most bytes without control characters.
func checkText(what, s string, most int) error {
	if len(s) > most {
		return schemas.Errorf(schemas.CodeInvalid, "the %s in the hello has %d bytes: at most %d are allowed", what, len(s), most)
	}
	if !utf8.ValidString(s) || slices.ContainsFunc([]rune(s), unicode.IsControl) {
		return schemas.Errorf(schemas.CodeInvalid, "the %s in the hello is not plain text", what)
	}
	return nil
}

// claim decides by compare-and-set that the process of h holds ref's id, and returns its record and the session of the process
// that held it before, if it was another. The same process gets its session again. The last first hello wins: a process that
// had a session and was replaced never gets the id back, so two processes under one id don't flap (SPEC E8).
func (r *Registry) claim(ctx context.Context, ref schemas.RunnerRef, key auth.Key, h *runbusv1.RunnerHello) (now Record, former string, err error) {
	session, recorded := schemas.NewID(), false
	for try := range casTries {
		have, revision, there, err := r.currentRecord(ctx, ref, try == 0)
		if err != nil {
			return Record{}, "", err
		}
		nonce := h.GetProcessNonce()
		heldByOther := there && !have.Left && have.ProcessNonce != nonce
		if slices.Contains(have.Replaced, nonce) || heldByOther && h.GetSession() != "" {
			return Record{}, "", replacedText(ref)
		}
		resumed := have.ProcessNonce == nonce && have.PublicKey == key.PublicKey && !have.Left
		now, former = r.newRecord(ref, key, h), ""
		now.Replaced = have.Replaced
		switch {
		case resumed:
			now.Session, now.SessionAt, now.StartedAt = have.Session, have.SessionAt, have.StartedAt
			now.Ready, now.InFlight, now.Beat = there && have.Ready, have.InFlight, have.Beat
		default:
			now.Session = session
			if have.ProcessNonce != "" && have.ProcessNonce != nonce {
				now.Replaced = append(slices.Clone(have.Replaced), have.ProcessNonce)
				now.Replaced = now.Replaced[max(0, len(now.Replaced)-maxReplaced):]
				if there && !have.Left {
					former = have.Session
				}
			}
		}
		if !resumed && !recorded {
			if err := r.recordEnrolment(ctx, ref, key, h, former != ""); err != nil {
				return Record{}, "", err
			}
			recorded = true
		}
		if there {
			_, err = r.heartbeats.Update(ctx, schemas.RunnerKey(ref), now, revision)
		} else {
			_, err = r.heartbeats.Create(ctx, schemas.RunnerKey(ref), now)
		}
		if err == nil {
			return now, former, nil
		}
		if !errors.Is(err, jetstream.ErrLost) {
			return Record{}, "", unavailable(err)
		}
	}
	return Record{}, "", unavailable(jetstream.ErrLost)
}

// currentRecord is where a compare-and-set of ref's record begins: with the leader's, or, if guess is set, with none for a runner that
// this replica has never seen. A wrong guess loses the compare-and-set.
func (r *Registry) currentRecord(ctx context.Context, ref schemas.RunnerRef, guess bool) (rec Record, revision uint64, there bool, err error) {
	if rec, _, live := r.record(ref); guess && !live && rec.ProcessNonce == "" {
		return Record{}, 0, false, nil
	}
	return r.leaderRecord(ctx, ref)
}

// leaderRecord reads ref's record from the leader. When its key is gone, the last one that this replica saw stands in, so
// that a process keeps its session over the loss of the (memory) bucket; there is false then.
func (r *Registry) leaderRecord(ctx context.Context, ref schemas.RunnerRef) (rec Record, revision uint64, there bool, err error) {
	row, err := r.heartbeats.Get(ctx, schemas.RunnerKey(ref))
	switch {
	case err == nil:
		return row.Value, row.Revision, true, nil
	case errors.Is(err, jetstream.ErrNotFound):
		rec, _, _ = r.record(ref)
		return rec, 0, false, nil
	}
	return Record{}, 0, false, unavailable(err)
}

// newRecord is what the hello makes of ref, without what depends on the record before.
func (r *Registry) newRecord(ref schemas.RunnerRef, key auth.Key, h *runbusv1.RunnerHello) Record {
	at := r.d.Now()
	return Record{
		Tenant: ref.Tenant, Runner: ref.Runner, Name: h.GetName(), Version: h.GetVersion(),
		Capabilities: h.GetCapabilities(), LoadScore: boundLoad(h.GetLoadScore()), Limit: boundCount(h.GetLimit()),
		Draining: h.GetDraining(), Pid: h.GetPid(), SessionAt: at, ProcessNonce: h.GetProcessNonce(),
		PublicKey: key.PublicKey, KeyID: key.ID,
		StartedAt: at, LastSeen: at, Replica: r.d.Replica, Policy: policyOf(h.GetPolicy()),
	}
}

// policyOf is nil for a runner that tells of no policy.
func policyOf(p *runbusv1.RunnerPolicy) *Policy {
	if p == nil {
		return nil
	}
	claimed := &Policy{
		Digest: p.GetDigest(), Default: p.GetDefaultVerdict(), AllowRules: boundCount(p.GetAllowRules()), DenyRules: boundCount(p.GetDenyRules()),
		RuleNames: append([]string{}, p.GetRuleNames()...), Journal: p.GetJournal(),
	}
	if claimed.Journal {
		claimed.JournalHead = fmt.Sprintf("%d:%s", p.GetJournalSeq(), p.GetJournalHead())
	}
	return claimed
}

// boundLoad makes a claimed load a number from 0 to 1.
func boundLoad(v float64) float64 {
	if math.IsNaN(v) || v < 0 {
		return 0
	}
	return min(v, 1)
}

// boundCount makes a claimed count one that can be shown.
func boundCount(n int32) int { return int(min(max(n, 0), maxLimit)) }

// recordEnrolment makes the enrolment durable in the audit log before it is acknowledged (SPEC R8).
func (r *Registry) recordEnrolment(ctx context.Context, ref schemas.RunnerRef, key auth.Key, h *runbusv1.RunnerHello, replaces bool) error {
	details := map[string]string{"name": h.GetName(), "version": h.GetVersion()}
	if replaces {
		details["replaces"] = "the process that held the id"
	}
	if err := r.d.Audit.Record(ctx, &runbusv1.AuditEvent{
		Tenant: ref.Tenant, Actor: actorOf(ref, key), Action: "runner.enrol", Subject: "runner:" + ref.Runner,
		Outcome: "ok", Details: details,
	}); err != nil {
		return unavailable(err)
	}
	return nil
}

// noteRefusal audits a refused hello, the same one once a minute at most: a runner may come back with it forever.
func (r *Registry) noteRefusal(ref schemas.RunnerRef, err error) {
	code, now := schemas.CodeOf(err), r.d.Now()
	r.d.Log.Info("hello refused", "runner", ref.Runner, "tenant", ref.Tenant, "code", code, "error", err)
	if code == schemas.CodeUnavailable {
		return // the platform's own failure
	}
	which := ref.String() + " " + string(code)
	r.mu.Lock()
	last, before := r.refused[which]
	due := !before || now.Sub(last) >= refusedEvery
	if due {
		if len(r.refused) >= 10_000 {
			clear(r.refused)
		}
		r.refused[which] = now
	}
	r.mu.Unlock()
	if due {
		r.d.Audit.Note(&runbusv1.AuditEvent{
			Tenant: ref.Tenant, Actor: "runner:" + ref.Runner, Action: "runner.enrol", Subject: "runner:" + ref.Runner,
			Outcome: string(code), Details: map[string]string{"reason": err.Error()},
		})
	}
}

// replacedText tells a process that another one took its id.
func replacedText(ref schemas.RunnerRef) *schemas.Error {
	return schemas.Errorf(schemas.CodeReplaced, "another process enrolled as runner %q: this one is replaced and stops", ref.Runner).
		WithHint("give each runner a RUNNER_ID of its own")
}

// unavailable is what a runner is told when the platform can't decide: it comes again by itself.
func unavailable(cause error) error {
	return schemas.Wrap(schemas.CodeUnavailable, cause, "the control plane can't enrol a runner now").WithHint("the runner tries again by itself")
}

// cannotHeal reports whether a refused runner must stop rather than try again (SPEC E8). A key that isn't known may only
// not have arrived at this replica.
func cannotHeal(err error) bool {
	switch schemas.CodeOf(err) {
	case schemas.CodeInvalid, schemas.CodeForbidden, schemas.CodeReplaced:
		return true
	}
	return false
}
