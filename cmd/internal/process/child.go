package process

import (
	"encoding/json"
	"errors"
	"io"

	"github.com/org-runink/runbus/schemas"
)

// Failure is how a child tells its parent why it ends, as a line on standard output like Announce's.
type Failure struct {
	Code    schemas.Code `json:"code"`
	Message string       `json:"message"`
	Hint    string       `json:"hint,omitempty"`
	Exit    int          `json:"exit"`
}

// AnnounceFailure writes err, which ends the process with this status, for the parent.
func AnnounceFailure(w io.Writer, err error, exit int) {
	f := Failure{Code: schemas.CodeFailed, Message: err.Error(), Exit: exit}
	var known *schemas.Error
	if errors.As(err, &known) {
		f.Code, f.Message, f.Hint = known.Code, known.Message, known.Hint
	}
	Announce(w, struct {
		Error Failure `json:"error"`
	}{f})
}

// ParseFailure is the failure in a line of a child, nil when the line is another one.
func ParseFailure(line []byte) *Failure {
	var l struct {
		Error *Failure `json:"error"`
	}
	if json.Unmarshal(line, &l) != nil {
		return nil
	}
	return l.Error
}
