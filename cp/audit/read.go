package audit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	listDefault = 100
	listMost    = 1000
	listFirst   = 4  // batches that List reads first, backwards
	listWindow  = 64 // …and twice as many each time, up to these
)

// List are the last events of one tenant, newest last: at most limit, of which zero or less means 100 and more than 1,000
// means 1,000. Events of the platform have no tenant and are not listed; tenant must not be empty. A damaged batch is
// logged and left out: Verify is what judges it.
func (l *Log) List(ctx context.Context, tenant string, limit int) ([]*runbusv1.AuditEvent, error) {
	if err := schemas.ValidTenant(tenant); err != nil {
		return nil, err
	}
	if limit <= 0 {
		limit = listDefault
	}
	limit = min(limit, listMost)
	last, _, err := l.store.LastAudit(ctx)
	if err != nil {
		return nil, unreadable(err)
	}
	var found []*runbusv1.AuditEvent
	for to, n := last, uint64(listFirst); to > 0 && len(found) < limit; to, n = to-min(to, n), min(2*n, listWindow) {
		wanted := limit - len(found)
		var window []*runbusv1.AuditEvent
		err := l.readTo(ctx, to, n, func(e *runbusv1.AuditEvent) {
			if e.GetTenant() != tenant {
				return
			}
			if len(window) >= 2*wanted { // packed, the window may have 65,536 of which one is wanted
				window = slices.Delete(window, 0, len(window)-wanted)
			}
			window = append(window, e)
		})
		if err != nil {
			return nil, err
		}
		found = slices.Concat(window[max(0, len(window)-wanted):], found)
	}
	return found, nil
}

// Has reports whether the log has the event of this id, which happened at that time. It reads backwards as far as that takes.
func (l *Log) Has(ctx context.Context, id string, at time.Time) (bool, error) {
	last, _, err := l.store.LastAudit(ctx)
	if err != nil {
		return false, unreadable(err)
	}
	for to := last; to > 0; to -= min(to, listWindow) {
		found, older := false, true
		err := l.readTo(ctx, to, listWindow, func(e *runbusv1.AuditEvent) {
			found = found || e.GetId() == id
			older = older && e.GetAt().AsTime().Before(at.Add(-hasSlack))
		})
		if err != nil || found || older {
			return found, err
		}
	}
	return false, nil
}

// hasSlack is more than events of one time are apart in the log.
const hasSlack = time.Minute

// readTo gives each the events of the last n batches up to that number, oldest first.
func (l *Log) readTo(ctx context.Context, to, n uint64, each func(*runbusv1.AuditEvent)) error {
	err := l.store.ReadAudit(ctx, to-min(to, n)+1, func(seq uint64, body []byte) error {
		if seq > to {
			return errEnough
		}
		batch, err := decodeBatch(body)
		if err != nil {
			l.log.Error("a damaged audit batch is left out", "number", seq, "error", err)
			return nil
		}
		for _, e := range batch.GetEvents() {
			each(e)
		}
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		return unreadable(err)
	}
	return nil
}

var errEnough = errors.New("enough is read")

func unreadable(cause error) error {
	return schemas.Wrap(schemas.CodeUnavailable, cause, "the audit log can't be read now").
		WithHint("try again when /readyz is ready")
}

// Verify walks the whole chain and returns how many batches hold. An *BrokenError says at which batch it breaks: one was
// changed, removed (the last one too), inserted or moved, or what this replica wrote or saw is not there any more. Any
// other error says that the stream could not be read.
func (l *Log) Verify(ctx context.Context) (batches uint64, err error) {
	known, _ := l.end()
	last, _, err := l.store.LastAudit(ctx)
	if errors.Is(err, jetstream.ErrNotFound) {
		return 0, &BrokenError{Number: last, Why: "it is the last one and was removed"}
	}
	if err != nil {
		return 0, fmt.Errorf("verify the audit log: %w", err)
	}
	c := chain{}
	err = l.store.ReadAudit(ctx, 1, func(seq uint64, body []byte) error {
		if _, err := c.next(seq, body); err != nil {
			return err
		}
		if c.number == known.number && c.sum != known.sum {
			return &BrokenError{Number: c.number, Why: "it is not what was written there"}
		}
		return nil
	})
	if err != nil {
		var broken *BrokenError
		if errors.As(err, &broken) {
			return c.number, err
		}
		return c.number, fmt.Errorf("verify the audit log: %w", err)
	}
	if end := max(last, known.number); c.number < end {
		return c.number, &BrokenError{Number: c.number + 1, Why: fmt.Sprintf("the stream ends before batch %d", end)}
	}
	return c.number, nil
}
