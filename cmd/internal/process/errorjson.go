package process

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/org-runink/runbus/schemas"
)

// ErrorJSON is err as the line that commands with --json print on standard error: `{"error":{"code","message","hint"}}`, and
// `dispatchId` beside them where err is about a dispatch (see WithDispatch). An error without a code has `failed`.
func ErrorJSON(err error) []byte {
	var e *schemas.Error
	if !errors.As(err, &e) {
		e = &schemas.Error{Code: schemas.CodeFailed, Message: err.Error()} // such as a write that failed
	}
	var body struct {
		Error struct {
			Code       schemas.Code `json:"code"`
			Message    string       `json:"message"`
			Hint       string       `json:"hint"`
			DispatchID string       `json:"dispatchId,omitempty"`
		} `json:"error"`
	}
	body.Error.Code, body.Error.Message, body.Error.Hint = e.Code, e.Message, e.Hint
	body.Error.DispatchID = dispatchOf(err)
	var line bytes.Buffer
	encoder := json.NewEncoder(&line)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(body) // strings alone
	return EscapeControls(line.Bytes())
}

// WantsJSON looks for --json where the flags could not even be parsed.
func WantsJSON(args []string) bool {
	if i := slices.Index(args, "--"); i >= 0 {
		args = args[:i]
	}
	return slices.ContainsFunc(args, func(a string) bool { return a == "--json" || a == "-json" || a == "--json=true" })
}

// EscapeControls writes what steers a terminal in the strings of a JSON text as \u…: the value stays what it is.
func EscapeControls(text []byte) []byte {
	special := func(r rune) bool { return r > ' ' && Steers(r) } // those below can't stand in a string
	if bytes.IndexFunc(text, special) < 0 {
		return text
	}
	out := make([]byte, 0, len(text)+64)
	for _, r := range string(text) {
		if special(r) {
			out = fmt.Appendf(out, "\\u%04x", r)
		} else {
			out = utf8.AppendRune(out, r)
		}
	}
	return out
}

// dispatchError is an error with the dispatch that it is about.
type dispatchError struct {
	id  string
	err error
}

// Error is the text of the error itself.
func (e *dispatchError) Error() string { return e.err.Error() }

// Unwrap returns the error itself.
func (e *dispatchError) Unwrap() error { return e.err }

// WithDispatch is err, about the dispatch of this id: Text and ErrorJSON show it. It is err itself if that is nil, the id is
// empty, or err has one.
func WithDispatch(err error, id string) error {
	if err == nil || id == "" || dispatchOf(err) != "" {
		return err
	}
	return &dispatchError{id, err}
}

func dispatchOf(err error) string {
	var e *dispatchError
	if errors.As(err, &e) {
		return e.id
	}
	return ""
}
