package roster

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	// changeTimeout bounds one change, with the attempts that others were faster than.
	changeTimeout = 30 * time.Second
	// againWithin is how long at most a writer waits after it lost, so that many writers don't meet again.
	againWithin = 20 * time.Millisecond
)

// errUnchanged ends a change that finds all as it should be: nothing is written, and it is no error.
var errUnchanged = errors.New("nothing to change")

// change decides one change of a tenant on the leader: decide is given the present document, once or, when another writer was
// first, several times, and changes it or says why not. What it leaves is written if the document still is what decide saw, and with it
// what tell, asked after decide, says of it: the event that the audit log is owed until conclude. An error of decide ends it as it is.
func (r *Roster) change(ctx context.Context, tenant string, tell func() *runbusv1.AuditEvent, decide func(d *document, now time.Time) error) error {
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	w := r.writers(tenant)
	w.waiting.Add(1)
	select {
	case w.turn <- struct{}{}:
		w.waiting.Add(-1)
		defer func() { <-w.turn }()
	case <-ctx.Done():
		w.waiting.Add(-1)
		return unavailable(context.Cause(ctx))
	}
	for {
		err := r.attempt(ctx, tenant, tell, decide)
		if errors.Is(err, errUnchanged) {
			return nil
		}
		if !errors.Is(err, jetstream.ErrLost) {
			return err
		}
		select {
		case <-ctx.Done():
			return conflict(err)
		case <-time.After(rand.N(againWithin)): //nolint:gosec // spreads writers, guards nothing
		}
	}
}

// writers are those of one tenant in this process.
type writers struct {
	turn      chan struct{} // of size 1
	waiting   atomic.Int64  // for their turn
	settling  chan struct{} // of size 1: the turn of those who have the audit log take what is owed
	recording sync.Map      // ids of events that who made the change is about to record; each with a channel that is closed after that
	recorded  sync.Map      // ids of events that are in the audit log, and may still stand among those that are owed
}

func (r *Roster) writers(tenant string) *writers {
	w, _ := r.writing.LoadOrStore(tenant, &writers{turn: make(chan struct{}, 1), settling: make(chan struct{}, 1)})
	return w.(*writers) //nolint:forcetypeassert // nothing else is stored
}

// attempt is one compare-and-set; jetstream.ErrLost if another writer was first.
func (r *Roster) attempt(ctx context.Context, tenant string, tell func() *runbusv1.AuditEvent, decide func(d *document, now time.Time) error) error {
	row, err := r.docs.Get(ctx, tenant)
	if err != nil && !errors.Is(err, jetstream.ErrNotFound) {
		return unavailable(err)
	}
	now := r.d.Now().UTC()
	doc := row.Value.clone()
	doc.prune(now)
	if err := decide(&doc, now); err != nil {
		return err
	}
	step, done := "", false
	if tell != nil {
		r.writers(tenant).forget(&doc)
		e := tell()
		if err := doc.owe(e); err != nil {
			return err
		}
		step = e.GetAction() + " decided"
		r.writers(tenant).begin(e.GetId())
		defer func() {
			if !done { // else conclude ends it
				r.writers(tenant).end(e.GetId())
			}
		}()
	}
	var revision uint64
	if row.Revision == 0 {
		revision, err = r.docs.Create(ctx, tenant, doc)
	} else {
		revision, err = r.docs.Update(ctx, tenant, doc, row.Revision)
	}
	switch {
	case err == nil:
		r.take(jetstream.Row[document]{Key: tenant, Value: doc, Revision: revision})
		r.writers(tenant).written(&doc)
		if step != "" {
			r.d.Step(step)
		}
		done = true
		return nil
	case errors.Is(err, jetstream.ErrLost):
		return err
	case errors.Is(err, jetstream.ErrUnknown):
		return schemas.Wrap(schemas.CodeUnavailable, err, "it could not be established whether the change of the runner registry took effect").
			WithHint("look at its present state before you try again")
	}
	return unavailable(err)
}

// unavailable is the face of a registry that can't be read or written now.
func unavailable(cause error) error {
	return schemas.Wrap(schemas.CodeUnavailable, cause, "runner registry unavailable").WithHint("nothing was changed; try again when /readyz is ready")
}

// conflict is the face of a change that others were faster than all the time.
func conflict(cause error) error {
	return schemas.Wrap(schemas.CodeConflict, cause, "others changed the runner registry all the time").WithHint("nothing was changed; try again")
}
