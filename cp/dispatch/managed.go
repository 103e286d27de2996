package dispatch

import (
	"context"
	"errors"

	"github.com/org-runink/runbus/schemas"
)

// raise has the managed runner of the caller's tenant up until release is called, or says how the dispatch ended because it can't be.
func (d *Dispatcher) raise(ctx context.Context, run *run) (release func(), end *ending) {
	if err := d.d.Registry.Readable(); err != nil { // nothing could be known of it
		return nil, ended(failure(err))
	}
	within, cancel := context.WithDeadline(ctx, run.deadline)
	defer cancel()
	release, err := d.d.Managed(within, run.caller.Tenant)
	switch {
	case err == nil:
		return release, nil
	case run.unwanted() || ctx.Err() != nil:
		return nil, ended(ending{code: OutcomeCancelled, err: errCancelled()})
	case within.Err() != nil:
		err = errors.New("it is not up within the time of the fetch")
	}
	return nil, ended(refusal(schemas.ErrManagedUnreachable(err.Error())))
}
