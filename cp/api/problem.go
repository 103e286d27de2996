package api

import (
	"errors"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/schemas"
)

// Problem is every error of this API but 401: RFC 9457 problem details with the stable code and what to do.
type Problem struct { //nolint:errname // its name in RFC 9457 and in the OpenAPI document
	Type   string              `json:"type" example:"about:blank" doc:"Always about:blank: the code tells the problem"`
	Title  string              `json:"title" doc:"Text of the HTTP status"`
	Status int                 `json:"status"`
	Detail string              `json:"detail,omitempty" doc:"What went wrong, safe to show"`
	Code   schemas.Code        `json:"code" example:"runner_offline" doc:"Stable name of the error"`
	Hint   string              `json:"hint,omitempty" doc:"What to do about it"`
	Errors []*huma.ErrorDetail `json:"errors,omitempty" doc:"Each fault of a request that is not valid"`
	// DispatchID and Outcome are set when a fetch ended before its first byte.
	DispatchID string `json:"dispatchId,omitempty"`
	Outcome    string `json:"outcome,omitempty"`
}

// Error is the text of the problem.
func (p *Problem) Error() string { return p.Detail }

// GetStatus is the HTTP status.
func (p *Problem) GetStatus() int { return p.Status }

// ContentType is that of RFC 9457.
func (p *Problem) ContentType(string) string { return "application/problem+json" }

func newProblem(status int, code schemas.Code, detail, hint string) *Problem {
	return &Problem{Type: "about:blank", Title: http.StatusText(status), Status: status, Detail: detail, Code: code, Hint: hint}
}

// humaProblem is how huma's own refusals (validation, unknown media types) become problems. The value that was refused is left out:
// it is the caller's own, up to the whole body, and may be a secret that ends in the log of whoever logs errors.
func humaProblem(status int, msg string, errs ...error) huma.StatusError {
	p := newProblem(status, codeOfStatus(status), msg, "")
	for _, err := range errs {
		var detailer huma.ErrorDetailer
		switch {
		case err == nil:
		case errors.As(err, &detailer):
			d := detailer.ErrorDetail()
			p.Errors = append(p.Errors, &huma.ErrorDetail{Message: d.Message, Location: d.Location})
		default:
			p.Errors = append(p.Errors, &huma.ErrorDetail{Message: err.Error()})
		}
	}
	return p
}

func codeOfStatus(status int) schemas.Code {
	switch {
	case status == http.StatusUnauthorized:
		return schemas.CodeUnauthorized
	case status == http.StatusForbidden:
		return schemas.CodeForbidden
	case status == http.StatusNotFound:
		return schemas.CodeNotFound
	case status == http.StatusRequestEntityTooLarge:
		return schemas.CodeLimit
	case status >= http.StatusInternalServerError:
		return schemas.CodeFailed
	}
	return schemas.CodeInvalid
}

// statusOf is the HTTP status of each code (SPEC, "Interfaces that are fixed now").
func statusOf(err error) int {
	if errors.Is(err, schemas.ErrRegistryUnavailable(nil)) {
		return http.StatusServiceUnavailable
	}
	switch schemas.CodeOf(err) {
	case schemas.CodeInvalid, schemas.CodeNoRunner, schemas.CodeReadOnly, schemas.CodeBadSource:
		return http.StatusBadRequest
	case schemas.CodeUnauthorized:
		return http.StatusUnauthorized
	case schemas.CodeForbidden, schemas.CodeForbiddenHop:
		return http.StatusForbidden
	case schemas.CodeNotFound, schemas.CodeRunnerUnknown:
		return http.StatusNotFound
	case schemas.CodeConflict, schemas.CodeRunnerOffline, schemas.CodeRunnerRevoked, schemas.CodeCancelled:
		return http.StatusConflict
	case schemas.CodeRunnerBusy, schemas.CodeLimit:
		return http.StatusTooManyRequests
	case schemas.CodeUnavailable:
		return http.StatusServiceUnavailable
	case schemas.CodeRunnerLost, schemas.CodeFailed, schemas.CodeSource:
		return http.StatusBadGateway
	case schemas.CodeDeadline, schemas.CodeOutcomeUnknown:
		return http.StatusGatewayTimeout
	}
	return http.StatusInternalServerError
}

// problemOf is the face of an error of the platform. The cause is not in it.
func problemOf(err error) *Problem {
	d := schemas.ToDetail(err)
	status := statusOf(err)
	var known *schemas.Error
	if !errors.As(err, &known) {
		status = http.StatusInternalServerError
	}
	return newProblem(status, schemas.Code(d.GetCode()), d.GetMessage(), d.GetHint())
}

// problemOfOutcome is the answer to a fetch that ended before its first byte. What failed once a runner had taken it is 502,
// whatever its code: the request itself was taken.
func problemOfOutcome(o dispatch.Outcome) *Problem {
	p := problemOf(o.Err)
	if o.Code == dispatch.OutcomeFailed && p.Status != http.StatusServiceUnavailable {
		p.Status, p.Title = http.StatusBadGateway, http.StatusText(http.StatusBadGateway)
	}
	p.DispatchID, p.Outcome = o.DispatchID, o.Code
	return p
}
