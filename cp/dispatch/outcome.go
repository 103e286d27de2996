package dispatch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// ending is how a run ended, before it is made an Outcome.
type ending struct {
	code     string
	err      *schemas.Error
	response *runbusv1.RunFetchResponse
}

func ended(e ending) *ending { return &e }

// refusal ends a run of which nothing was read and nothing was run.
func refusal(err error) ending { return ending{code: OutcomeRefused, err: asError(err)} }

// failure ends a run that something went wrong in.
func failure(err error) ending { return ending{code: OutcomeFailed, err: asError(err)} }

// lostEnding ends a run whose runner died (SPEC D13).
func lostEnding(run *run, why string) ending {
	return ending{code: OutcomeRunnerLost, err: schemas.ErrRunnerLost(run.runner.Ref.Runner, why)}
}

func errStreamEnded(cause error) *schemas.Error {
	return schemas.Wrap(schemas.CodeFailed, cause, "the control plane stopped waiting for the runner").
		WithHint("look at the runner's log before you start it again")
}

func isNoResponders(err error) bool { return errors.Is(err, bus.ErrNoResponders) }

// asError is err as what a caller may see.
func asError(err error) *schemas.Error {
	var e *schemas.Error
	if errors.As(err, &e) {
		return e
	}
	return schemas.Wrap(schemas.CodeFailed, err, "internal error; the log of the control plane has the cause")
}

// intact compares the checksum of what was relayed with the runner's. Of a longer stream one that knows no XXH3 tells a checksum that was
// not computed here: what stands behind the first MiB is then taken as it came, whole and in order.
func intact(relayed *bus.Digest, result *runbusv1.RunnerWorkResult) bool {
	rest := relayed.XXH3()
	if relayed.Scheme == bus.SchemeHead && rest != nil && len(result.GetRestXxh3()) == 0 {
		return true
	}
	return bytes.Equal(relayed.SHA256(), result.GetStreamSha256()) && bytes.Equal(rest, result.GetRestXxh3())
}

// resultEnding judges a runner's result. relayed tells that what came before it was, so that it may be a response.
func (d *Dispatcher) resultEnding(run *run, result *runbusv1.RunnerWorkResult, relayed bool) ending {
	id := run.runner.Ref.Runner
	if response := result.GetResponse(); response != nil {
		if !relayed {
			return failure(schemas.Errorf(schemas.CodeFailed, "runner %q sent a result before it accepted the work", id))
		}
		if !intact(&run.sum, result) {
			return failure(schemas.Errorf(schemas.CodeFailed, "the result of runner %q arrived damaged: its checksum differs", id))
		}
		response.Rows, response.Bytes = run.credible(response.GetRows(), response.GetBytes())
		response.WireBytes = run.wire
		run.count(response.GetRows(), response.GetBytes())
		return ending{code: OutcomeCompleted, response: response}
	}
	if result.GetError() == nil {
		return failure(schemas.Errorf(schemas.CodeFailed, "runner %q sent a result that is neither a response nor an error", id))
	}
	err := runnersError(result.GetError())
	switch {
	case !result.GetStarted():
		return refusal(err)
	case err.Code == schemas.CodeCancelled:
		return ending{code: OutcomeCancelled, err: err}
	case err.Code == schemas.CodeDeadline:
		return ending{code: OutcomeDeadline, err: err}
	case err.Code == schemas.CodeRunnerLost: // its last words
		return ending{code: OutcomeRunnerLost, err: err}
	}
	return failure(err)
}

// What is kept of a runner's own words, in bytes: they go into the audit, into logs and into HTTP trailers.
const (
	maxRunnerMessage = 8 << 10
	maxRunnerHint    = 1 << 10
)

// runnersError is the error of a result. It is foreign text: it is bounded, and a code that isn't one of ours, or speaks for the
// caller's credential, is CodeFailed.
func runnersError(d *runbusv1.ErrorDetail) *schemas.Error {
	code := schemas.Code(d.GetCode())
	if !known[d.GetCode()] || code == schemas.CodeUnauthorized {
		code = schemas.CodeFailed
	}
	return &schemas.Error{Code: code, Message: clip(d.GetMessage(), maxRunnerMessage), Hint: clip(d.GetHint(), maxRunnerHint)}
}

