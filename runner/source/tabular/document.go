package tabular

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/org-runink/runbus/schemas"
)

// Capture is a value that ReadJSON picks out of a document on its way. Raw is nil if the document has no such value.
type Capture struct {
	Path Path
	Raw  json.RawMessage
}

// maxCapture bounds what a Capture may hold.
const maxCapture = 64 << 10

// ReadJSON adds the rows of a JSON document: the elements of the array at Options.Rows, or one row if an object is there, or
// none if null is. The document is never in memory as a whole. It returns the number of rows.
func (t *Table) ReadJSON(ctx context.Context, part string, r io.Reader, captures ...*Capture) (int64, error) {
	t.begin(part, "row")
	budget := &budget{r: r, most: t.o.maxRecord()}
	head := &marked{r: budget}
	w := &walk{t: t, ctx: ctx, d: json.NewDecoder(head), budget: budget, captures: captures, row: &jsonRow{t: t}}
	budget.left = budget.most
	err := w.value(nil)
	if err == nil && !w.found {
		return 0, w.missing()
	}
	if err == nil {
		budget.left = budget.most
		if _, more := w.d.Token(); more != io.EOF {
			if more == nil || errors.As(more, new(*json.SyntaxError)) {
				return w.row.rows, schemas.Errorf(schemas.CodeSource, "%s: the text goes on behind its JSON value", part).WithHint("for a value on each line set format=jsonl")
			}
			err = more
		}
	}
	return w.row.rows, w.explain(err)
}

// walk goes through one JSON document.
type walk struct {
	t        *Table
	ctx      context.Context //nolint:containedctx // one parse
	d        *json.Decoder
	budget   *budget
	captures []*Capture
	row      *jsonRow
	found    bool
	deepest  int    // steps of the path that were there
	keys     string // fields where it ended
}

// here is a place in the document.
type here []place

type place struct {
	name  string
	index int64 // −1: a field
}

// onto says how path p relates to place at: at is p itself, or on the way to it.
func onto(p Path, at here) (is, towards bool) {
	if len(at) > len(p) {
		return false, false
	}
	for i, h := range at {
		if h.index >= 0 && !p[i].element(h.index) || h.index < 0 && !p[i].field(h.name) {
			return false, false
		}
	}
	return len(at) == len(p), len(at) < len(p)
}

// value reads the value at a place.
func (w *walk) value(at here) error {
	rows, towards := onto(w.t.o.Rows, at)
	var capture *Capture
	for _, c := range w.captures {
		is, on := onto(c.Path, at)
		if is {
			capture = c
		}
		towards = towards || on
	}
	switch {
	case rows:
		if w.found {
			return w.fault("%s is there twice", w.t.o.Rows)
		}
		w.found = true
		return w.rows()
	case capture != nil:
		return w.capture(capture)
	}
	w.budget.left = w.budget.most
	tok, err := w.d.Token()
	if err != nil {
		return err
	}
	switch {
	case tok == json.Delim('{') && towards:
		return w.object(at)
	case tok == json.Delim('['):
		if towards {
			return w.array(at)
		}
		return w.skip()
	case tok == json.Delim('{'):
		return w.skip()
	}
	return nil
}

func (w *walk) object(at here) error {
	var keys []string
	for w.d.More() {
		w.budget.left = w.budget.most
		tok, err := w.d.Token()
		if err != nil {
			return err
		}
		key, _ := tok.(string) // in an object a key is a string
		if len(keys) < 20 {
			keys = append(keys, clip(key, 40))
		}
		if err := w.value(append(at[:len(at):len(at)], place{name: key, index: -1})); err != nil {
			return err
		}
	}
	if _, on := onto(w.t.o.Rows, at); on && len(at) >= w.deepest {
		w.deepest, w.keys = len(at), strings.Join(keys, ", ")
	}
	_, err := w.d.Token()
	return err
}

func (w *walk) array(at here) error {
	for i := int64(0); w.d.More(); i++ {
		if err := alive(w.ctx, i); err != nil {
			return err
		}
		if err := w.value(append(at[:len(at):len(at)], place{index: i})); err != nil {
			return err
		}
	}
	_, err := w.d.Token()
	return err
}

