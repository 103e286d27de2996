// Package postgres reads PostgreSQL (SPEC F1): one read-only statement, its rows streamed into Arrow record batches with
// bounded memory.
//
// # Read-only
//
// The statement must pass source.ReadOnlySQL, goes through the extended protocol, which takes exactly one, and runs in a READ
// ONLY transaction that is never committed: the server itself refuses every change of a table, sequence or schema, whatever
// functions or WITH clauses it hides in. What the server does not count as a change of the database is not refused: functions
// that read the server's files, end other sessions, take advisory locks or talk to other servers (pg_read_file,
// pg_terminate_backend, dblink). A client can't tell them apart soundly, a name or a view can hide any of them: the rights of
// the database user decide. Give a connection a user that may only SELECT what it is for.
//
// # Types
//
// Values are decoded from the binary format; field metadata "postgres.type" has the type as the server writes it.
//
//	boolean → bool                         smallint, integer, bigint → int16, int32, int64
//	oid, xid, cid → uint32; xid8 → uint64  real, double precision → float32, float64 (NaN, ±Infinity, -0 as they are)
//	numeric(p,s) → decimal128(p,s) up to 38 digits, decimal256 up to 76, else utf8; a negative s becomes scale 0
//	numeric without precision → utf8, exact, with NaN and ±Infinity as the server writes them
//	text, varchar, char(n), name, enums → utf8 (char(n) with its blanks)
//	bytea → binary                         uuid → fixed_size_binary(16), extension arrow.uuid
//	json, jsonb → utf8, extension arrow.json
//	date → date32                          time → time64[us]
//	timestamp → timestamp[us]              timestamptz → timestamp[us, UTC]
//	interval → month_day_nano_interval     arrays of all these → list
//	anything else (timetz, money, bit, inet, ranges, composites, geometry, …) → utf8: the server's own text
//
// A domain is read as its base type. An array has the depth that its table column was declared with, else one; inside a list
// the rules above hold. Arrays of anything else are utf8 too. Lower bounds other than 1 are dropped with a notice.
//
// A value that its Arrow type can't hold fails the fetch, with the column's name and the hint to select it as text: infinity
// of a date, a timestamp or an interval, a timestamp after the year 294246, an interval of more than 292 years in its time
// part, 24:00:00, NaN in a numeric(p,s), an array of another depth than declared. Nothing is ever replaced.
//
// Text is UTF-8; the server converts to it.
package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Kind is the connector's name.
const Kind = "postgres"

// New returns the connector. Its settings are host, port (5432), database, username and sslMode; its secret is password.
//
// sslMode is disable, require (encrypted, the server not verified), verify-ca or verify-full. The default is verify-full, on a
// loopback host disable. sslRootCert (PEM) replaces the system's roots, and makes verify-ca of require; sslCert (PEM) with the
// secret sslKey is a client certificate. Where the server isn't verified and not on loopback, a password is never sent in the
// clear, whatever the server asks for. Nothing comes from the environment, a service file or a password file.
//
// The session has the time zone and search path that the server gives the user.
func New() source.Connector { return connector{} }

type connector struct{}

func (connector) Kind() string { return Kind }

func (connector) Fetch(ctx context.Context, env source.Env, req source.Request, out *source.Output) error {
	values, err := spec.Read(req)
	if err != nil {
		return err
	}
	config, err := newConfig(values, env.Dial)
	if err != nil {
		return err
	}
	err = fetch(ctx, env, config, values, out)
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("the read was stopped: %w", ctx.Err())
	}
	return source.Redact(err, values.Secrets())
}

// fetch is the whole read: connect → begin and describe → look up the types → run → stream.
func fetch(ctx context.Context, env source.Env, config target, values *source.Values, out *source.Output) (err error) {
	out.Phase(runbusv1.Phase_PHASE_CONNECTING, config.address())
	var said notes
	defer said.giveTo(out, func(text string) string { return source.Redact(errors.New(text), values.Secrets()).Error() })
	s, err := open(ctx, config, said.add)
	if err != nil {
		return err
	}
	defer s.close()
	defer s.stopWith(ctx)()

	out.Phase(runbusv1.Phase_PHASE_QUERYING, "")
	fields, err := s.describe(values.Query())
	if err != nil {
		return err
	}
	r := newReader(env.Allocator(), fields, s.note)
	defer r.release()
	if err := out.Start(r.schema); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := s.execute(values.Query(), r.formats()); err != nil {
		return err
	}
	err = readAhead(ctx, func(write func(arrow.RecordBatch) error) error {
		defer s.finished()
		return r.read(s, out.Limits().MaxRows, write)
	}, out.Write, s.interrupt)
	if err != nil {
		s.interrupt() // the rest of the result is nobody's
	}
	if errors.Is(err, source.ErrLimit) {
		return nil
	}
	return err
}

var spec = source.Spec{
	Kind: Kind,
	Settings: []source.Setting{
		{Name: "host", Required: true, Check: isHost},
		{Name: "port", Default: "5432", Check: source.IsPort},
		{Name: "database", Required: true, Check: noNUL},
		{Name: "username", Required: true, Check: noNUL},
		{Name: "sslMode", Check: source.OneOf("disable", "require", "verify-ca", "verify-full")},
		{Name: "sslRootCert"},
		{Name: "sslCert"},
	},
	Secrets: []source.Setting{
		{Name: "password", Check: noNUL},
		{Name: "sslKey"},
	},
	Query:   source.QuerySQL,
	Dialect: source.PostgreSQL,
}

func noNUL(s string) error {
	if strings.ContainsRune(s, 0) {
		return errors.New("must not have a NUL in it")
	}
	return nil
}

// stateHints say what to do about the server's commonest refusals, by SQLSTATE.
var stateHints = map[string]string{
	"28P01": "check the setting username and the secret password",
	"28000": "the server's pg_hba.conf does not let this user in from the runner's address this way; check username and sslMode",
	"3D000": "check the setting database",
	"42501": "the database user lacks a right: GRANT it, or use another user",
	"42P01": "check the name, and the schema it is in",
	"53300": "the server has no connection left; try again later",
	"57014": "the server's statement_timeout, or somebody there, ended the query",
	"25006": "only reads are allowed here",
}

// serverError is what the server said, with its SQLSTATE.
func serverError(severity, state, message, hint string, position int32) *schemas.Error {
	code := schemas.CodeSource
	if state == "25006" { // read_only_sql_transaction
		code = schemas.CodeReadOnly
	}
	at := ""
	if position > 0 {
		at = fmt.Sprintf(" at character %d", position)
	}
	e := schemas.Errorf(code, "PostgreSQL: %s: %s%s (SQLSTATE %s)", severity, message, at, state)
	if hint == "" {
		hint = stateHints[state]
	}
	return e.WithHint(hint)
}
