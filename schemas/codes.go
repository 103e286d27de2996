package schemas

import (
	"errors"
	"fmt"
	"time"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Code is the stable name of an error: it crosses the wire, is shown to users, and scripts may depend on it.
type Code string

// The codes. Text and hint of each literal one stand beside the function that makes it, below, and nowhere else.
const (
	// Refusals of a dispatch (SPEC D3, D7): nothing was read, nothing ran.
	CodeNoRunner      Code = "no_runner"
	CodeRunnerUnknown Code = "runner_unknown"
	CodeRunnerRevoked Code = "runner_revoked"
	CodeRunnerOffline Code = "runner_offline"
	CodeRunnerBusy    Code = "runner_busy"

	// Ends of a dispatch that began.
	CodeFailed         Code = "failed"          // the source, the runner or the platform failed
	CodeCancelled      Code = "cancelled"       // the caller asked for it, and the runner confirmed
	CodeDeadline       Code = "deadline"        // out of time, and the runner confirmed that it stopped
	CodeRunnerLost     Code = "runner_lost"     // the runner died (SPEC D13)
	CodeOutcomeUnknown Code = "outcome_unknown" // the runner accepted and could not be asked (SPEC D4)

	// Errors of the API and of enrolment.
	CodeInvalid      Code = "invalid"       // the request itself is wrong
	CodeUnauthorized Code = "unauthorized"  // no valid credential
	CodeForbidden    Code = "forbidden"     // a valid credential that may not do this
	CodeNotFound     Code = "not_found"     // no such thing in this tenant
	CodeConflict     Code = "conflict"      // it exists already, or is not in a state for this
	CodeLimit        Code = "limit"         // a limit of the platform
	CodeUnavailable  Code = "unavailable"   // the platform can't decide now; try again
	CodeHelloFirst   Code = "HELLO_FIRST"   // a message before the hello (SPEC E6)
	CodeReplaced     Code = "REPLACED"      // another process took the runner's id (SPEC E8)
	CodeReadOnly     Code = "read_only"     // the query is not read-only (SPEC F2)
	CodeSource       Code = "source_failed" // the source's own error, in its own words
	CodeBadSource    Code = "bad_source"    // unknown kind, unknown or missing setting
	CodeForbiddenHop Code = "egress_denied" // the runner's egress rules refuse the address (SPEC E12)
)

// Error is an error with two faces: Code, Message and Hint are for whoever called and are safe to show; Cause is for the
// log of this process and never crosses the wire.
type Error struct {
	Code    Code
	Message string
	Hint    string // what to do about it; may be empty
	Cause   error  // may be nil
}

// Error is the safe text alone; Cause is reached by errors.As and Unwrap.
func (e *Error) Error() string { return e.Message }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Is matches any *Error of the same code, so that errors.Is(err, &Error{Code: CodeRunnerBusy}) asks for the code.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code && (t.Message == "" || t.Message == e.Message)
}

// Errorf makes an Error. A %w in format becomes its Cause, but the text of the cause is in the message then: use Wrap where
// it must not be.
func Errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), Cause: errors.Unwrap(err)}
}

// Wrap makes an Error whose cause stays in this process.
func Wrap(code Code, cause error, message string) *Error {
	return &Error{Code: code, Message: message, Cause: cause}
}

// WithHint returns e with a hint.
func (e *Error) WithHint(hint string) *Error {
	e.Hint = hint
	return e
}

// CodeOf is the code of the first *Error in err's chain, CodeFailed if there is none, "" for nil.
func CodeOf(err error) Code {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return CodeFailed
}

// ToDetail is the wire face of err. An error without a code crosses as CodeFailed with a text that says nothing of its
// cause. Nil gives nil.
func ToDetail(err error) *runbusv1.ErrorDetail {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		return &runbusv1.ErrorDetail{Code: string(e.Code), Message: e.Message, Hint: e.Hint}
	}
	return &runbusv1.ErrorDetail{Code: string(CodeFailed), Message: "internal error; the log of the process has the cause"}
}

