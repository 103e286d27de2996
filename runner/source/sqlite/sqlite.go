// Package sqlite reads SQLite databases below the runner's file roots.
//
// Read-only four times: the statement must pass the SQL gate, SQLite itself must call it read-only and the only one, the file
// is opened for reading, and query_only is set. Nothing can be attached. The database may be in use by other programs: it is
// read under SQLite's locks, in one transaction. (In WAL mode SQLite needs the -shm file beside the database, and makes it if
// it may.)
//
// The path is resolved below the roots without a symbolic link, SQLite follows none, and before anything is read the file that
// SQLite has opened is compared with the one that was checked, so that changing names meanwhile gains nothing.
//
// # Types
//
// A value of SQLite has a type of its own, whatever the column declares. A result that is longer than one batch is therefore
// read twice in one transaction, first to learn which types each column has, so that no value is lost or changed:
//
//	all values                                              Arrow
//	INTEGER                                                 int64; bool if declared BOOL… and all are 0 or 1
//	REAL, also with INTEGERs up to ±2^53                    float64 (NaN is NULL in SQLite; infinities are kept)
//	TEXT                                                    utf8, also JSON
//	TEXT, declared DATE, all 2006-01-02                     date32
//	TEXT, declared DATETIME or TIMESTAMP, all of one form   timestamp[us], with zone UTC if all have a zone, else without
//	BLOB                                                    binary
//	TEXT and BLOB, or TEXT that is not UTF-8                binary
//	any other mixture                                       utf8: text as it is, numbers so that they read back equal,
//	                                                        blobs as X'0AFF'
//	only NULL, or no rows                                   what the declared type stands for, else utf8
//
// The last two kinds of mixture are reported as a notice.
package sqlite

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Kind is the connector's kind.
const Kind = "sqlite"

var spec = source.Spec{
	Kind:     Kind,
	Settings: []source.Setting{{Name: "path", Required: true}},
	Query:    source.QuerySQL,
	Dialect:  source.SQLite,
}

type connector struct{}

// New returns the connector.
func New() source.Connector { return connector{} }

// Kind is `sqlite`.
func (connector) Kind() string { return Kind }

// Fetch runs the query on the database at the setting `path`.
func (connector) Fetch(ctx context.Context, env source.Env, req source.Request, out *source.Output) error {
	values, err := spec.Read(req)
	if err != nil {
		return err
	}
	path, identity, err := env.Roots.Resolve(values.Text("path"))
	if err != nil {
		return err
	}
	out.Phase(runbusv1.Phase_PHASE_CONNECTING, filepath.Base(path))
	db, err := open(path, identity)
	if err != nil {
		return err
	}
	defer db.close()
	stop := db.interruptWith(ctx)
	defer stop()

	out.Phase(runbusv1.Phase_PHASE_QUERYING, "")
	r := &reader{ctx: ctx, db: db, mem: env.Allocator(), out: out}
	err = r.read(values.Query())
	switch {
	case errors.Is(err, source.ErrLimit):
		return nil
	case err != nil && ctx.Err() != nil:
		return schemas.Wrap(schemas.CodeSource, ctx.Err(), fmt.Sprintf("the read was stopped: %s", ctx.Err()))
	}
	return err
}
