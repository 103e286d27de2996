// Package trace is the flight recorder of dispatches (SPEC D17): the timeline of each, kept for a day in the stream RUNBUS_TRACE.
// What is recorded is written in batches, beside the dispatches and never in their way: a timeline may be lost, a dispatch is
// not held up or failed by it.
package trace

import (
	"time"
)

// The steps that a timeline may have, in the order in which they come. The last is one of those below `done`.
const (
	PhaseQueued      = "queued"      // the request is taken
	PhaseAssigned    = "assigned"    // the assignment was published
	PhaseAccepted    = "accepted"    // the runner has a slot for it
	PhaseCredentials = "credentials" // sealed credentials were sent
	PhaseConnecting  = "connecting"  // the runner connects to the source
	PhaseQuerying    = "querying"    // the source works
	PhaseFirstRow    = "first row"   // the first rows arrived
	PhaseLastRow     = "last row"    // the last rows arrived
	PhaseCancelling  = "cancelling"  // the runner was ordered to stop
	PhaseDone        = "done"        // the end of a fetch that completed

	// The ends of the others, by outcome.
	PhaseRefused   = "refused"
	PhaseFailed    = "failed"
	PhaseCancelled = "cancelled"
	PhaseDeadline  = "deadline"
	PhaseLost      = "lost"
	PhaseUnknown   = "unknown"
)

// order is how a fetch goes that completes.
var order = []string{
	PhaseQueued, PhaseAssigned, PhaseAccepted, PhaseCredentials, PhaseConnecting, PhaseQuerying, PhaseFirstRow, PhaseLastRow, PhaseDone,
}

// optional are steps that may be left out: the one behind is what comes next then.
var optional = map[string]bool{PhaseCredentials: true}

// The values of Timeline.State and of Timeline.Outcome that are this package's own; the other outcomes are those of dispatch.
const (
	StateRunning = "running"
	StateEnded   = "ended"

	outcomeUnknown = "outcome_unknown"
)

// Step is one step of a timeline, in control-plane time.
type Step struct {
	Phase string    `json:"phase" example:"accepted"`
	At    time.Time `json:"at"`
	By    string    `json:"by" doc:"Who saw or did it: replica:<id> or runner:<id>"`
	Note  string    `json:"note,omitempty" doc:"What is of interest about the step, such as that it was tried again"`
}

// Hop is the way from one step to the next.
type Hop struct {
	From string `json:"from" example:"assigned"`
	To   string `json:"to" example:"accepted"`
	Why  string `json:"why" example:"no answer from the runner within 2s"`
}

// Timeline is all that is kept of one dispatch. It holds no setting, query, row or secret.
type Timeline struct {
	DispatchID string `json:"dispatchId"`
	Tenant     string `json:"tenantId"`
	RunnerID   string `json:"runnerId" doc:"The runner that was chosen; as the caller named it where none was"`
	RunnerPID  int64  `json:"runnerPid,omitempty" doc:"Process that accepted, as it says"`
	Person     string `json:"person"`
	Source     string `json:"source" doc:"Kind of the source"`
	State      string `json:"state" enum:"running,ended"`
	Outcome    string `json:"outcome,omitempty" doc:"completed, refused, failed, cancelled, deadline, runner_lost or outcome_unknown; empty while it runs"`
	Code       string `json:"code,omitempty" doc:"Code of the error"`
	Message    string `json:"message,omitempty"`
	Hint       string `json:"hint,omitempty"`
	Replica    string `json:"replica" doc:"Boot of the control plane that ran the dispatch"`
	Session    string `json:"session,omitempty" doc:"Session of the runner that got the work"`
	Link       string `json:"link,omitempty" doc:"How the runner is linked" example:"outbound"`
	TraceID    string `json:"traceId,omitempty" doc:"W3C trace id, if the caller sent one or the control plane traces"`

	Rows  int64 `json:"rows"`
	Bytes int64 `json:"bytes"`

	StartedAt time.Time  `json:"startedAt"`
	EndedAt   *time.Time `json:"endedAt,omitempty"`
	Deadline  time.Time  `json:"deadline"`
	Phases    []Step     `json:"phases"`
	// Stopped is the hop on which a dispatch that did not complete stopped.
	Stopped *Hop `json:"stopped,omitempty" doc:"The hop on which a dispatch that did not complete stopped, and why"`
}

// EndPhase is the last step of a dispatch with this outcome.
func EndPhase(outcome string) string {
	switch outcome {
	case "completed":
		return PhaseDone
	case "runner_lost":
		return PhaseLost
	case outcomeUnknown:
		return PhaseUnknown
	}
	return outcome // refused, failed, cancelled, deadline
}

// StoppedAt is the hop that a dispatch with these steps, the end not among them, did not get over.
func StoppedAt(steps []Step, why string) *Hop {
	last := 0
	for _, s := range steps {
		for i, phase := range order {
			if s.Phase == phase {
				last = max(last, i)
			}
		}
	}
	next := min(last+1, len(order)-1)
	if optional[order[next]] {
		next++
	}
	return &Hop{From: order[last], To: order[next], Why: why}
}

// cutOff is t of a replica that has stopped recording while the dispatch ran: nobody knows how it ended.
func cutOff(t Timeline, at time.Time) Timeline {
	const why = "the replica of the control plane that waited has gone"
	t.State, t.Outcome, t.Code = StateEnded, outcomeUnknown, outcomeUnknown
	t.Message = why + ": the run may have gone on at the runner"
	t.Hint = "look at the runner's log before you start it again"
	t.EndedAt = &at
	t.Stopped = StoppedAt(t.Phases, why)
	t.Phases = append(t.Phases[:len(t.Phases):len(t.Phases)], Step{Phase: PhaseUnknown, At: at, By: "replica:" + t.Replica, Note: "last seen then"})
	return t
}