// FromDetail is the error behind a wire face; nil gives nil.
func FromDetail(d *runbusv1.ErrorDetail) error {
	if d == nil {
		return nil
	}
	return &Error{Code: Code(d.GetCode()), Message: d.GetMessage(), Hint: d.GetHint()}
}

// The errors whose text is part of the interface (SPEC: literals).

// ErrNoRunner refuses a fetch that names no runner (SPEC D3).
func ErrNoRunner() *Error {
	return &Error{Code: CodeNoRunner, Message: "no runner is selected", Hint: "name one with runnerId (--runner); `runink runner list` shows them"}
}

// ErrNotARunnerName refuses what is neither an id, a DNS label nor `console` (SPEC D8).
func ErrNotARunnerName() *Error {
	return &Error{Code: CodeInvalid, Message: "not a runner name (a DNS label, or `console` for the Runink managed runner)"}
}

// ErrDialledID refuses an outbound runner whose id has the shape of a dialled runner's: an id belongs to one kind.
func ErrDialledID(id string) *Error {
	return &Error{Code: CodeInvalid, Message: fmt.Sprintf("the runner id %q is that of a dialled runner: a service-account key can't use it", id), Hint: "choose another RUNNER_ID"}
}

// ErrRunnerUnknown refuses a name that is not registered in the tenant (SPEC D7).
func ErrRunnerUnknown(name string) *Error {
	return &Error{Code: CodeRunnerUnknown, Message: fmt.Sprintf("runner %q is not registered", name), Hint: "`runink runner list` shows the registered ones"}
}

// ErrRunnerRevoked refuses a runner whose credential was revoked (SPEC D7).
func ErrRunnerRevoked(id string) *Error {
	return &Error{Code: CodeRunnerRevoked, Message: fmt.Sprintf("runner %q was revoked", id), Hint: "for good: create a new one, or enrol an outbound one again with a new key; or choose another one"}
}

// ErrRunnerOffline refuses a registered runner that can't take work now; detail says why (SPEC D7, D14).
func ErrRunnerOffline(id, detail string) *Error {
	return &Error{Code: CodeRunnerOffline, Message: fmt.Sprintf("runner %q is offline: %s", id, detail), Hint: "start the runner, or choose another one"}
}

// ErrDialledOffline is ErrRunnerOffline for a runner that the control plane dials: what is in the way is on record.
func ErrDialledOffline(name, detail string) *Error {
	return ErrRunnerOffline(name, detail).WithHint(fmt.Sprintf("`runink runner show %s` tells what is in the way; start the runner, or choose another one", name))
}

// ErrNotEnrolled is ErrRunnerOffline for a runner that was created and has not shown its ticket yet.
func ErrNotEnrolled(name string) *Error {
	return ErrRunnerOffline(name, "not enrolled yet").WithHint(fmt.Sprintf("start it on its host with its ticket (a new one: `runink runner token %s`); `runink runner show %s` tells what is in the way", name, name))
}

// ErrManagedUnreachable refuses a fetch on the managed runner, which can't be reached (SPEC D11); reason says why.
func ErrManagedUnreachable(reason string) *Error {
	return &Error{Code: CodeRunnerOffline, Message: "Analysis failed: dedicated runner unreachable — fetch does not run on the control plane: " + reason, Hint: "choose a runner of your own with runnerId (--runner); `runink runner list` shows them"}
}

// ErrRunnerBusy refuses work over the runner's limit (SPEC D6).
func ErrRunnerBusy(id string, limit int) *Error {
	return &Error{Code: CodeRunnerBusy, Message: fmt.Sprintf("runner %q is busy: it runs %d of %d works", id, limit, limit), Hint: "try again when one has ended, or raise RUNNER_CONCURRENCY on the runner"}
}

// ErrRunnerBacklog refuses work while too many results of ended works wait for a control plane to acknowledge them, as after
// the death of one.
func ErrRunnerBacklog(id string, waiting int) *Error {
	return &Error{Code: CodeRunnerBusy, Message: fmt.Sprintf("runner %q is busy: %d results of ended works wait for their acknowledgement", id, waiting), Hint: "try again within a minute: results for a control plane that is gone are given up then"}
}

