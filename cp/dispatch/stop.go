package dispatch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// orderAgain is the pause before a cancel order that reached nobody is sent again: the runner's link may be back by then.
const orderAgain = 100 * time.Millisecond

// verdict is what became of a work that was to be stopped.
type verdict struct {
	state  stopState
	result *runbusv1.RunnerWorkResult // stopped: the result that confirms it, if it came
	why    string                     // gone
}

// String is for a timeline.
func (v verdict) String() string {
	switch v.state {
	case neverStarted:
		return "it never started"
	case stopped:
		return "it has stopped"
	case gone:
		return "its process has gone"
	}
	return "no answer either"
}

type stopState int

const (
	unconfirmed  stopState = iota // nobody knows: it may still run
	neverStarted                  // the runner will refuse it from now on
	stopped                       // it has ended
	gone                          // the runner's process has
)

// stopWork orders the runner to cancel the work and waits for what confirms it, up to ConfirmWithin, and for as long again as this process
// stood still meanwhile, mostSpared at most. What still comes of the result is dropped, so that nothing holds the runner back. The sink may be reading the chunk
// before: its bytes stay what they are.
func (d *Dispatcher) stopWork(run *run, code schemas.Code) verdict {
	run.mark(PhaseCancelling, run.here)
	stream := &run.stream
	ctx, cancel := context.WithCancel(context.Background())
	patience, stood := time.NewTimer(d.d.ConfirmWithin), d.stood.Load()
	defer patience.Stop()
	left := d.spare
	replies := make(chan runbusv1.CancelState, 1)
	ordered := make(chan struct{})
	go func() {
		defer close(ordered)
		d.orderCancel(ctx, run, code, replies)
	}()
	defer func() {
		cancel()
		<-ordered
	}()
	for {
		if a, ok := stream.take(); ok {
			if a.frame == nil {
				continue // the order finds out by itself whether anybody is there
			}
			stream.receiver.Done(a.frame)
			if result, ok := a.frame.(*runbusv1.RunnerWorkResult); ok {
				return verdict{state: stopped, result: result}
			}
			continue
		}
		if why, lost := run.watch.Lost(); lost {
			return verdict{state: gone, why: why}
		}
		select {
		case <-stream.ready():
		case state := <-replies:
			if state == runbusv1.CancelState_CANCEL_STATE_NEVER_STARTED {
				return verdict{state: neverStarted}
			}
			// Stopping or ended: its result confirms it.
		case <-patience.C:
			more := min(d.stoodSince(stood), left)
			if more <= 0 {
				return verdict{state: unconfirmed}
			}
			stood, left = stood+more, left-more
			patience.Reset(time.Duration(more))
		}
	}
}

// orderCancel sends the cancel order until somebody answers it, and passes the runner's answer on. Cancelling twice is the same
// as once, so sending it again is safe.
func (d *Dispatcher) orderCancel(ctx context.Context, run *run, code schemas.Code, replies chan<- runbusv1.CancelState) {
	ref, session := run.runner.Ref, run.runner.Session
	for {
		order := &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Cancel{
			Cancel: &runbusv1.CancelOrder{DispatchId: run.id, Code: string(code)},
		}}
		reply, err := d.receivers.Order(ctx, ref, session, order)
		d.copyForOps(schemas.ControlSubject(ref, session), order)
		if err == nil {
			replies <- reply.GetCancelState()
			return
		}
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			continue
		}
		if !errors.Is(err, bus.ErrNoResponders) {
			if ctx.Err() == nil {
				d.d.Log.Warn("cancel order not answered", "dispatch", run.id, "runner", ref.Runner, "error", err)
			}
			return
		}
		select {
		case <-time.After(orderAgain):
		case <-ctx.Done():
			return
		}
	}
}

func errCancelled() *schemas.Error {
	return schemas.Errorf(schemas.CodeCancelled, "the fetch was cancelled")
}

// cancelled ends a run because its caller asked for it or has gone (SPEC D12).
func (d *Dispatcher) cancelled(run *run) ending {
	switch v := d.stopWork(run, schemas.CodeCancelled); v.state {
	case neverStarted, stopped:
		return ending{code: OutcomeCancelled, err: errCancelled()}
	case gone:
		return lostEnding(run, v.why)
	default:
		run.blame(fmt.Sprintf("the runner confirmed no cancel for at least %s", d.d.ConfirmWithin))
		return ending{code: OutcomeUnknown, err: schemas.ErrOutcomeUnknown(run.runner.Ref.Runner, d.d.ConfirmWithin)}
	}
}

// outOfTime ends a run at its deadline (SPEC D4).
func (d *Dispatcher) outOfTime(run *run) ending {
	switch v := d.stopWork(run, schemas.CodeDeadline); v.state {
	case neverStarted, stopped:
		return ending{code: OutcomeDeadline, err: schemas.Errorf(schemas.CodeDeadline,
			"runner %q did not finish within %s and was stopped", run.runner.Ref.Runner, run.timeout).WithHint("ask for less, or for more time")}
	case gone:
		return lostEnding(run, v.why)
	default:
		run.blame(fmt.Sprintf("no result within %s, and the runner confirmed no cancel for at least %s", run.timeout, d.d.ConfirmWithin))
		return ending{code: OutcomeUnknown, err: schemas.ErrOutcomeUnknown(run.runner.Ref.Runner, run.timeout)}
	}
}

// notAccepted ends a run whose runner did not accept in time. Only the runner's own word that it never started makes it a
// refusal.
func (d *Dispatcher) notAccepted(run *run, within time.Duration) ending {
	id := run.runner.Ref.Runner
	v := d.stopWork(run, schemas.CodeCancelled)
	run.blame(fmt.Sprintf("no answer from the runner within %s; to the cancel: %s", within, v))
	switch v.state {
	case neverStarted:
		return refusal(schemas.ErrRunnerOffline(id, "no answer"))
	case stopped:
		if v.result != nil && !v.result.GetStarted() {
			return d.resultEnding(run, v.result, false)
		}
		return failure(schemas.ErrRunnerOffline(id, "it accepted the work too late, and was stopped"))
	case gone:
		return lostEnding(run, v.why)
	default:
		return ending{code: OutcomeUnknown, err: schemas.Errorf(schemas.CodeOutcomeUnknown,
			"runner %q was sent the work, has not accepted it within %s and does not answer — it may be running there", id, within).
			WithHint("look at the runner's log before you start it again")}
	}
}
