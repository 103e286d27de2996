package dispatch

import (
	"context"
	"errors"
	"strings"

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

// managedHint is the hint of an error of the managed runner in the words of its operator: the runner's own names variables of a runner,
// which the control plane sets from others.
func managedHint(err *schemas.Error) string {
	const own = "MANAGED_"
	switch {
	case strings.Contains(err.Hint, own):
	case err.Code == schemas.CodeForbidden && strings.Contains(err.Hint, "RUNNER_FILE_ROOTS"):
		return "the operator of the control plane lists the folders, for the tenant local alone: `--files` of `runink up`, or MANAGED_RUNNER_FILE_ROOTS"
	case strings.Contains(err.Hint, "RUNNER_POLICY"):
		return "the operator of the control plane decides this: `--managed-policy` of `runink up`, or MANAGED_RUNNER_POLICY; without it the built-in rules of a shared control plane hold"
	case strings.Contains(err.Hint, "RUNNER_CONCURRENCY"):
		return strings.Replace(err.Hint, "RUNNER_CONCURRENCY on the runner", "MANAGED_RUNNER_CONCURRENCY on the control plane", 1)
	case strings.Contains(err.Hint, "RUNNER_FILE_ROOTS"):
		return strings.Replace(err.Hint, "RUNNER_FILE_ROOTS", own+"RUNNER_FILE_ROOTS (`runink up`: --files)", 1)
	}
	return err.Hint
}
