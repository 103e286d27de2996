package identity

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// The variables that bring a ticket (SPEC C4).
const (
	EnvTicket     = "CORE_RUNNER_TICKET"
	EnvTicketFile = "CORE_RUNNER_TICKET_FILE"
)

// ErrTicketGone says that the file which CORE_RUNNER_TICKET_FILE names is not there: a runner that is enrolled does without it.
var ErrTicketGone = errors.New("the ticket file is gone")

// TakeTicket reads the ticket out of CORE_RUNNER_TICKET or the file that CORE_RUNNER_TICKET_FILE names; nil when neither is set. The
// file must be regular and no link, of this user, and of mode 0600 or 0400. Both set is refused. forget clears the variable, also
// when what it holds is wrong, before TakeTicket returns (selfguard.ForgetEnv). An error is of CodeInvalid and never repeats the
// ticket; that of a file that is not there is ErrTicketGone too. The expiry is Fresh's.
func TakeTicket(getenv func(string) string, forget func(names ...string) error) (*schemas.Ticket, error) {
	text, file := getenv(EnvTicket), getenv(EnvTicketFile)
	if text != "" {
		if err := forget(EnvTicket); err != nil {
			return nil, fmt.Errorf("take the ticket out of the environment: %w", err)
		}
	}
	source := EnvTicket
	switch {
	case text != "" && file != "":
		return nil, schemas.Errorf(schemas.CodeInvalid, "%s and %s are both set: a runner has one ticket", EnvTicket, EnvTicketFile).
			WithHint("unset one of them")
	case text == "" && file == "":
		return nil, nil
	case file != "":
		if strings.HasPrefix(strings.TrimSpace(file), schemas.TicketPrefix) {
			return nil, schemas.Errorf(schemas.CodeInvalid, "%s holds a ticket: it must name a file", EnvTicketFile).WithHint("set " + EnvTicket + " to the ticket")
		}
		source = EnvTicketFile
		body, err := readPrivate(file, "the ticket file "+file)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, schemas.Wrap(schemas.CodeInvalid, ErrTicketGone, fmt.Sprintf("%s: the ticket file %s does not exist", EnvTicketFile, file)).
				WithHint("make a new ticket with `runink runner token NAME` and put it into that file (mode 0600); a runner that is enrolled needs none: " +
					"start that one without " + EnvTicketFile + ", on its own state folder (--state-dir)")
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", EnvTicketFile, err)
		}
		text = string(body)
	}
	if text = strings.TrimSpace(text); text == "" {
		return nil, schemas.Errorf(schemas.CodeInvalid, "%s: there is no ticket in it", source)
	}
	t, err := schemas.ParseTicket(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", source, err)
	}
	return &t, nil
}

// Admit decides whether a runner starts on s, and returns the ticket to prove, if any. Without a ticket it is Usable. With one the
// enrolment begins or goes on; a ticket of a runner that is enrolled here already is not needed and said so in the log, since the
// variable may stay set in a unit or a container. It is an error that says what to do when the ticket has expired, or is of
// another runner or CA than the folder; see Begin.
func (s *Store) Admit(t *schemas.Ticket, now time.Time) (*schemas.Ticket, error) {
	if err := s.admits(t, now); err != nil {
		return nil, err
	}
	switch state := s.State(); {
	case state == Enrolled && t != nil:
		s.log.Warn("this runner is enrolled already: the ticket is not needed and not used", "runner", t.RunnerID, "name", t.Name)
		return nil, nil
	case t == nil:
		if state == Pending {
			s.log.Warn("an enrolment is under way and there is no ticket: it ends only if the certificate was issued already; else start again with the ticket, or a new one", "runner", s.RunnerID())
		}
		return nil, nil
	case Fresh(*t, now) != nil:
		s.log.Warn("the ticket has expired; the enrolment that it began goes on, in case its certificate was issued in time", "runner", t.RunnerID, "expired", t.ExpiresAt)
	}
	return t, s.Begin(*t)
}

// admits is why Admit would refuse.
func (s *Store) admits(t *schemas.Ticket, now time.Time) error {
	state, id := s.State(), s.RunnerID()
	if t == nil || state == Revoked || state == Enrolled && id == t.RunnerID {
		return s.Usable(now)
	}
	if err := Fresh(*t, now); err != nil && (state != Pending || id != t.RunnerID) {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fits(*t)
}

// Fresh returns nil while the ticket can enrol at now, by this host's clock; else an error that shows both times. An enrolment that is
// under way may go on with an expired one: its certificate may have been issued in time.
func Fresh(t schemas.Ticket, now time.Time) error {
	if now.Before(t.ExpiresAt) {
		return nil
	}
	return schemas.Errorf(schemas.CodeInvalid, "the ticket expired at %s, and the clock here says %s", stamp(t.ExpiresAt), stamp(now)).
		WithHint("issue a new token with `runink runner token NAME`; if that is not the time, set this host's clock first")
}

// RefuseArgument returns an error if one of a program's arguments holds a ticket: others on the host can read command lines.
func RefuseArgument(args []string) error {
	for _, a := range args {
		if strings.Contains(a, schemas.TicketPrefix) {
			return schemas.Errorf(schemas.CodeInvalid, "there is a ticket on the command line, where every user of this host can read it").
				WithHint("set " + EnvTicket + ", or " + EnvTicketFile + " to a file of mode 0600; this ticket should be replaced: `runink runner token NAME`")
		}
	}
	return nil
}
