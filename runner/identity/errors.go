package identity

import (
	"fmt"
	"time"

	"github.com/org-runink/runbus/schemas"
)

const startOver = "revoke the runner (`runink runner revoke`), create it again, and start on an empty state folder"

// damaged never quotes what it read.
func damaged(file, why string) *schemas.Error {
	return schemas.Errorf(schemas.CodeInvalid, "the state folder is damaged: %s: %s", file, why).
		WithHint("restore the folder from a backup; without one " + startOver)
}

func errNoTicket() *schemas.Error {
	return schemas.Errorf(schemas.CodeInvalid, "this runner is not enrolled and has no ticket").
		WithHint("create the runner with `runink runner create --address HOST:PORT NAME` and paste the command that it prints, or set CORE_RUNNER_TICKET or CORE_RUNNER_TICKET_FILE")
}

func errEnrolledAlready(t schemas.Ticket) *schemas.Error {
	return schemas.Errorf(schemas.CodeConflict, "the runner %s (%s) is enrolled already: a ticket is not needed", t.RunnerID, t.Name).
		WithHint("start it without CORE_RUNNER_TICKET and CORE_RUNNER_TICKET_FILE")
}

func errOtherRunner(w who, t schemas.Ticket) *schemas.Error {
	return schemas.Errorf(schemas.CodeConflict, "the ticket is of the runner %s (%s), and the state folder belongs to the runner %s (%s)", t.RunnerID, t.Name, w.ID, w.Name).
		WithHint("give each runner a state folder of its own (--state-dir), or empty this one if that runner is gone")
}

func errOtherCA(t schemas.Ticket) *schemas.Error {
	return schemas.Errorf(schemas.CodeConflict, "the ticket is of another runner CA than the enrolment of %s that is under way here", t.RunnerID).
		WithHint("empty the state folder, or use another one (--state-dir), and start again with the new ticket")
}

func (s *Store) errRevoked() *schemas.Error {
	text := "this runner was revoked and can't be started again"
	if s.revoked != "" {
		text += ": " + s.revoked
	}
	return schemas.Errorf(schemas.CodeRunnerRevoked, "%s", text).
		WithHint("create a new runner and give it an empty state folder (--state-dir)")
}

// ErrExpired says that a certificate is past renewal (SPEC C13).
func ErrExpired(end, now time.Time) *schemas.Error {
	return schemas.Errorf(schemas.CodeForbidden, "certificate expired: revoke and create again (it ended at %s, and can be renewed for %s after that; the clock here says %s)",
		stamp(end), days(RenewableFor), stamp(now)).WithHint("if that is not the time, set this host's clock; else " + startOver)
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func days(d time.Duration) string { return fmt.Sprintf("%d days", d/(24*time.Hour)) }
