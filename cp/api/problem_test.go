package api

import (
	"errors"
	"testing"

	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/schemas"
)

// What failed on a runner is 502 whatever its code; what was refused has the status of its code (SPEC, "Interfaces that are
// fixed now").
func TestStatusOfAnOutcome(t *testing.T) {
	for _, c := range []struct {
		outcome string
		err     *schemas.Error
		status  int
	}{
		{dispatch.OutcomeFailed, schemas.Errorf(schemas.CodeReadOnly, "x"), 502},
		{dispatch.OutcomeFailed, schemas.Errorf(schemas.CodeBadSource, "x"), 502},
		{dispatch.OutcomeFailed, schemas.Errorf(schemas.CodeForbiddenHop, "x"), 502},
		{dispatch.OutcomeFailed, schemas.Errorf(schemas.CodeSource, "x"), 502},
		{dispatch.OutcomeFailed, schemas.ErrRegistryUnavailable(errors.New("x")), 503},
		{dispatch.OutcomeRunnerLost, schemas.ErrRunnerLost("edge", "x"), 502},
		{dispatch.OutcomeDeadline, schemas.Errorf(schemas.CodeDeadline, "x"), 504},
		{dispatch.OutcomeUnknown, schemas.ErrOutcomeUnknown("edge", 1), 504},
		{dispatch.OutcomeCancelled, schemas.Errorf(schemas.CodeCancelled, "x"), 409},
		{dispatch.OutcomeRefused, schemas.ErrNoRunner(), 400},
		{dispatch.OutcomeRefused, schemas.ErrRunnerUnknown("x"), 404},
		{dispatch.OutcomeRefused, schemas.ErrRunnerOffline("x", "y"), 409},
		{dispatch.OutcomeRefused, schemas.ErrRunnerBusy("x", 4), 429},
	} {
		p := problemOfOutcome(dispatch.Outcome{Code: c.outcome, Err: c.err, DispatchID: "D"})
		if p.Status != c.status || p.Code != c.err.Code || p.Outcome != c.outcome || p.DispatchID != "D" {
			t.Errorf("%s with %s: %+v, want status %d", c.outcome, c.err.Code, p, c.status)
		}
	}
}
