package roster

import (
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// debt is an event of a change that the audit log may not have yet. It is written with the change, in the same compare-and-set, and taken
// out when the log has it, by the next change if one waits: a process that is killed in between leaves it to the next one.
type debt struct {
	ID    string `json:"id"`
	Event []byte `json:"event"` // runbus.v1.AuditEvent
}

// owe adds e, with its id and time, to what is owed.
func (d *document) owe(e *runbusv1.AuditEvent) error {
	now := time.Now()
	e.Id, e.At = schemas.NewULID(now), timestamppb.New(now)
	body, err := proto.Marshal(e)
	if err != nil {
		return schemas.Wrap(schemas.CodeInvalid, err, "the change can't be recorded")
	}
	d.Owed = append(d.Owed, debt{ID: e.GetId(), Event: body})
	return nil
}

// begin notes that who makes a change is about to record the event of this id. It is to be followed by end.
func (w *writers) begin(id string) { w.recording.Store(id, make(chan struct{})) }

// end notes that the event of this id is not about to be recorded any more.
func (w *writers) end(id string) {
	if ended, ok := w.recording.LoadAndDelete(id); ok {
		close(ended.(chan struct{})) //nolint:forcetypeassert // nothing else is stored
	}
}

// await waits until whoever made the change has recorded the event of this id, or could not.
func (w *writers) await(ctx context.Context, id string) error {
	ended, ok := w.recording.Load(id)
	if !ok {
		return nil
	}
	select {
	case <-ended.(chan struct{}): //nolint:forcetypeassert // nothing else is stored
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// conclude records e, of something that ended with err, and returns err or what went wrong with the record. What was owed is paid.
func (r *Roster) conclude(ctx context.Context, e *runbusv1.AuditEvent, err error) error {
	defer func() { r.writers(e.GetTenant()).end(e.GetId()) }() // Record may give it its id
	if recordErr := r.d.Audit.Record(ctx, e); recordErr != nil && err == nil {
		return schemas.Wrap(schemas.CodeUnavailable, fmt.Errorf("audit %s: %w", e.GetAction(), recordErr), "the change could not be recorded in the audit log").
			WithHint("it took effect, and is recorded at the next start of the control plane at the latest; look at its present state before you try again")
	}
	if err == nil {
		r.paid(ctx, e.GetTenant(), e.GetId())
	}
	return err
}

// paid takes what the audit log has out of what is owed. If writers wait, the next one does.
func (r *Roster) paid(ctx context.Context, tenant, id string) {
	w := r.writers(tenant)
	w.recorded.Store(id, true)
	if w.waiting.Load() > 0 {
		return
	}
	err := r.change(ctx, tenant, nil, func(d *document, _ time.Time) error {
		if w.forget(d) == 0 {
			return errUnchanged
		}
		return nil
	})
	if err != nil {
		r.d.Log.Warn("that a change was recorded could not be noted; the next start finds out", "tenant", tenant, "event", id, "error", err)
	}
}

// forget takes what was recorded out of what d owes, and returns how much.
func (w *writers) forget(d *document) (n int) {
	d.Owed = slices.DeleteFunc(d.Owed, func(o debt) bool {
		_, recorded := w.recorded.Load(o.ID)
		if recorded {
			n++
		}
		return recorded
	})
	return n
}

// written takes note that d is what stands: what it does not owe need not be remembered.
func (w *writers) written(d *document) {
	w.recorded.Range(func(id, _ any) bool {
		if !slices.ContainsFunc(d.Owed, func(o debt) bool { return o.ID == id }) {
			w.recorded.Delete(id)
		}
		return true
	})
}

// payOwed records what processes before this one were killed before they had recorded. What can't be recorded now stays owed.
func (r *Roster) payOwed(ctx context.Context) {
	r.mu.RLock()
	owed := map[string][]debt{}
	for tenant, t := range r.tenants {
		if len(t.doc.Owed) > 0 {
			owed[tenant] = slices.Clone(t.doc.Owed)
		}
	}
	r.mu.RUnlock()
	for tenant, debts := range owed {
		if err := r.pay(ctx, tenant, debts); err != nil {
			r.d.Log.Error("changes of the runner registry from before this start are not in the audit log yet", "tenant", tenant, "error", err)
		}
	}
}

// mostOwed is how many events a tenant may owe when a change comes that no limit of the document holds back, and that is tried again for
// as long as the audit log takes nothing: they would fill the document, until nothing could be revoked any more.
const mostOwed = 64

// settle has the audit log take what a tenant owes, if that is much; CodeUnavailable if it does not.
func (r *Roster) settle(ctx context.Context, tenant string) error {
	if len(r.muchOwed(tenant)) == 0 {
		return nil
	}
	w := r.writers(tenant)
	var err error
	select {
	case w.settling <- struct{}{}: // two at a time would record everything twice
		err = r.pay(ctx, tenant, r.muchOwed(tenant))
		<-w.settling
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		return schemas.Wrap(schemas.CodeUnavailable, err, "too many changes of the runner registry wait for the audit log").
			WithHint("nothing was changed; try again when /readyz is ready")
	}
	return nil
}

// muchOwed is what a tenant owes, nothing if that is less than mostOwed.
func (r *Roster) muchOwed(tenant string) []debt {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if t := r.tenants[tenant]; t != nil && len(t.doc.Owed) >= mostOwed {
		return slices.Clone(t.doc.Owed)
	}
	return nil
}

// pay has the audit log take each of debts that it does not have. What another goroutine is about to record is left to it, and waited for. One
// goroutine at a time pays a tenant's.
func (r *Roster) pay(ctx context.Context, tenant string, debts []debt) error {
	for _, o := range debts {
		e := new(runbusv1.AuditEvent)
		if err := proto.Unmarshal(o.Event, e); err != nil {
			return fmt.Errorf("event %s: %w", o.ID, err)
		}
		if err := r.writers(tenant).await(ctx, o.ID); err != nil {
			return fmt.Errorf("event %s: %w", o.ID, err)
		}
		has, err := r.d.Audit.Has(ctx, o.ID, e.GetAt().AsTime())
		if err != nil {
			return err
		}
		if !has {
			if err := r.d.Audit.Record(ctx, e); err != nil {
				return err
			}
			r.d.Log.Info("a change from before this start was recorded", "tenant", tenant, "action", e.GetAction(), "subject", e.GetSubject())
		}
		r.paid(ctx, tenant, o.ID)
	}
	return nil
}
