package tabular

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// csvReader splits a CSV text into fields (RFC 4180). A quote that does not open a field is an ordinary character.
type csvReader struct {
	lines     *lines
	delimiter byte
	quote     byte
	noQuote   bool
	nullText  string

	line   int64 // where the record begins
	empty  bool  // an empty line
	buf    []byte
	raw    []byte // a record over several lines
	fields []cell
}

// ReadCSV adds the rows of a CSV text; part names it in messages. Its columns must be those of the texts before it, unless
// Options.Union says otherwise. It returns the number of its rows. A text without any record has no header and no rows.
func (t *Table) ReadCSV(ctx context.Context, part string, r io.Reader) (rows int64, err error) {
	c, columns, err := t.openCSV(part, r)
	if c == nil || err != nil {
		return 0, err
	}
	rec := record{cells: make([]cell, len(t.names))}
	for pending := !t.o.Header; ; pending = false {
		if !pending {
			if err := c.next(); err == io.EOF {
				return rows, nil
			} else if err != nil {
				return rows, t.csvError(c, err)
			}
		}
		if len(c.fields) != len(columns) {
			if c.empty {
				continue
			}
			return rows, t.fault(c.line, "the row has %d fields, the %s has %d", len(c.fields), t.headerWord(), len(columns))
		}
		rec.line = c.line
		for k, i := range columns {
			if i >= 0 {
				rec.cells[i] = c.fields[k]
			}
		}
		rows++
		if err := alive(ctx, rows); err != nil {
			return rows, err
		}
		if err := t.add(&rec); err != nil {
			return rows, err
		}
	}
}

// ReadCSVHeader makes the columns of a CSV text known without reading its rows.
func (t *Table) ReadCSVHeader(part string, r io.Reader) error {
	_, _, err := t.openCSV(part, r)
	return err
}

// openCSV reads up to the first record and maps its columns to the table's. A nil reader: there is no record.
func (t *Table) openCSV(part string, r io.Reader) (*csvReader, []int, error) {
	t.begin(part, "line")
	l, err := newLines(r, t.o.maxRecord())
	if err != nil {
		return nil, nil, schemas.Errorf(schemas.CodeSource, "%s: %s", part, err).WithHint("convert it to UTF-8")
	}
	c := &csvReader{lines: l, delimiter: t.o.delimiter(), quote: t.o.quote(), noQuote: t.o.NoQuote, nullText: t.o.NullText}
	for {
		if err := c.next(); err == io.EOF {
			return nil, nil, nil
		} else if err != nil {
			return nil, nil, t.csvError(c, err)
		}
		if !c.empty {
			break
		}
	}
	header, err := t.csvHeader(c)
	if err != nil {
		return nil, nil, err
	}
	if !t.o.Union {
		if t.header == nil {
			t.header, t.headerOf = header, part
		} else if err := SameColumns(t.headerOf, t.header, part, header); err != nil {
			return nil, nil, err
		}
		for _, name := range t.o.Columns {
			if !slices.Contains(header, name) {
				return nil, nil, schemas.Errorf(schemas.CodeBadSource, "%s has no column %q", part, clip(name, 80)).WithHint(listNames(header))
			}
		}
	}
	columns := make([]int, len(header))
	for k, name := range header {
		if columns[k], err = t.column(name); err != nil {
			return nil, nil, err
		}
	}
	return c, columns, nil
}

func (t *Table) headerWord() string {
	if t.o.Header {
		return "header"
	}
	return "first row"
}

// csvHeader is the names of the columns: those of the first record, or c1, c2, …. A column without a name gets one by its
// place, a name that comes twice gets a number, and a notice says so.
func (t *Table) csvHeader(c *csvReader) ([]string, error) {
	if len(c.fields) > maxColumns {
		return nil, t.fault(c.line, "more than %d columns", maxColumns)
	}
	header := make([]string, len(c.fields))
	used, given := make(map[string]bool, len(header)), make(map[string]bool, len(header))
	for i, f := range c.fields {
		if given[string(f.text)] = true; !t.o.Header {
			header[i] = fmt.Sprintf("c%d", i+1)
			continue
		}
		header[i] = string(f.text)
	}
	if !t.o.Header {
		return header, nil
	}
	for i, name := range header {
		base := name
		if base == "" {
			base = fmt.Sprintf("column_%d", i+1)
		}
		free := func(s string) bool { return !used[s] && (s == name || !given[s]) }
		chosen := base
		for n := 2; !free(chosen); n++ {
			chosen = fmt.Sprintf("%s_%d", base, n)
		}
		if used[chosen] = true; chosen != name {
			t.out.Notice(runbusv1.NoticeCode_NOTICE_CODE_SOURCE, fmt.Sprintf("%s: column %d is named %q in the result, its header %q is empty or taken", t.part, i+1, clip(chosen, 80), clip(name, 80)))
		}
		header[i] = chosen
	}
	return header, nil
}

var (
	errBareCR = errors.New("a carriage return without a line feed outside of quotes")
	errNUL    = errors.New("a NUL byte: is this a text in UTF-8?")
	errOpen   = errors.New("the quote that opens here is never closed")
)

// quoteError is text behind a closing quote.
type quoteError struct{ column int }

func (e quoteError) Error() string {
	return fmt.Sprintf("field %d goes on behind its closing quote", e.column)
}

type utf8Error struct{ at int }

func (e utf8Error) Error() string { return fmt.Sprintf("invalid UTF-8 at byte %d of the line", e.at+1) }

