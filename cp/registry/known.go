package registry

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// knownEvery is how coarse Known.LastSeen is.
const knownEvery = time.Minute

// bind makes sure that key holds ref's id (SPEC E4): the key that first said hello with it does, until it is revoked or
// expired, or an admin released the id. It is decided on the leader by compare-and-set, never from the view: that only says for whom the
// leader need not be read first.
func (r *Registry) bind(ctx context.Context, ref schemas.RunnerRef, key auth.Key, h *runbusv1.RunnerHello) error {
	at := schemas.RunnerKey(ref)
	for try := range casTries {
		now := r.d.Now()
		var row jetstream.Row[Known]
		err := jetstream.ErrNotFound
		if _, seen := r.knownView.Get(at); seen || try > 0 {
			row, err = r.known.Get(ctx, at)
		}
		switch {
		case errors.Is(err, jetstream.ErrNotFound):
			_, err = r.known.Create(ctx, at, Known{
				Tenant: ref.Tenant, Runner: ref.Runner, Name: h.GetName(), Version: h.GetVersion(),
				PublicKey: key.PublicKey, KeyID: key.ID, FirstSeen: now, LastSeen: now,
			})
		case err != nil:
		case row.Value.PublicKey == key.PublicKey:
			return nil
		case r.held(row.Value):
			return schemas.ErrRunnerBound(ref.Runner)
		default:
			known := row.Value
			known.PublicKey, known.KeyID = key.PublicKey, key.ID
			known.Name, known.Version, known.LastSeen = h.GetName(), h.GetVersion(), now
			_, err = r.known.Update(ctx, at, known, row.Revision)
		}
		if err == nil {
			return nil
		}
		if !errors.Is(err, jetstream.ErrLost) {
			return unavailable(err)
		}
	}
	return unavailable(jetstream.ErrLost)
}

// held reports whether the key that k is bound to still holds. Keys are never forgotten before they are revoked or expired.
func (r *Registry) held(k Known) bool {
	if k.PublicKey == "" {
		return false
	}
	_, err := r.d.Auth.KeyByPublic(k.PublicKey)
	return err == nil
}

// ReleaseID frees the runner id for another key of the tenant; the next hello binds it again. by must be ORG_ADMIN. An id
// that the tenant doesn't know is CodeNotFound; one that is free already is no error. Audited before it returns.
func (r *Registry) ReleaseID(ctx context.Context, by auth.Principal, id string) error {
	event := &runbusv1.AuditEvent{Tenant: by.Tenant, Actor: by.Actor(), Action: "runner.release", Outcome: "ok"}
	err := r.release(ctx, by, id, event)
	if err == nil {
		if err := r.d.Audit.Record(ctx, event); err != nil {
			return schemas.Wrap(schemas.CodeUnavailable, err, "the release could not be recorded in the audit log").
				WithHint("it took effect; release the id again to have it recorded")
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

func (r *Registry) release(ctx context.Context, by auth.Principal, id string, event *runbusv1.AuditEvent) error {
	ref := schemas.RunnerRef{Tenant: by.Tenant, Runner: id}
	event.Subject = audit.Subject("runner", id)
	if by.Role != auth.RoleOrgAdmin {
		return schemas.Errorf(schemas.CodeForbidden, "to release a runner id takes an ORG_ADMIN of the tenant")
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
			known := row.Value
			known.PublicKey, known.KeyID = "", ""
			_, err = r.known.Update(ctx, schemas.RunnerKey(ref), known, row.Revision)
		}
		if err == nil {
			return nil
		}
		if !errors.Is(err, jetstream.ErrLost) {
			return schemas.Wrap(schemas.CodeUnavailable, err, "the id could not be released").WithHint("try again when /readyz is ready")
		}
	}
	return schemas.Wrap(schemas.CodeConflict, jetstream.ErrLost, "somebody else changed it at the same moment")
}

// note is what was last seen of a known runner.
type note struct {
	name, version string
	at            time.Time
}

// notes collects what is to be written to the known bucket: never on the path of a heartbeat.
type notes struct {
	mu  sync.Mutex
	all map[schemas.RunnerRef]note
}

func (n *notes) add(ref schemas.RunnerRef, name, version string, at time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.all == nil {
		n.all = make(map[schemas.RunnerRef]note)
	}
	if at.Before(n.all[ref].at) {
		return // the writer of a newer one was faster
	}
	n.all[ref] = note{name, version, at}
}

func (n *notes) take() map[schemas.RunnerRef]note {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := n.all
	n.all = nil
	return all
}

// flushKnown writes the notes that say something new. One that is lost to another writer comes again with the next
// heartbeat.
func (r *Registry) flushKnown(ctx context.Context) {
	for ref, n := range r.notes.take() {
		row, ok := r.knownView.Get(schemas.RunnerKey(ref))
		known := row.Value
		same := known.Name == n.name && known.Version == n.version
		if !ok || row.Deleted || same && n.at.Sub(known.LastSeen) < knownEvery {
			continue
		}
		if n.at.After(known.LastSeen) {
			known.LastSeen = n.at
		}
		known.Name, known.Version = n.name, n.version
		_, err := r.known.Update(ctx, row.Key, known, row.Revision)
		if err != nil && !errors.Is(err, jetstream.ErrLost) {
			r.d.Log.Warn("known runner not written", "runner", ref.Runner, "tenant", ref.Tenant, "error", err)
			return
		}
	}
}
