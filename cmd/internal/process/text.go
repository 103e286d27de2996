package process

import (
	"errors"
	"strings"

	"github.com/org-runink/runbus/schemas"
)

// Text is err for a terminal: what went wrong, what to do about it on a line of its own, and the dispatch that it is about. The
// causes that must not cross a wire are shown: this is the process's own terminal.
func Text(err error) string {
	text := err.Error()
	var e *schemas.Error
	if errors.As(err, &e) {
		if e.Cause != nil && !strings.Contains(text, e.Cause.Error()) {
			text += ": " + e.Cause.Error()
		}
		if e.Hint != "" {
			text += "\n  → " + e.Hint
		}
	}
	if id := dispatchOf(err); id != "" && !strings.Contains(text, id) {
		text += "\n  dispatch " + id + ": `runink fetch trace " + id + "` shows what became of it"
	}
	return Printable(text)
}

// Printable is s without anything that steers a terminal: control characters and those that turn the direction of writing
// become a dot. Line feeds and tabs stay.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && Steers(r) {
			return '·'
		}
		return r
	}, s)
}

// Steers reports whether r moves a terminal's cursor, begins an escape sequence, or turns the direction of writing.
func Steers(r rune) bool {
	return r < ' ' || r >= 0x7f && r < 0xa0 || r == '\u2028' || r == '\u2029' || r >= '\u202a' && r <= '\u202e' || r >= '\u2066' && r <= '\u2069'
}