// csvError gives an error of the reader its place.
func (t *Table) csvError(c *csvReader, err error) error {
	var q quoteError
	var u utf8Error
	switch {
	case errors.Is(err, errLong):
		return schemas.Errorf(schemas.CodeSource, "%s, line %d: the record is longer than %d bytes", t.part, c.line, t.o.maxRecord()).
			WithHint("is this a CSV text, and is the quote setting right?")
	case errors.As(err, &u):
		return schemas.Errorf(schemas.CodeSource, "%s, line %d: %s", t.part, c.lines.no, err).WithHint("convert it to UTF-8")
	case errors.As(err, &q), err == errOpen:
		return schemas.Errorf(schemas.CodeSource, "%s, line %d: %s", t.part, c.line, err).
			WithHint("set quote=none if the text does not quote, or quote to its character")
	case err == errBareCR, err == errNUL:
		return t.fault(c.lines.no, "%s", err)
	}
	return err // of reading
}

// next reads one record into fields; they are valid until the next call.
func (c *csvReader) next() error {
	line, err := c.lines.next()
	c.line = c.lines.no
	if err != nil {
		return err
	}
	if err := checkLine(line); err != nil {
		return err
	}
	c.fields = c.fields[:0]
	c.empty = len(trimEnd(line)) == 0
	if c.noQuote || bytes.IndexByte(line, c.quote) < 0 {
		return c.plain(trimEnd(line))
	}
	return c.quoted(line)
}

func checkLine(line []byte) error {
	if bytes.IndexByte(line, 0) >= 0 {
		return errNUL
	}
	if at := badUTF8(line); at >= 0 {
		return utf8Error{at}
	}
	return nil
}

// plain splits a line without quotes.
func (c *csvReader) plain(line []byte) error {
	if bytes.IndexByte(line, '\r') >= 0 {
		return errBareCR
	}
	for {
		i := bytes.IndexByte(line, c.delimiter)
		if i < 0 {
			c.fields = append(c.fields, c.unquoted(line))
			return nil
		}
		c.fields = append(c.fields, c.unquoted(line[:i]))
		line = line[i+1:]
	}
}

func (c *csvReader) unquoted(s []byte) cell {
	if string(s) == c.nullText {
		return cell{}
	}
	return cell{form: cellText, text: s}
}

// quoted splits a record with quotes, which may go on over several lines.
func (c *csvReader) quoted(line []byte) error {
	c.raw = append(c.buf[:0], line...) //nolint:gocritic // raw goes back into buf below
	defer func() { c.buf = c.raw }()
	type span struct {
		from, to int
		quoted   bool
	}
	var small [64]span
	spans := small[:0]
	var write int // quoted fields are written over themselves without their doubled quotes
	for at := 0; ; {
		if at >= len(c.raw) || c.raw[at] != c.quote {
			rest := trimEnd(c.raw[at:])
			end := bytes.IndexByte(rest, c.delimiter)
			more := end >= 0
			if !more {
				end = len(rest)
			}
			if bytes.IndexByte(rest[:end], '\r') >= 0 {
				return errBareCR
			}
			spans = append(spans, span{at, at + end, false})
			at += end + 1
			if !more {
				break
			}
			continue
		}
		at++
		from := at
		write = at
		for {
			i := bytes.IndexByte(c.raw[at:], c.quote)
			if i < 0 {
				n := copy(c.raw[write:], c.raw[at:])
				write, at = write+n, len(c.raw)
				// write and at differ by the quotes removed so far; the gap closes with the next line.
				next, err := c.lines.next()
				if err == io.EOF {
					return errOpen
				}
				if err == nil {
					err = checkLine(next)
				}
				if err != nil {
					return err
				}
				if len(c.raw)+len(next) > c.lines.most {
					return errLong
				}
				c.raw = append(c.raw, next...)
				continue
			}
			n := copy(c.raw[write:], c.raw[at:at+i])
			write, at = write+n, at+i+1
			if at < len(c.raw) && c.raw[at] == c.quote {
				c.raw[write] = c.quote
				write++
				at++
				continue
			}
			break
		}
		spans = append(spans, span{from, write, true})
		rest := trimEnd(c.raw[at:])
		if len(rest) == 0 {
			break
		}
		if rest[0] != c.delimiter {
			return quoteError{len(spans)}
		}
		at++
	}
	for _, s := range spans {
		text := c.raw[s.from:s.to]
		if s.quoted {
			c.fields = append(c.fields, cell{form: cellText, text: text})
		} else {
			c.fields = append(c.fields, c.unquoted(text))
		}
	}
	return nil
}

// SameColumns checks that two texts have the same columns, in whatever order. The error names what part has too little or
// too much against the columns of first.
func SameColumns(first string, want []string, part string, have []string) error {
	missing, extra := without(want, have), without(have, want)
	if len(missing)+len(extra) == 0 {
		return nil
	}
	var say []string
	if len(missing) > 0 {
		say = append(say, "lacks "+clip(strings.Join(missing, ", "), 200))
	}
	if len(extra) > 0 {
		say = append(say, "has in addition "+clip(strings.Join(extra, ", "), 200))
	}
	return schemas.Errorf(schemas.CodeSource, "%s has other columns than %s: it %s", part, first, strings.Join(say, " and ")).
		WithHint("set union=true to fill what is missing with nulls, or read the files apart")
}

func without(a, b []string) []string {
	has := make(map[string]bool, len(b))
	for _, s := range b {
		has[s] = true
	}
	var rest []string
	for _, s := range a {
		if !has[s] {
			rest = append(rest, s)
		}
	}
	return rest
}