// skip reads to the end of the object or array that has just begun.
func (w *walk) skip() error {
	for depth, n := 1, int64(0); depth > 0; n++ {
		if err := alive(w.ctx, n); err != nil {
			return err
		}
		w.budget.left = w.budget.most
		tok, err := w.d.Token()
		if err != nil {
			return err
		}
		switch tok {
		case json.Delim('{'), json.Delim('['):
			depth++
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
	}
	return nil
}

func (w *walk) capture(c *Capture) error {
	if c.Raw != nil {
		return w.fault("%s is there twice", c.Path)
	}
	raw, err := w.decode()
	if err != nil {
		return err
	}
	if len(raw) > maxCapture {
		return w.fault("%s has %d bytes: at most %d make sense there", c.Path, len(raw), maxCapture)
	}
	c.Raw = raw
	return nil
}

// rows reads the array, object or null that has the rows.
func (w *walk) rows() error {
	next, err := w.peek()
	if err != nil {
		return err
	}
	if next != '[' {
		raw, err := w.decode()
		if err != nil {
			return err
		}
		switch raw[0] {
		case 'n':
			return nil
		case '{':
			return w.row.add(w.ctx, 1, raw)
		}
		return w.fault("at %s is %s, not an array or an object", w.t.o.Rows, word(raw))
	}
	if _, err := w.d.Token(); err != nil {
		return err
	}
	for n := int64(1); w.d.More(); n++ {
		raw, err := w.decode()
		if err != nil {
			return err
		}
		if err := w.row.add(w.ctx, n, raw); err != nil {
			return err
		}
	}
	_, err = w.d.Token()
	return err
}

// decode reads one whole value.
func (w *walk) decode() (json.RawMessage, error) {
	w.budget.left = w.budget.most
	var raw json.RawMessage
	err := w.d.Decode(&raw)
	return raw, err
}

// peek is the first byte of the next value.
func (w *walk) peek() (byte, error) {
	w.budget.left = w.budget.most
	w.d.More() // fills the decoder's buffer up to the next token
	b := make([]byte, 1)
	buffered := w.d.Buffered()
	for {
		if _, err := io.ReadFull(buffered, b); err != nil {
			if _, err := w.d.Token(); err != nil {
				return 0, err // why there is nothing
			}
			return 0, io.ErrUnexpectedEOF
		}
		switch b[0] {
		case ' ', '\t', '\n', '\r', ':', ',':
			continue
		}
		return b[0], nil
	}
}

func (w *walk) fault(format string, args ...any) error {
	return schemas.Errorf(schemas.CodeSource, "%s: %s", w.t.part, fmt.Sprintf(format, args...))
}

func (w *walk) missing() error {
	e := schemas.Errorf(schemas.CodeSource, "%s: there is nothing at %s", w.t.part, w.t.o.Rows)
	if w.keys != "" {
		e = e.WithHint(fmt.Sprintf("%s has the fields %s", w.t.o.Rows[:w.deepest], w.keys))
	}
	return e
}

// explain gives an error of the decoder its place; other errors stay what they are.
func (w *walk) explain(err error) error {
	var syntax *json.SyntaxError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errLong):
		return schemas.Errorf(schemas.CodeSource, "%s: a value has more than %d bytes (near byte %d)", w.t.part, w.budget.most, w.d.InputOffset()).
			WithHint("is jsonPath the path of the array with the rows?")
	case errors.Is(err, errMark):
		return w.fault("%s", err)
	case errors.As(err, &syntax):
		return w.fault("not JSON near byte %d: %s", w.d.InputOffset(), syntax)
	case errors.Is(err, io.ErrUnexpectedEOF), err == io.EOF:
		if w.budget.failed != nil {
			return w.budget.failed
		}
		return w.fault("the JSON text ends too early, at byte %d", w.d.InputOffset())
	}
	return err
}

// budget bounds what the decoder may read for one value.
type budget struct {
	r      io.Reader
	most   int
	left   int
	failed error // of reading
}

func (b *budget) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errLong
	}
	n, err := b.r.Read(p)
	b.left -= n
	if err != nil && err != io.EOF {
		b.failed = err
	}
	return n, err
}

var errMark = errors.New("the text is UTF-16, not UTF-8")

// marked drops a byte order mark.
type marked struct {
	r     io.Reader
	begun bool
	rest  []byte
	err   error
}

func (m *marked) Read(p []byte) (int, error) {
	if !m.begun {
		m.begun = true
		head := make([]byte, 3)
		n, err := io.ReadFull(m.r, head)
		if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
			return 0, err
		}
		head = head[:n]
		if bytes.HasPrefix(head, []byte("\xff\xfe")) || bytes.HasPrefix(head, []byte("\xfe\xff")) {
			m.err = errMark
		}
		m.rest = bytes.TrimPrefix(head, []byte("\xef\xbb\xbf"))
	}
	if m.err != nil {
		return 0, m.err
	}
	if len(m.rest) > 0 {
		n := copy(p, m.rest)
		m.rest = m.rest[n:]
		return n, nil
	}
	return m.r.Read(p)
}
