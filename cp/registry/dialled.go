package registry

import (
	"maps"
	"time"

	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
)

// rosterChanged tells those who wait for a change that the roster has one, and ends the works of d if it was revoked.
func (r *Registry) rosterChanged(d roster.Runner) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if d.State == roster.Revoked {
		r.runnerRevoked(d.Ref())
	}
	r.signal()
}

// outbound reports whether the entry is that of an outbound runner that was ever heard of and not removed since: not a link without
// a hello, and not what a dialled or the managed runner said, which are listed from elsewhere. r.mu must be held.
func (rn *runner) outbound() bool {
	_, linked := rn.links.of(rn.rec.ProcessNonce)
	return (rn.known != nil || rn.live && linked) && !schemas.IsDialledID(rn.ref.Runner) && rn.ref.Runner != schemas.ConsoleRunner
}

// entry is what is known of the process of ref; a runner of which nothing was heard is not connected. r.mu must be held.
func (r *Registry) entry(ref schemas.RunnerRef) *runner {
	if rn := r.fleet[ref.Tenant][ref.Runner]; rn != nil {
		return rn
	}
	return &runner{ref: ref, forgotten: true}
}

// dialled is a runner of the roster with what is known of its process. r.mu must be held.
func (r *Registry) dialled(d roster.Runner, now time.Time) seen {
	rn := r.entry(d.Ref())
	s := rn.seen(now)
	s.dialled, s.holder = &d, ""
	s.candidate = rn.dialled(d, now)
	return s
}

// dialled is the process of a runner of the roster, for dispatch. r.mu must be held.
func (rn *runner) dialled(d roster.Runner, now time.Time) Candidate {
	c := rn.candidate(rn.status(now))
	c.Name, c.Link = d.Name, LinkDialled
	switch d.State {
	case roster.Pending:
		c.Pending, c.Offline = true, "not enrolled yet"
	case roster.Revoked:
		c.Revoked, c.Offline = true, "it was revoked"
	case roster.Active:
		if text := d.Expired(now); text != "" && c.Offline != "" {
			c.Offline = text
		}
	}
	return c
}

// describeDialled adds what the roster says.
func (s *seen) describeDialled(r *Runner) {
	d := s.dialled
	r.Name, r.DisplayName, r.Address, r.Zone, r.State = d.Name, d.Name, d.Address, d.Zone, string(d.State)
	if len(d.Labels) > 0 {
		r.Labels = maps.Clone(d.Labels)
	}
	r.Claims.Name = s.rec.Name
	if r.Health.Signals.Connection == "down" && r.Health.Signals.Heartbeat == heartbeatFresh {
		r.Health.Signals.Heartbeat = "none" // the last one came over a link that is gone
	}
	if d.Current != nil {
		r.Health.CertNotAfter = &d.Current.NotAfter
	}
}

// Runner is the one runner of tenant that idOrName names, as the API shows it; ok is false if there is none, or if several outbound
// runners claim the name. It fails as List does.
func (r *Registry) Runner(tenant, idOrName string) (runner Runner, ok bool, err error) {
	list, err := r.List(tenant)
	if err != nil {
		return Runner{}, false, err
	}
	dialled, found, err := r.d.Roster.Find(tenant, idOrName)
	if err != nil {
		return Runner{}, false, err
	}
	if found {
		idOrName = dialled.ID
	}
	var named []Runner
	for _, runner := range list {
		switch {
		case runner.ID == idOrName:
			return runner, true, nil
		case runner.Name == idOrName:
			named = append(named, runner)
		}
	}
	if len(named) != 1 {
		return Runner{}, false, nil
	}
	return named[0], true, nil
}
