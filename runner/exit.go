package runner

import (
	"errors"
	"fmt"
)

// Exit statuses of a runner (SPEC, "Interfaces that are fixed now").
const (
	ExitOK       = 0  // drained, or told goodbye
	ExitFailed   = 1  // anything else
	ExitConfig   = 2  // configuration
	ExitReplaced = 10 // another process took the id: don't restart
	ExitRefused  = 11 // the credential is refused for good: don't restart
)

// ExitError ends a runner with a status of its own.
type ExitError struct {
	Code int
	Err  error
}

// Error is the text of Err.
func (e *ExitError) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e *ExitError) Unwrap() error { return e.Err }

// ExitCode is the status for what Run or New returned: ExitOK for nil, ExitFailed for an error that is not an *ExitError.
func ExitCode(err error) int {
	if err == nil {
		return ExitOK
	}
	var e *ExitError
	if errors.As(err, &e) {
		return e.Code
	}
	return ExitFailed
}

func configError(format string, args ...any) error {
	return &ExitError{Code: ExitConfig, Err: fmt.Errorf(format, args...)}
}
