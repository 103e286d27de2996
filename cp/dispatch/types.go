package dispatch

import (
	"time"

	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/trace"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Limits of one fetch (SPEC D15). What a caller leaves at zero becomes the ceiling; what is above is lowered to it.
const (
	MaxRows  = 10_000_000
	MaxBytes = 4 << 30 // Arrow bytes before compression
)

// Request is one fetch as its caller asks for it.
type Request struct {
	// Caller must be WRITER or better of a tenant.
	Caller auth.Principal
	// Runner is the id or the name of a runner of the caller's tenant; empty is refused (SPEC D3).
	Runner string
	// Fetch needs a source; its limits may be zero. It is not changed, and may not be while the fetch runs.
	Fetch *runbusv1.RunFetchRequest
	// Secrets are sealed to the runner after it accepted; empty: none are sent.
	Secrets map[string]string
	// Timeout bounds the whole fetch. Zero, or more than Deps.Timeout, means Deps.Timeout.
	Timeout time.Duration
	// Phases asks for Outcome.Phases.
	Phases bool
}

// Sink takes what a fetch yields while it runs. Its methods, but Abandon, are called from one goroutine at a time, never after
// Fetch returned. An error means that the caller has gone: the fetch is cancelled. A method must return soon after Fetch's ctx
// ended or Abandon was called.
type Sink interface {
	Accepted(Accepted) error
	// Progress is told how far the fetch is. The update is only lent, until the method returns.
	Progress(*runbusv1.RunFetchUpdate) error
	// Chunk takes the next piece of the Arrow IPC stream. The bytes are only lent, until it returns, and stay what they are until then,
	// also when the fetch has been abandoned. While it blocks, the runner is held back.
	Chunk(arrowIPC []byte) error
	// Abandon tells that the fetch has ended (deadline, cancel, loss) while another method is being called, or is just about to be: a
	// caller who takes nothing must not hold the dispatch. It is called at most once, from another goroutine, and must not block. No
	// further method is called.
	Abandon()
}

// Accepted tells that the runner took the work.
type Accepted struct {
	DispatchID string    `json:"dispatchId"`
	Tenant     string    `json:"tenantId"`
	RunnerID   string    `json:"runnerId"` // plain
	RunnerPID  int64     `json:"runnerPid"`
	At         time.Time `json:"at"`
}

// The values of Outcome.Code.
const (
	OutcomeCompleted  = "completed"
	OutcomeRefused    = "refused"         // nothing was run, nothing was read
	OutcomeFailed     = "failed"          // the source, the runner or the platform failed
	OutcomeCancelled  = "cancelled"       // stopped on request; the runner confirmed
	OutcomeDeadline   = "deadline"        // out of time; the runner confirmed that it stopped
	OutcomeRunnerLost = "runner_lost"     // the runner died (SPEC D13)
	OutcomeUnknown    = "outcome_unknown" // the runner may still run it (SPEC D4)
)

// Outcome is how a fetch ended.
type Outcome struct {
	DispatchID string
	RunnerID   string         // plain; empty when none was chosen
	Code       string         // one of Outcome…
	Err        *schemas.Error // nil exactly when completed
	// Response is the runner's own account of a completed fetch, else nil.
	Response *runbusv1.RunFetchResponse
	// Notices are those of the response and those of the control plane (SPEC D10).
	Notices []*runbusv1.Notice
	Phases  []PhaseAt // nil unless they were asked for
}

// The phases of the timeline that the control plane itself sees (SPEC D17). `connecting` and `querying` are the runner's.
const (
	PhaseQueued      = trace.PhaseQueued
	PhaseAssigned    = trace.PhaseAssigned
	PhaseAccepted    = trace.PhaseAccepted
	PhaseCredentials = trace.PhaseCredentials
	PhaseConnecting  = trace.PhaseConnecting
	PhaseQuerying    = trace.PhaseQuerying
	PhaseFirstRow    = trace.PhaseFirstRow
	PhaseCancelling  = trace.PhaseCancelling
	PhaseDone        = trace.PhaseDone
)

// PhaseAt is one step of a dispatch's timeline, in control-plane time. The last one is named by the outcome.
type PhaseAt = trace.Step

// Running is one dispatch that runs on this replica.
type Running struct {
	DispatchID string    `json:"dispatchId"`
	RunnerID   string    `json:"runnerId"`
	Person     string    `json:"person"`
	Source     string    `json:"source"` // kind
	Phase      string    `json:"phase"`
	Rows       int64     `json:"rows"`
	Bytes      int64     `json:"bytes"`
	StartedAt  time.Time `json:"startedAt"`
	Deadline   time.Time `json:"deadline"`
}
