package api

import (
	"context"
	"errors"

	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/schemas"
)

// What is decided here rather than in the part that carries it out is recorded here (SPEC R8).

// refused notes in the audit that by was refused an action on what they call name, and is the answer to them.
func (s *server) refused(by auth.Principal, action, kind, name string, err error) *Problem {
	e := audit.Event(by.Actor(), action, audit.Subject(kind, name), string(schemas.CodeOf(err)))
	e.Tenant = by.Tenant
	var told *schemas.Error
	if errors.As(err, &told) {
		e.Details = map[string]string{"reason": told.Message}
	}
	s.Audit.Note(e)
	return problemOf(err)
}

// done records an action of by before it takes effect.
func (s *server) done(ctx context.Context, by auth.Principal, action, kind, name string) error {
	e := audit.Event(by.Actor(), action, audit.Subject(kind, name), "ok")
	e.Tenant = by.Tenant
	if err := s.Audit.Record(ctx, e); err != nil {
		return schemas.Wrap(schemas.CodeUnavailable, err, "it could not be recorded in the audit log").WithHint("nothing was done; try again when /readyz is ready")
	}
	return nil
}
