package link

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
	"unicode"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// MaxSkew is how far the clocks of a runner and the control plane may be apart. Certificates are dated back by as much.
const MaxSkew = 5 * time.Minute

// Say sends one frame of an enrolment.
func Say(conn net.Conn, f *runbusv1.EnrolFrame) error { return WriteFrame(conn, f) }

// SayRefused tells the other side why not, in words that are safe to show. It is best effort: the connection ends anyway.
func SayRefused(conn net.Conn, why error) {
	_ = WriteFrame(conn, &runbusv1.EnrolFrame{Said: &runbusv1.EnrolFrame_Refused{Refused: schemas.ToDetail(why)}})
}

// RefusedError is a refusal of the other side: its words, not ours.
type RefusedError struct {
	By  string // `the runner` or `the control plane`
	Why error  // *schemas.Error
}

// Error is the other side's text.
func (e *RefusedError) Error() string { return fmt.Sprintf("%s refused: %v", e.By, e.Why) }

// Unwrap returns the *schemas.Error that came.
func (e *RefusedError) Unwrap() error { return e.Why }

// Hear reads one frame of an enrolment. A refusal of the other side, by name, is an *RefusedError; an end of the connection says
// who ended it.
func Hear(conn net.Conn, by string) (*runbusv1.EnrolFrame, error) {
	f := new(runbusv1.EnrolFrame)
	if err := ReadFrame(conn, f); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("%s ended the connection", by)
		}
		return nil, err
	}
	if d := f.GetRefused(); d != nil {
		return nil, &RefusedError{By: by, Why: foreign(d)}
	}
	return f, nil
}

// maxSaid is how many bytes of a text of the other side are passed on: it may be a stranger's, and gets into logs and answers.
const maxSaid = 1024

// foreign is the other side's refusal, in one line and not too long; nil gives nil.
func foreign(d *runbusv1.ErrorDetail) error {
	if d == nil {
		return nil
	}
	plain := func(s string) string {
		s = strings.ToValidUTF8(s[:min(len(s), maxSaid)], "")
		return strings.Map(func(r rune) rune {
			if unicode.IsControl(r) {
				return ' '
			}
			return r
		}, s)
	}
	return schemas.FromDetail(&runbusv1.ErrorDetail{Code: plain(d.GetCode()), Message: plain(d.GetMessage()), Hint: plain(d.GetHint())})
}

// CheckClocks compares both clocks. The error of clocks that are too far apart tells both times and what to do; both sides say it.
func CheckClocks(controlPlane, runner time.Time) error {
	apart := runner.Sub(controlPlane)
	if apart.Abs() <= MaxSkew {
		return nil
	}
	than := "ahead of"
	if apart < 0 {
		than = "behind"
	}
	return schemas.Errorf(schemas.CodeUnavailable, "the clocks are apart: the runner's (%s) is %s %s the control plane's (%s)",
		runner.UTC().Format(time.RFC3339), apart.Abs().Round(time.Second), than, controlPlane.UTC().Format(time.RFC3339)).
		WithHint(fmt.Sprintf("set the clock that is wrong, for example with NTP: at most %d minutes apart are allowed", MaxSkew/time.Minute))
}