// clip shortens foreign text to about most bytes.
func clip(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// finish makes the Outcome of a run, and records and counts it.
func (d *Dispatcher) finish(run *run, end ending) Outcome {
	by := run.here
	if end.code == OutcomeCompleted {
		by = run.there
	}
	run.end(end.code, by)
	o := Outcome{
		DispatchID: run.id, RunnerID: run.runner.Ref.Runner, Code: end.code, Err: end.err, Response: end.response,
		Notices: end.response.GetNotices(),
	}
	if d.d.Isolation && unreachable(end.err) {
		o.Err = isolated(run, end.err)
		o.Notices = append(o.Notices, &runbusv1.Notice{
			Code: runbusv1.NoticeCode_NOTICE_CODE_RUNNER_ISOLATION, Message: o.Err.Message,
		})
	}
	run.completed = end.code == OutcomeCompleted
	phases := run.conclude(&o)
	if run.phased {
		o.Phases = phases
		if o.Phases == nil {
			o.Phases = slices.Clone(run.phases) // nothing is added any more
		}
	}
	d.record(run, &o)
	d.metrics.count(run, &o)
	return o
}

// unreachable reports whether err says that the runner could not be given the work because it can't be reached.
func unreachable(err *schemas.Error) bool {
	return err != nil && (err.Code == schemas.CodeRunnerOffline || errors.Is(err, schemas.ErrRegistryUnavailable(nil)))
}

// isolated is the text of REQUIRE_RUNNER_ISOLATION around err (SPEC D10). The code stays.
func isolated(run *run, err *schemas.Error) *schemas.Error {
	return &schemas.Error{
		Code: err.Code, Hint: err.Hint, Cause: err,
		Message: fmt.Sprintf("%s: runner isolation enforced but runner unreachable — refusing control-plane execution for %s fetch %s",
			err.Message, run.kind, run.id),
	}
}

// begun sees to it that the audit tells that a runner accepted a dispatch. One that ends soon tells it with its end; of one that does not,
// the minder notes the start, before it is due to be written, or the audit's end does. A dispatch that reads a credential is made durable by
// the record of that, which comes behind its start in the same log.
func (d *Dispatcher) begun(run *run) {
	if len(run.secrets) > 0 {
		run.mu.Lock()
		defer run.mu.Unlock()
		d.noteStart(run)
		return
	}
	run.unsaid.Store(d.ticks.Load())
	if d.hasty.Load() {
		d.tellStart(run)
	}
}

// noteStart audits that a runner accepted a dispatch; if it ends before that is written, its end tells it. run.mu is held.
func (d *Dispatcher) noteStart(run *run) {
	details := [...]audit.Detail{{Name: "chosen", Value: chosen}, {Name: "runner", Value: run.runner.Ref.Runner}, run.source()}
	brief := run.brief("dispatch.start", "ok", run.acceptedAt, details[:])
	d.d.Audit.Begin(&run.opening, &brief)
}

// chosen is how the runner of a fetch is chosen (SPEC D8).
const chosen = "for this action"

// record audits the end of a run. Only one that read a credential is waited for (SPEC R8).
func (d *Dispatcher) record(run *run, o *Outcome) {
	outcome, runner := "ok", o.RunnerID
	if runner == "" && schemas.ValidRunnerID(run.named) == nil {
		runner = run.named
	}
	details := run.details[:0]                                 // in the order of their names
	accepted, rows, bytes := run.accepted, run.rows, run.bytes // nobody writes them any more
	if accepted {
		details = append(details, audit.Int("bytes", bytes), audit.Detail{Name: "chosen", Value: chosen})
	}
	details = append(details, audit.Detail{Name: "outcome", Value: o.Code})
	if accepted {
		details = append(details, audit.Took("ran", run.ended.Sub(run.acceptedAt)))
	}
	if o.Err != nil {
		outcome = string(o.Err.Code)
		details = append(details, audit.Detail{Name: "reason", Value: o.Err.Message})
		d.d.Log.Info("fetch ended", "dispatch", run.id, "tenant", run.caller.Tenant, "runner", o.RunnerID,
			"outcome", o.Code, "code", o.Err.Code, "error", o.Err.Message, "cause", o.Err.Cause)
	}
	if accepted {
		details = append(details, audit.Int("rows", rows))
	}
	if runner != "" {
		details = append(details, audit.Detail{Name: "runner", Value: runner})
	}
	action := "dispatch.end"
	if o.Code == OutcomeRefused || !accepted {
		action = "dispatch.refuse"
	}
	run.event = run.brief(action, outcome, run.ended, append(details, run.source()))
	if !run.credentialsRead {
		d.d.Audit.End(&run.opening, &run.event)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := d.d.Audit.Record(ctx, run.event.Event()); err != nil {
		d.d.Log.Error("the end of a dispatch is not in the audit log", "dispatch", run.id, "error", err)
	}
}

// brief is an audit event about the run. It holds no setting, query or secret. A last detail without a name is left out.
func (r *run) brief(action, outcome string, at time.Time, details []audit.Detail) audit.Brief {
	if last := len(details) - 1; details[last].Name == "" {
		details = details[:last]
	}
	return audit.Brief{At: at, Tenant: r.caller.Tenant, Actor: r.actor, Action: action, Subject: r.subject, Outcome: outcome, Details: details}
}

// source is the kind of the run's source as a detail, without a name if it is none of ours.
func (r *run) source() audit.Detail {
	if r.kind == "" || len(r.kind) > 64 {
		return audit.Detail{}
	}
	return audit.Detail{Name: "source", Value: r.kind}
}
