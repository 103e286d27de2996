package roster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// TicketLife is how long a token, and with it its ticket, is valid (SPEC C3).
const TicketLife = jetstream.ProofTTL

// proof is the value of a token's key in the proofs bucket.
type proof struct {
	Key []byte `json:"key"` // schemas.EnrolmentKey
}

// The errors of enrolment.
var (
	// ErrNoProof says that a runner has no token that can be proven: none was minted, it was revoked or has expired, or its
	// proof key went with the memory of the control plane. It takes a new token.
	ErrNoProof = errors.New("no enrolment token that can be proven: issue a new one")
	// ErrTokenUsed says that the token was used with another key: whoever comes second has it from somewhere.
	ErrTokenUsed = errors.New("the enrolment token was used already, with another key")
	// ErrTokenEnded says that the token was revoked or has expired.
	ErrTokenEnded = errors.New("the enrolment token was revoked or has expired")
	// ErrNotCurrent says that the certificate is not, or not any more, one that the runner has.
	ErrNotCurrent = errors.New("the certificate is not the runner's")
)

// Proof is the key that the runner's latest token is proven by, with the token's id and expiry. A used token is among them
// until it expires, since its answer may have been lost (Consume decides). ErrNoProof if there is none; an error of
// CodeRunnerRevoked for a revoked runner.
func (r *Roster) Proof(ctx context.Context, runnerID string) (key [32]byte, tokenID string, expires time.Time, err error) {
	runner, ok := r.lookUp(runnerID)
	if !ok {
		return key, "", expires, errNoRunner(runnerID)
	}
	row, err := r.docs.Get(ctx, runner.Tenant)
	if err != nil {
		return key, "", expires, unavailable(err)
	}
	found := row.Value.runner(runnerID)
	if found == nil {
		return key, "", expires, errNoRunner(runnerID)
	}
	if found.State == Revoked {
		return key, "", expires, schemas.ErrRunnerRevoked(found.Name)
	}
	now := r.d.Now()
	var latest *Token
	for i := range row.Value.Tokens {
		t := &row.Value.Tokens[i]
		if t.RunnerID == runnerID && t.RevokedAt == nil && now.Before(t.ExpiresAt) && (latest == nil || t.CreatedAt.After(latest.CreatedAt)) {
			latest = t
		}
	}
	if latest == nil {
		return key, "", expires, ErrNoProof
	}
	kept, err := r.proofs.Get(ctx, latest.ID)
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
		return key, "", expires, ErrNoProof
	case err != nil:
		return key, "", expires, unavailable(err)
	case len(kept.Value.Key) != len(key):
		return key, "", expires, fmt.Errorf("%w: the proof key is damaged", ErrNoProof)
	}
	return [32]byte(kept.Value.Key), latest.ID, latest.ExpiresAt, nil
}

// Consume uses the token up and makes its runner ACTIVE with the leaf, in one step. Of several claims one wins; the same key
// again gets the certificate that it was given (again is true), since its answer may have been lost. Another key gets
// ErrTokenUsed, which is audited as the double use that it is; a token that was revoked or has expired, ErrTokenEnded. It is
// durable in the audit log when it returns.
func (r *Roster) Consume(ctx context.Context, c Claim) (certificatePEM []byte, again bool, err error) {
	runner, ok := r.lookUp(c.RunnerID)
	if !ok {
		return nil, false, errNoRunner(c.RunnerID)
	}
	var won *runbusv1.AuditEvent
	tell := func() *runbusv1.AuditEvent {
		won = r.event(runner, "runner.enrol", nil, "token", c.TokenID, "key", c.KeySHA256, "certificate", c.Leaf.Fingerprint)
		return won
	}
	err = r.change(ctx, runner.Tenant, tell, func(d *document, now time.Time) error {
		certificatePEM, again = nil, false
		token, runner := d.token(c.TokenID), d.runner(c.RunnerID)
		switch {
		case runner == nil:
			return errNoRunner(c.RunnerID)
		case runner.State == Revoked:
			return schemas.ErrRunnerRevoked(runner.Name)
		case token == nil || token.RunnerID != runner.ID:
			return ErrTokenEnded
		case token.UsedAt != nil && token.UsedBy == c.KeySHA256 && token.Certificate == nil:
			return ErrTokenEnded // long ago
		case token.UsedAt != nil && token.UsedBy == c.KeySHA256:
			certificatePEM, again = token.Certificate, true
			return errUnchanged
		case token.UsedAt != nil:
			return ErrTokenUsed
		case !token.Live(now):
			return ErrTokenEnded
		case runner.State != Pending:
			return schemas.Errorf(schemas.CodeConflict, "runner %q is enrolled already", runner.Name)
		}
		token.UsedAt, token.UsedBy, token.Certificate = &now, c.KeySHA256, c.CertificatePEM
		leaf := c.Leaf
		runner.State, runner.Current, runner.Next, runner.EnrolledAt = Active, &leaf, nil, &now
		certificatePEM = c.CertificatePEM
		return nil
	})
	if err == nil && !again {
		if err := r.conclude(ctx, won, nil); err != nil {
			return nil, false, err
		}
		return certificatePEM, false, nil
	}
	e := r.event(runner, "runner.enrol", err, "token", c.TokenID, "key", c.KeySHA256)
	switch {
	case errors.Is(err, ErrTokenUsed):
		e.Outcome, e.Details["reason"] = string(schemas.CodeForbidden), "double use: the token was used already, with another key"
	case err == nil:
		e.Details["again"] = "the same key, after its answer was lost"
	}
	if err := r.conclude(ctx, e, err); err != nil {
		return nil, false, err
	}
	return certificatePEM, true, nil
}

