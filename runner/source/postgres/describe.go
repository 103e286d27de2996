package postgres

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/org-runink/runbus/schemas"
)

// begin opens the transaction in which everything runs. What is set holds for it alone: how the server writes the values
// that are read as text, and, where it can (PostgreSQL 14 on Linux), that it looks now and then whether the runner is still
// there while a query computes.
const begin = `BEGIN READ ONLY; SET LOCAL datestyle = 'ISO'; SET LOCAL intervalstyle = 'postgres'; SET LOCAL extra_float_digits = 3; ` +
	`SET LOCAL bytea_output = 'hex'; SELECT pg_catalog.set_config(name, '2s', true) FROM pg_catalog.pg_settings ` +
	`WHERE name = 'client_connection_check_interval' AND pg_catalog.version() LIKE '%linux%'`

// field is a column of the result.
type field struct {
	name     string
	typeOID  uint32
	typmod   int32
	typeName string // as the server writes it, with its modifier
	enum     bool

	// Of an array: its declared element type, the base type behind it, and that one's modifier.
	declared, element uint32
	elementMod        int32
	elementEnum       bool
	dims              int

	table  uint32 // where the column comes from, if it is a plain column
	number uint16
}

// describe begins the transaction, has the server parse the query and returns the columns of its result.
func (s *session) describe(query string) ([]field, error) {
	if strings.ContainsRune(query, 0) {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the query has a NUL in it")
	}
	err := s.send(&pgproto3.Query{String: begin}, &pgproto3.Parse{Query: query}, &pgproto3.Describe{ObjectType: 'S'}, &pgproto3.Sync{})
	if err != nil {
		return nil, err
	}
	if _, err := s.query("", true); err != nil {
		return nil, err
	}
	var fields []field
	var described bool
	var failed error
	for {
		kind, body, err := s.receive()
		if err != nil {
			return nil, firstOf(failed, err)
		}
		switch kind {
		case 't':
			var p pgproto3.ParameterDescription
			if err := p.Decode(body); err != nil {
				return nil, protocolError("the parameters: %s", err)
			}
			if len(p.ParameterOIDs) > 0 {
				failed = schemas.Errorf(schemas.CodeInvalid, "the query has %d parameters ($1 …): there are no values for them", len(p.ParameterOIDs)).WithHint("write the values into the query")
			}
		case 'T':
			var d pgproto3.RowDescription
			if err := d.Decode(body); err != nil {
				return nil, protocolError("the columns: %s", err)
			}
			described = true
			fields = make([]field, len(d.Fields))
			for i, f := range d.Fields {
				fields[i] = field{
					name: strings.ToValidUTF8(string(f.Name), "�"), typeOID: f.DataTypeOID, typmod: f.TypeModifier,
					table: f.TableOID, number: f.TableAttributeNumber,
				}
			}
		case 'E':
			failed = failure(body)
		case 'Z':
			switch {
			case failed != nil:
				return nil, failed
			case !described:
				return nil, schemas.Errorf(schemas.CodeInvalid, "the query returns no rows")
			}
			return fields, s.lookUpTypes(fields)
		}
	}
}

// firstOf is the server's own error if there was one: the connection that ends after it is its consequence.
func firstOf(failed, err error) error {
	if failed != nil {
		return failed
	}
	return err
}

// typesQuery asks for what the description of a result leaves out: names of types, what is an enum, what an array is an
// array of (behind any domains), and with how many dimensions its column was declared.
const typesQuery = `WITH c(i, oid, mod, rel, att) AS (VALUES %s)
SELECT pg_catalog.format_type(c.oid, c.mod), coalesce(t.typtype = 'e', false), coalesce(e.declared, 0), coalesce(e.base, 0),
	CASE WHEN c.mod >= 0 THEN c.mod ELSE coalesce(e.mod, -1) END, coalesce(e.kind = 'e', false), coalesce(a.attndims, 0)
FROM c
LEFT JOIN pg_catalog.pg_type t ON t.oid = c.oid
LEFT JOIN LATERAL (
	WITH RECURSIVE b(base, kind, next, mod) AS (
		SELECT d.oid, d.typtype, d.typbasetype, d.typtypmod FROM pg_catalog.pg_type d
		WHERE d.oid = t.typelem AND t.typlen = -1 AND t.typinput = 'pg_catalog.array_in'::pg_catalog.regproc
		UNION ALL
		SELECT d.oid, d.typtype, d.typbasetype, CASE WHEN b.mod >= 0 THEN b.mod ELSE d.typtypmod END
		FROM b JOIN pg_catalog.pg_type d ON d.oid = b.next WHERE b.kind = 'd')
	SELECT t.typelem AS declared, b.base, b.kind, b.mod FROM b WHERE b.kind <> 'd') e ON true
LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.rel AND a.attnum = c.att
ORDER BY c.i`

func (s *session) lookUpTypes(fields []field) error {
	if len(fields) == 0 {
		return nil
	}
	var values strings.Builder
	for i, f := range fields {
		if i > 0 {
			values.WriteByte(',')
		}
		fmt.Fprintf(&values, "(%d,%d::oid,%d,%d::oid,%d)", i, f.typeOID, f.typmod, f.table, f.number)
	}
	rows, err := s.query(fmt.Sprintf(typesQuery, values.String()), false)
	if err != nil {
		return err
	}
	if len(rows) != len(fields) {
		return protocolError("%d types for %d columns", len(rows), len(fields))
	}
	for i := range fields {
		f, row := &fields[i], rows[i]
		if len(row) != 7 {
			return protocolError("%d values about a type", len(row))
		}
		f.typeName, f.enum, f.elementEnum = row[0], row[1] == "t", row[5] == "t"
		declared, err1 := strconv.ParseUint(row[2], 10, 32)
		element, err2 := strconv.ParseUint(row[3], 10, 32)
		mod, err3 := strconv.ParseInt(row[4], 10, 32)
		dims, err4 := strconv.Atoi(row[6])
		for _, err := range []error{err1, err2, err3, err4} {
			if err != nil {
				return protocolError("about type %s: %s", f.typeName, err)
			}
		}
		f.declared, f.element, f.elementMod = uint32(declared), uint32(element), int32(mod)
		f.dims = min(max(dims, 1), maxDims)
	}
	return nil
}

// execute runs the query and asks for its rows, each column in its format. The query is parsed again: a named statement would
// outlive the session in a connection pooler, and the unnamed one did not survive the look at the types.
func (s *session) execute(query string, formats []int16) error {
	return s.send(&pgproto3.Parse{Query: query}, &pgproto3.Bind{ResultFormatCodes: formats}, &pgproto3.Describe{ObjectType: 'P'},
		&pgproto3.Execute{}, &pgproto3.Sync{})
}
