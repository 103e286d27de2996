package link

import (
	"errors"
	"fmt"
	"io"
	"net"
	"time"

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
		return nil, &RefusedError{By: by, Why: schemas.FromDetail(d)}
	}
	return f, nil
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
