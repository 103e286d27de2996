package registry

import (
	"time"

	"github.com/org-runink/runbus/schemas"
)

// ManagedName is the display name of the managed runner (SPEC R2).
const ManagedName = "Runink managed"

// managed is `console` as tenant sees it. r.mu must be held.
func (r *Registry) managed(tenant string, now time.Time) seen {
	rn := r.entry(schemas.RunnerRef{Tenant: tenant, Runner: schemas.ConsoleRunner})
	s := rn.seen(now)
	s.holder = ""
	s.candidate = rn.managed(now)
	return s
}

// managed is `console` for dispatch: always there, and fit for work only while a process of its own says so by heartbeat. r.mu
// must be held.
func (rn *runner) managed(now time.Time) Candidate {
	c := rn.candidate(rn.status(now))
	c.Name, c.Link = schemas.ConsoleRunner, LinkLocal
	return c
}

// describeManaged makes r the managed runner. RUNNING is observed by a live heartbeat, and nothing else is (SPEC R7).
func describeManaged(r *Runner) {
	r.ID, r.Name, r.DisplayName, r.Kind, r.Link = schemas.ConsoleRunner, schemas.ConsoleRunner, ManagedName, KindManaged, LinkLocal
	r.State = StateRunning
	if !r.Health.Connected {
		r.State = StateUnknown
		r.Description = "liveness was not observed: the registry has no live heartbeat of the managed runner"
	}
}