// SetNext records the leaf that is to replace the runner's, whose fingerprint is current, in place of an earlier next one
// (SPEC C8). ErrNotCurrent if the runner has another leaf. Durable in the audit log when it returns.
func (r *Roster) SetNext(ctx context.Context, id, current string, next Leaf) error {
	runner, ok := r.lookUp(id)
	if !ok {
		return errNoRunner(id)
	}
	if err := r.settle(ctx, runner.Tenant); err != nil {
		return err
	}
	var e *runbusv1.AuditEvent
	tell := func() *runbusv1.AuditEvent {
		e = r.event(runner, "runner.certificate.next", nil, "certificate", current, "next", next.Fingerprint)
		return e
	}
	err := r.change(ctx, runner.Tenant, tell, func(d *document, _ time.Time) error {
		runner, err := d.changeable(id)
		switch {
		case err != nil:
			return err
		case runner.Current == nil || runner.Current.Fingerprint != current:
			return ErrNotCurrent
		case next.Fingerprint == current:
			return fmt.Errorf("the next certificate is the current one: %w", ErrNotCurrent)
		}
		runner.Next = &next
		return nil
	})
	if err != nil {
		e = r.event(runner, "runner.certificate.next", err, "certificate", current, "next", next.Fingerprint)
	}
	return r.conclude(ctx, e, err)
}

// Promote makes the next leaf, whose fingerprint it must be, the runner's only one, and returns the runner. One that is the
// current leaf already is no error; ErrNotCurrent for any other. Durable in the audit log when it returns.
func (r *Roster) Promote(ctx context.Context, id, fingerprint string) (Runner, error) {
	before, ok := r.lookUp(id)
	if !ok {
		return Runner{}, errNoRunner(id)
	}
	var promoted Runner
	old := ""
	var e *runbusv1.AuditEvent
	tell := func() *runbusv1.AuditEvent {
		e = r.event(before, "runner.certificate.promote", nil, "certificate", fingerprint, "old", old)
		return e
	}
	err := r.change(ctx, before.Tenant, tell, func(d *document, _ time.Time) error {
		old = ""
		runner, err := d.changeable(id)
		switch {
		case err != nil:
			return err
		case runner.Current != nil && runner.Current.Fingerprint == fingerprint:
			promoted = runner.clone()
			return errUnchanged
		case runner.Next == nil || runner.Next.Fingerprint != fingerprint:
			return ErrNotCurrent
		}
		if runner.Current != nil {
			old = runner.Current.Fingerprint
		}
		runner.Current, runner.Next = runner.Next, nil
		promoted = runner.clone()
		return nil
	})
	if err == nil && old == "" {
		return promoted, nil // promoted before, and recorded then
	}
	if err != nil {
		e = r.event(before, "runner.certificate.promote", err, "certificate", fingerprint, "old", old)
	}
	if err := r.conclude(ctx, e, err); err != nil {
		return Runner{}, err
	}
	r.d.Step("promoted")
	return promoted, nil
}

// event tells of what the control plane did about a runner.
func (r *Roster) event(runner Runner, action string, err error, kv ...string) *runbusv1.AuditEvent {
	e := audit.Event(audit.ActorPlatform, action, "runner:"+runner.ID, "ok", kv...)
	e.Tenant = runner.Tenant
	if err != nil {
		e.Outcome = string(schemas.CodeOf(err))
		e.Details["reason"] = err.Error()
	}
	return e
}