// ErrRegistryUnavailable ends a dispatch that could not be decided because the registry can't be read (SPEC D7): never
// `runner_unknown`.
func ErrRegistryUnavailable(cause error) *Error {
	return &Error{Code: CodeFailed, Message: "runner registry unavailable", Hint: "nothing was started; try again when /readyz is ready", Cause: cause}
}

// ErrOutcomeUnknown ends a dispatch whose runner accepted and could not be asked any more (SPEC D4).
func ErrOutcomeUnknown(id string, waited time.Duration) *Error {
	return &Error{Code: CodeOutcomeUnknown, Message: fmt.Sprintf(`runner "%s" accepted the work and has not answered within %s — the run may still be in progress there`, id, waited), Hint: "look at the runner's log before you start it again"}
}

// ErrRunnerLost ends a dispatch whose runner died while it ran (SPEC D13).
func ErrRunnerLost(id, detail string) *Error {
	return &Error{Code: CodeRunnerLost, Message: fmt.Sprintf("runner %q was lost while it ran this fetch: %s", id, detail), Hint: "it is not run again by itself; start it again if the read may be repeated"}
}

// ErrPersonCannotEnrol refuses a session token at the bus (SPEC E5).
func ErrPersonCannotEnrol() *Error {
	return &Error{Code: CodeForbidden, Message: "runner enrolment requires a service-account credential; a user session token cannot enrol a runner", Hint: "mint a key with `runink key create NAME` and set RUNNER_ENROLL_TOKEN to it"}
}

// ErrKeyRevoked refuses a service-account key that was revoked (SPEC E4, E8).
func ErrKeyRevoked(key string) *Error {
	return &Error{Code: CodeForbidden, Message: fmt.Sprintf("the service-account key %q was revoked", key), Hint: "mint a new key and restart the runner with it"}
}

// ErrKeyExpired refuses a service-account key past its 365 days (SPEC E4).
func ErrKeyExpired(key string) *Error {
	return &Error{Code: CodeForbidden, Message: fmt.Sprintf("the service-account key %q has expired", key), Hint: "mint a new key and restart the runner with it"}
}

// ErrRunnerBound refuses a runner id that another key of the tenant holds (SPEC E4).
func ErrRunnerBound(id string) *Error {
	return &Error{Code: CodeForbidden, Message: fmt.Sprintf("the runner id %q is bound to another service-account key", id), Hint: "use that key, choose another RUNNER_ID, or have an admin revoke the key or release the id"}
}

// ErrHelloFirst answers anything a runner says before its hello (SPEC E6).
func ErrHelloFirst() *Error {
	return &Error{Code: CodeHelloFirst, Message: "HELLO_FIRST: the first message of a runner must be RunnerHello"}
}

// ErrTokenMissing stops a runner that has an address to enrol at and no token (SPEC E3).
func ErrTokenMissing() *Error {
	return &Error{Code: CodeInvalid, Message: "❌ RUNNER_ENROLL_ADDR is set but RUNNER_ENROLL_TOKEN is empty — a runner enrols with a service-account token issued by IdentityService.GenerateServiceAccountKey; there is no anonymous enrolment", Hint: "an admin mints one with `runink key create NAME`; RUNNER_ENROLL_TOKEN_FILE can name a 0600 file with it"}
}

// RoleControlPlaneText is what a control plane logs at start (SPEC E2).
func RoleControlPlaneText(endpoint string) string {
	return fmt.Sprintf("🧵 Fetch role: CONTROL-PLANE — forwards fetches to the dedicated runner at %s (never runs them here).", endpoint)
}

// RoleRunnerText is what a runner logs at start (SPEC E2).
const RoleRunnerText = "🧵 Fetch role: RUNNER — executes the fetch pipeline in-process (dedicated compute)."

// EnrolmentText is what a runner logs when it starts to enrol (SPEC E2). Two spaces after the sign, as in the seed.
func EnrolmentText(addr, runnerID string) string {
	return fmt.Sprintf(`🛰️  Outbound runner enrolment enabled: dialling %s (runner id "%s")`, addr, runnerID)
}
