package runner

import (
	"fmt"
	"time"

	"github.com/org-runink/runbus/runner/identity"
)

const (
	// todoNotYet is of a folder that may be missing because another is meant: one that is as it should be before the first start.
	todoNotYet = "before the first start nothing; for a runner that ran here before, name its folder by CORE_RUNNER_STATE_DIR (--state-dir)"
	todoFolder = "mend that, or name another folder by CORE_RUNNER_STATE_DIR (--state-dir)"
	todoTicket = "mend that, or make a new ticket with `runink runner token NAME`"
)

// identity looks at the state folder of a runner that is dialled, as its start does.
func (d *doctor) identity() finding {
	folder, err := identity.Look(d.cfg.StateDir)
	if err != nil {
		return refused(err, todoFolder)
	}
	if folder.Missing() {
		if err := folder.Makeable(); err != nil {
			return refused(err, todoFolder)
		}
		d.folder = folder
		return warn(d.cfg.StateDir+" is not there yet: the runner makes it", todoNotYet)
	}
	if err := folder.Writable(); err != nil {
		return refused(err, todoFolder)
	}
	if folder.State() == identity.Revoked || folder.State() == identity.Enrolled {
		if err := folder.Usable(d.o.Now()); err != nil {
			return refused(err, todoFolder)
		}
	}
	d.folder = folder
	saw := fmt.Sprintf("%s can be written: %s", d.cfg.StateDir, folder.State())
	if id := folder.RunnerID(); id != "" {
		saw += ", runner " + id
	}
	return good("%s", saw)
}

// ticket looks at the ticket of a runner that is dialled, and whether one is needed: in the words of a start, and without using it up.
func (d *doctor) ticket() finding {
	switch {
	case d.o.NoTicket != nil:
		return refused(d.o.NoTicket, todoTicket)
	case d.folder == nil:
		if d.cfg.Ticket != nil {
			if err := identity.Fresh(*d.cfg.Ticket, d.o.Now()); err != nil {
				return refused(err, todoTicket)
			}
		}
		return finding{CheckSkip, "not looked at: the runner can't start on its state folder", ""}
	}
	if err := ticketMissed(d.cfg.TicketGone, d.folder.State()); err != nil {
		return refused(err, todoTicket)
	}
	if err := d.folder.Admits(d.cfg.Ticket, d.o.Now()); err != nil {
		return refused(err, todoTicket)
	}
	switch {
	case d.folder.State() == identity.Enrolled:
		return good("none is needed: the runner is enrolled")
	case d.cfg.Ticket == nil:
		return warn("an enrolment is under way and there is no ticket: it ends only if the certificate was issued already", "start the runner with the ticket, or with a new one: `runink runner token NAME`")
	}
	t := d.cfg.Ticket
	if d.folder.State() == identity.Pending && !d.o.Now().Before(t.ExpiresAt) {
		return warn(fmt.Sprintf("it expired at %s; the enrolment that it began goes on, in case its certificate was issued in time", t.ExpiresAt.UTC().Format(time.RFC3339)),
			"if the runner does not become ACTIVE, start it with a new one: `runink runner token NAME`")
	}
	return good("of the runner %s (%s), until %s", t.RunnerID, t.Name, t.ExpiresAt.UTC().Format(time.RFC3339))
}
