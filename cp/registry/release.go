package registry

import (
	"context"
	"errors"

	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// ReleaseID frees the runner id for another key of the tenant; the next hello binds it again. by must be ORG_ADMIN. An id
// that the tenant doesn't know is CodeNotFound; one that is free already is no error. Audited before it returns.
func (r *Registry) ReleaseID(ctx context.Context, by auth.Principal, id string) error {
	return r.changeKnown(ctx, by, "runner.release", id, func(row jetstream.Row[Known]) error {
		known := row.Value
		known.PublicKey, known.KeyID = "", ""
		_, err := r.known.Update(ctx, row.Key, known, row.Revision)
		return err
	})
}

// Remove forgets an outbound runner whose id no key holds any more (it was revoked, expired, or an admin released the id), and that
// is not connected: it is no longer listed, and the next hello with the id is that of a new runner. by must be ORG_ADMIN. Any
// other runner is CodeConflict, an id that the tenant doesn't know CodeNotFound. Audited before it returns.
func (r *Registry) Remove(ctx context.Context, by auth.Principal, id string) error {
	return r.changeKnown(ctx, by, "runner.remove", id, func(row jetstream.Row[Known]) error {
		if r.held(row.Value) {
			return schemas.Errorf(schemas.CodeConflict, "runner %q dials out, and the key %s holds its id: only one whose key was revoked is removed", id, row.Value.KeyID).
				WithHint("revoke the key first (`runink key revoke`)")
		}
		r.mu.Lock()
		connected := r.entry(schemas.RunnerRef{Tenant: by.Tenant, Runner: id}).status(r.d.Now()).connected
		r.mu.Unlock()
		if connected {
			return schemas.Errorf(schemas.CodeConflict, "runner %q is connected", id).WithHint("stop it first")
		}
		return r.known.Delete(ctx, row.Key, row.Revision)
	})
}

// changeKnown makes a change of what is kept of an outbound runner, and records what came of it: durably if it was done, else as a note.
func (r *Registry) changeKnown(ctx context.Context, by auth.Principal, action, id string, change func(jetstream.Row[Known]) error) error {
	event := &runbusv1.AuditEvent{Tenant: by.Tenant, Actor: by.Actor(), Action: action, Subject: audit.Subject("runner", id), Outcome: "ok"}
	err := r.tryChange(ctx, by, id, event, change)
	if err == nil {
		if err := r.d.Audit.Record(ctx, event); err != nil {
			return schemas.Wrap(schemas.CodeUnavailable, err, "the change could not be recorded in the audit log").
				WithHint("it took effect")
		}
		return nil
	}
	event.Outcome = string(schemas.CodeOf(err))
	var told *schemas.Error
	if errors.As(err, &told) {
		event.Details = map[string]string{"reason": told.Message}
	}
	r.d.Audit.Note(event)
	return err
}

func (r *Registry) tryChange(ctx context.Context, by auth.Principal, id string, event *runbusv1.AuditEvent, change func(jetstream.Row[Known]) error) error {
	ref := schemas.RunnerRef{Tenant: by.Tenant, Runner: id}
	if by.Role != auth.RoleOrgAdmin {
		return schemas.Errorf(schemas.CodeForbidden, "to release or remove the id of an outbound runner takes an ORG_ADMIN of the tenant")
	}
	if err := ref.Valid(); err != nil {
		return err
	}
	for range casTries {
		row, err := r.known.Get(ctx, schemas.RunnerKey(ref))
		if errors.Is(err, jetstream.ErrNotFound) {
			return schemas.Errorf(schemas.CodeNotFound, "the tenant has no outbound runner %q", id).WithHint("`runink runner list` shows their ids")
		}
		if err == nil {
			event.Details = map[string]string{"key": row.Value.KeyID}
			err = change(row)
		}
		var told *schemas.Error
		switch {
		case err == nil:
			return nil
		case errors.As(err, &told):
			return err
		case !errors.Is(err, jetstream.ErrLost):
			return schemas.Wrap(schemas.CodeUnavailable, err, "the id could not be changed").WithHint("try again when /readyz is ready")
		}
	}
	return schemas.Wrap(schemas.CodeConflict, jetstream.ErrLost, "somebody else changed it at the same moment")
}
