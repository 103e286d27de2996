// Package sourcetest is the one conformance suite that every connector passes.
package sourcetest

import (
	"context"
	"testing"

	"github.com/org-runink/runbus/runner/source"
)

// MinManyRows is the least number of rows of Fixture.Many: more than one batch.
const MinManyRows = 2*source.BatchRows + 1

// Fixture is a real source with known content, as one connector sees it.
type Fixture struct {
	// Env is what the runner lends; Roots for a kind that reads files. Dial, Memory and Log are the suite's own: Dial is
	// source.GuardedDial, watched.
	Env source.Env
	// Cases are reads whose result is known. At least one.
	Cases []Case
	// Empty is a read without rows; its Schema is checked, its Rows are nil.
	Empty Case
	// Many is a read of exactly ManyRows rows, at least MinManyRows.
	Many     source.Request
	ManyRows int64
	// Broken is a read that the source itself refuses, with secrets if the kind has any; what it says has BrokenText in it.
	Broken     source.Request
	BrokenText string
	// Long is a read that gives no row for a minute, nil where a source can't do that.
	Long *source.Request
	// Running returns when the source is executing Long; nil: the suite goes by the connector's progress.
	Running func(ctx context.Context) error
	// Idle returns when no read or connection is left at the source, an error if that does not happen before ctx ends. Nil:
	// the suite goes by the connections it has handed out.
	Idle func(ctx context.Context) error
	// Dials makes a request that connects to host, for a kind that dials; nil for one that doesn't.
	Dials func(host string) source.Request
	// Writes are reads in form that change something if the source lets them; each must end in an error. Only for a kind whose
	// query is SQL.
	Writes []source.Request
	// Unchanged fails the test if the source has changed. Nil: not checked.
	Unchanged func(t *testing.T)
	// SQL says that the query is SQL: what is not read-only must be refused unseen.
	SQL bool
}

// Case is one read and its result as text.
type Case struct {
	Name    string
	Request source.Request
	// Schema has one entry a column, `name: type` with the type's Arrow name, as in `n: int64`.
	Schema []string
	// Rows has one entry a row: its values as Text writes them, joined by ` | `.
	Rows []string
	// Notices are parts of the notices to expect, in order; there are no others.
	Notices []string
}
