package dispatch

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/timestamppb"

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
	if err != nil {
		return d.finish(run, refusal(err))
	}
	if err := d.enter(run); err != nil {
		return d.finish(run, refusal(err))
	}
	defer d.leave(run)

	// Select. A refusal reads no credential and reaches nobody.
	runners, err := d.d.Registry.Named(run.caller.Tenant, run.named)
	if err != nil {
		return d.finish(run, failure(err))
	}
	runner, err := Select(runners, run.named)
	run.assignTo(runner)
	if err != nil {
		return d.finish(run, refusal(err))
	}

	// Register the waiter, before anybody can answer.
	lost, forget := d.d.Registry.WatchLoss(runner.Ref, runner.Session)
	defer forget()
	stream := d.open(run, lost)
	defer stream.close()

	// Publish the assignment; the runner reserves a slot and accepts, or refuses.
	accepted, end := d.assign(ctx, run, stream)
	if end != nil {
		return d.finish(run, *end)
	}

	// Read and seal the credentials, if any: only now that they will be used.
	if len(run.secrets) > 0 {
		if err := d.sendCredentials(ctx, run); err != nil {
			end := d.cancelled(run, stream)
			if ctx.Err() == nil {
				end = failure(err) // the cancel is ours: without credentials the runner gives the work up by itself too
			}
			return d.finish(run, end)
		}
	}

	// Relay until the result, the deadline, a cancel or the loss of the runner.
	return d.finish(run, d.relay(ctx, run, stream, accepted, sink))
}

// assign publishes the assignment and waits for the runner's word. It returns the acceptance, or how the dispatch ended.
func (d *Dispatcher) assign(ctx context.Context, run *run, stream *stream) (*runbusv1.RunnerWorkAccepted, *ending) {
	if ctx.Err() != nil {
		return nil, ended(ending{code: OutcomeCancelled, err: errCancelled()})
	}
	published := d.d.Now()
	within := min(d.d.AcceptWithin, run.timeout)
	assignment := &runbusv1.RunnerWorkAssignment{
		DispatchId: run.id, Session: run.runner.Session, Request: run.fetch, Replica: run.replica,
		AcceptBy: timestamppb.New(published.Add(within)), Deadline: timestamppb.New(run.deadline),
		CredentialsFollow: len(run.secrets) > 0, WindowBytes: stream.receiver.Window(),
		Bundles: true,
	}
	publish := func() *ending {
		err := d.publish(run, schemas.WorkSubject(run.runner.Ref, run.runner.Session), stream.receiver.ReplySubject(), assignment)
		if errors.Is(err, nats.ErrMaxPayload) {
			return ended(refusal(schemas.Wrap(schemas.CodeInvalid, err, "the request is too large for one message")))
		}
		if err != nil {
			return ended(failure(schemas.Wrap(schemas.CodeFailed, err, "the work could not be sent to the runner")))
		}
		return nil
	}
	if end := publish(); end != nil {
		return nil, end
	}
	run.mark(PhaseAssigned, run.byReplica())

	timeout := time.NewTimer(within)
	defer timeout.Stop()
	var retry <-chan time.Time
	for {
		if a, ok := stream.take(); ok {
			switch f := a.frame.(type) {
			case *runbusv1.RunnerWorkAccepted:
				run.accept(f.GetPid())
				run.mark(PhaseAccepted, run.byRunner())
				if run.runner.Deaf {
					d.d.Registry.Heard(run.runner.Ref, run.runner.Session)
				}
				stream.receiver.Done(f)
				d.noteStart(run)
				return f, nil
			case *runbusv1.RunnerWorkResult:
				stream.receiver.Done(f)
				return nil, ended(d.resultEnding(run, f, nil))
			}
			switch {
			case errors.Is(a.err, bus.ErrNoResponders) && d.mayPublishAgain(run, published):
				retry = time.After(again)
			case errors.Is(a.err, bus.ErrNoResponders):
				d.d.Registry.NobodyHeard(run.runner.Ref, run.runner.Session)
				run.blame("no responders: nobody listens on the work subject of the runner's session")
				return nil, ended(refusal(schemas.ErrRunnerOffline(run.runner.Ref.Runner, "not connected")))
			case a.err != nil:
				return nil, ended(failure(schemas.Wrap(schemas.CodeFailed, a.err, "the control plane stopped waiting for the runner")))
			default:
				d.stopWork(run, stream, schemas.CodeCancelled)
				return nil, ended(failure(schemas.Errorf(schemas.CodeFailed, "runner %q sent a result before it accepted the work", run.runner.Ref.Runner)))
			}
			continue
		}
		select {
		case <-stream.ready():
		case <-retry:
			retry = nil
			d.metrics.again.Inc()
			run.note(PhaseAssigned, "published again: nobody had received it yet")
			if end := publish(); end != nil {
				return nil, end
			}
		case <-timeout.C:
			return nil, ended(d.notAccepted(run, stream, within))
		case why := <-stream.lost:
			return nil, ended(lostEnding(run, why))
		case <-ctx.Done():
			return nil, ended(d.cancelled(run, stream))
		case <-run.cancelled:
			return nil, ended(d.cancelled(run, stream))
		}
	}
}

// mayPublishAgain reports whether a 503 may only mean that the runner's interest has not spread yet.
func (d *Dispatcher) mayPublishAgain(run *run, published time.Time) bool {
	c := run.runner
	fresh := published.Sub(c.SessionAt) < young || published.Sub(c.LinkAt) < young
	return fresh && d.d.Now().Sub(published) < againFor
}
