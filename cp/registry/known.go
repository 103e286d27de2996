package registry

import (
	"context"
	"errors"
	"sync"
	"time"

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
		if _, _, seen := r.knownRow(ref); seen || try > 0 {
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
		known, revision, ok := r.knownRow(ref)
		same := known.Name == n.name && known.Version == n.version
		if !ok || same && n.at.Sub(known.LastSeen) < knownEvery {
			continue
		}
		if n.at.After(known.LastSeen) {
			known.LastSeen = n.at
		}
		known.Name, known.Version = n.name, n.version
		_, err := r.known.Update(ctx, schemas.RunnerKey(ref), known, revision)
		if err != nil && !errors.Is(err, jetstream.ErrLost) {
			r.d.Log.Warn("known runner not written", "runner", ref.Runner, "tenant", ref.Tenant, "error", err)
			return
		}
	}
}
