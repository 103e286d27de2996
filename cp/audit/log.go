// Package audit records what the platform does (SPEC R8).
package audit

import (
	"context"
	"errors"
	"log/slog"

	"github.com/org-runink/runbus/jetstream"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Log is the audit log of one replica. It is safe for concurrent use.
type Log struct{}

// New opens the log for one writer (replica).
func New(ctx context.Context, store *jetstream.Store, writer string, log *slog.Logger) (*Log, error) {
	return nil, errors.ErrUnsupported
}

// Run commits what is recorded until ctx ends; it blocks.
func (l *Log) Run(ctx context.Context) error { return errors.ErrUnsupported }

// Record returns when e is durable; else an error of CodeUnavailable. It fills id and at.
func (l *Log) Record(ctx context.Context, e *runbusv1.AuditEvent) error {
	return errors.ErrUnsupported
}

// Note records e without waiting.
func (l *Log) Note(e *runbusv1.AuditEvent) {}

// List are the last events of one tenant, newest last.
func (l *Log) List(ctx context.Context, tenant string, limit int) ([]*runbusv1.AuditEvent, error) {
	return nil, errors.ErrUnsupported
}

// Verify walks the whole chain and returns how many batches it has.
func (l *Log) Verify(ctx context.Context) (batches uint64, err error) {
	return 0, errors.ErrUnsupported
}

// Event builds an event; kv are pairs of detail names and values. The caller sets Tenant.
func Event(actor, action, subject, outcome string, kv ...string) *runbusv1.AuditEvent {
	return &runbusv1.AuditEvent{Actor: actor, Action: action, Subject: subject, Outcome: outcome}
}
