package dispatch

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	// A 503 proves that nobody received the assignment. When the runner's link or session is younger than young, its interest
	// may only not have reached this server: the same assignment is published again every again, for at most againFor.
	young    = 2 * time.Second
	again    = 10 * time.Millisecond
	againFor = 500 * time.Millisecond

	window = bus.MaxWindow
)

// Fetch runs one fetch to its end (SPEC D1). id is the dispatch id, a ULID; empty makes a new one. Everything that goes wrong
// is in the Outcome. The end of ctx cancels the fetch at its runner.
//
// The work is handed out at most once: nothing is queued, and nothing is sent again that might have been delivered.
func (d *Dispatcher) Fetch(ctx context.Context, req Request, id string, sink Sink) Outcome {
	run, err := d.newRun(req, id)
	ctx = d.observe(ctx, run)
	run.gone = ctx.Done()
	if err != nil {
		return d.finish(run, refusal(err))
	}
	if err := d.enter(run, id != ""); err != nil {
		return d.finish(run, refusal(err))
	}
	defer d.leave(run)
	d.d.Audit.Hold(ctx)
	return d.finish(run, d.through(ctx, run, sink))
}

// through takes a run through its steps and returns how it ended.
func (d *Dispatcher) through(ctx context.Context, run *run, sink Sink) ending {
	if run.named == schemas.ConsoleRunner && d.d.Managed != nil {
		release, end := d.raise(ctx, run)
		if end != nil {
			return *end
		}
		defer release()
	}

	// Select. A refusal reads no credential and reaches nobody.
	d.d.Registry.AwaitHandover(ctx, run.caller.Tenant, run.named)
	runners, err := d.d.Registry.Named(run.caller.Tenant, run.named)
	if err != nil {
		return failure(err)
	}
	runner, err := Select(runners, run.named)
	run.assignTo(runner)
	if err != nil {
		return refusal(err)
	}

	// Register the waiter, before anybody can answer.
	d.open(run)
	defer d.shut(run)

	// Publish the assignment; the runner reserves a slot and accepts, or refuses.
	if end := d.assign(run); end != nil {
		return *end
	}

	// Read and seal the credentials, if any: only now that they will be used.
	if len(run.secrets) > 0 {
		if err := d.sendCredentials(ctx, run); err != nil {
			end := d.cancelled(run)
			if ctx.Err() == nil && end.code != OutcomeRunnerLost {
				end = failure(err) // the cancel is ours: without credentials the runner gives the work up by itself too
			}
			return end
		}
	}

	// Relay until the result, the deadline, a cancel or the loss of the runner.
	return d.relay(run, sink)
}

// assign publishes the assignment and waits for the runner's word. It returns nil when the runner accepted, else how the dispatch
// ended.
func (d *Dispatcher) assign(run *run) *ending {
	if run.unwanted() {
		return ended(ending{code: OutcomeCancelled, err: errCancelled()})
	}
	run.stood = d.stood.Load() // first: a standstill from here on is spared
	published := d.d.Now()
	within := min(d.d.AcceptWithin, run.timeout)
	run.dueAt(d.clockAt(published) + int64(within))
	if end := d.publish(run, published.Add(within)); end != nil {
		return end
	}
	run.assignedAt = published
	run.reach(PhaseAssigned, run.here, published)

	var retry <-chan time.Time
	for {
		if a, ok := run.stream.take(); ok {
			switch f := a.frame.(type) {
			case *runbusv1.RunnerWorkAccepted:
				at := d.d.Now()
				run.accept(f.GetPid(), at)
				if run.runner.Unheard {
					d.d.Registry.Heard(run.runner.Ref, run.runner.Session)
				}
				run.stream.receiver.Done(f)
				d.begun(run)
				return nil
			case *runbusv1.RunnerWorkResult:
				return ended(d.resultEnding(run, f, false))
			}
			switch {
			case errors.Is(a.err, bus.ErrNoResponders) && d.mayPublishAgain(run, published):
				retry = time.After(again)
			case errors.Is(a.err, bus.ErrNoResponders):
				d.d.Registry.NobodyHeard(run.runner.Ref, run.runner.Session)
				run.blame("no responders: nobody listens on the work subject of the runner's session")
				return ended(refusal(schemas.ErrRunnerOffline(run.runner.Ref.Runner, "not connected")))
			case a.err != nil:
				return ended(failure(schemas.Wrap(schemas.CodeFailed, a.err, "the control plane stopped waiting for the runner")))
			default:
				d.stopWork(run, schemas.CodeCancelled)
				return ended(failure(schemas.Errorf(schemas.CodeFailed, "runner %q sent a result before it accepted the work", run.runner.Ref.Runner)))
			}
			continue
		}
		if end := d.overtaken(run); end != nil {
			return end
		}
		if retry == nil { // the usual case
			<-run.stream.ready()
			continue
		}
		select {
		case <-run.stream.ready():
		case <-retry:
			retry = nil
			d.metrics.republished()
			run.note(PhaseAssigned, "published again: nobody had received it yet")
			if end := d.publish(run, published.Add(within)); end != nil {
				return end
			}
		}
	}
}

// publish sends the assignment to the runner's session. It returns how the dispatch ended if that failed.
func (d *Dispatcher) publish(run *run, acceptBy time.Time) *ending {
	body, err := run.assignment(acceptBy, run.stream.receiver.Window())
	if err != nil {
		return ended(refusal(schemas.Wrap(schemas.CodeInvalid, err, "the request can't be encoded")))
	}
	subject := run.runner.Work
	forOps := d.assignmentForOps(subject, body)
	err = run.stream.receiver.Assign(run.trace, run.runner.Can, body)
	if errors.Is(err, nats.ErrMaxPayload) {
		return ended(refusal(schemas.Wrap(schemas.CodeInvalid, err, "the request is too large for one message")))
	}
	if err != nil {
		return ended(failure(errNotSent(err)))
	}
	if forOps != nil {
		d.d.Copies(subject, forOps)
	}
	return nil
}

func errNotSent(cause error) *schemas.Error {
	return schemas.Wrap(schemas.CodeFailed, cause, "the work could not be sent to the runner")
}

// mayPublishAgain reports whether a 503 may only mean that the runner's interest has not spread yet.
func (d *Dispatcher) mayPublishAgain(run *run, published time.Time) bool {
	c := run.runner
	fresh := published.Sub(c.SessionAt) < young || published.Sub(c.LinkAt) < young
	return fresh && d.d.Now().Sub(published) < againFor
}
