package dispatch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash"
	"strconv"
	"strings"
	"time"

	"github.com/org-runink/runbus/bus"
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

// resultEnding judges a runner's result. sum is over the chunks that were relayed; nil when none could be.
func (d *Dispatcher) resultEnding(run *run, result *runbusv1.RunnerWorkResult, sum hash.Hash) ending {
	id := run.runner.Ref.Runner
	if response := result.GetResponse(); response != nil {
		if sum == nil {
			return failure(schemas.Errorf(schemas.CodeFailed, "runner %q sent a result before it accepted the work", id))
		}
		if !bytes.Equal(sum.Sum(nil), result.GetStreamSha256()) {
			return failure(schemas.Errorf(schemas.CodeFailed, "the result of runner %q arrived damaged: its checksum differs", id))
		}
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
	by := run.byReplica()
	if end.code == OutcomeCompleted {
		by = run.byRunner()
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
	run.mu.Lock()
	o.Phases = run.phases
	run.mu.Unlock()
	run.conclude(o)
	d.record(run, o)
	d.metrics.count(run, o, d.d.Now().Sub(run.began))
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
			err.Message, run.fetch.GetSource().GetKind(), run.id),
	}
}

// noteStart audits that a runner accepted a dispatch. A dispatch that reads a credential is made durable by the record of
// that, which comes behind it in the same log.
func (d *Dispatcher) noteStart(run *run) {
	d.d.Audit.Note(run.event("dispatch.start", "ok", map[string]string{"runner": run.runner.Ref.Runner, "chosen": "for this action"}))
}

// record audits the end of a run. Only one that read a credential is waited for (SPEC R8).
func (d *Dispatcher) record(run *run, o Outcome) {
	outcome, details := "ok", map[string]string{"outcome": o.Code}
	if o.RunnerID != "" {
		details["runner"] = o.RunnerID
	} else if schemas.ValidRunnerID(run.named) == nil {
		details["runner"] = run.named
	}
	if o.Err != nil {
		outcome, details["reason"] = string(o.Err.Code), o.Err.Message
		d.d.Log.Info("fetch ended", "dispatch", run.id, "tenant", run.caller.Tenant, "runner", o.RunnerID,
			"outcome", o.Code, "code", o.Err.Code, "error", o.Err.Message, "cause", o.Err.Cause)
	}
	action := "dispatch.end"
	if o.Code == OutcomeRefused || !run.accepted {
		action = "dispatch.refuse"
	}
	run.mu.Lock()
	if run.accepted {
		details["rows"], details["bytes"] = strconv.FormatInt(run.rows, 10), strconv.FormatInt(run.bytes, 10)
	}
	run.mu.Unlock()
	event := run.event(action, outcome, details)
	if !run.credentialsRead {
		d.d.Audit.Note(event)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := d.d.Audit.Record(ctx, event); err != nil {
		d.d.Log.Error("the end of a dispatch is not in the audit log", "dispatch", run.id, "error", err)
	}
}

// event is an audit event about the run. It holds no setting, query or secret.
func (r *run) event(action, outcome string, details map[string]string) *runbusv1.AuditEvent {
	if kind := r.fetch.GetSource().GetKind(); kind != "" && len(kind) <= 64 {
		details["source"] = kind
	}
	return &runbusv1.AuditEvent{
		Tenant: r.caller.Tenant, Actor: r.caller.Actor(), Action: action, Subject: "dispatch:" + r.id, Outcome: outcome, Details: details,
	}
}
