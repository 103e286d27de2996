package registry

import (
	"cmp"
	"slices"
	"time"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
)

// Runner is one runner as the API shows it (SPEC R3).
type Runner struct {
	ID          string            `json:"id"`
	Name        string            `json:"name"`
	DisplayName string            `json:"displayName"`
	Kind        string            `json:"kind"`    // `self_hosted`, or `managed` for `console`
	Address     string            `json:"address"` // empty for a runner that is not dialled
	Zone        string            `json:"zone"`
	Labels      map[string]string `json:"labels"`
	// State is `PENDING`, `ACTIVE` or `REVOKED`; an outbound runner is ACTIVE until the key that holds its id is revoked. That of
	// `console` is `RUNNING` or `UNKNOWN` (SPEC R7).
	State string `json:"state"`
	// Description says more of the state; empty where there is nothing to say.
	Description string `json:"description,omitempty"`
	Link        string `json:"link"` // `outbound`, `dialled` or `local`
	// ComputeUnits is the measured capacity; 0 when it isn't measured.
	ComputeUnits int    `json:"computeUnits"`
	Claims       Claims `json:"claims"`
	Health       Health `json:"health"`
}

// Claims are the runner's own statements about itself (SPEC E9): nobody has checked them.
type Claims struct {
	Name         string   `json:"name"`
	Version      string   `json:"version"`
	Capabilities []string `json:"capabilities"`
	LoadScore    float64  `json:"loadScore"`
	Pid          int64    `json:"pid"`
	Policy       *Policy  `json:"policy,omitempty"` // absent for a runner that tells of none
}

// Health says whether the runner can take work, and if not, which signal failed. Version, InFlight and Limit are claims.
type Health struct {
	// Connected is true when the runner's link is up and its heartbeats come.
	Connected bool `json:"connected"`
	// Dispatchable is true when work that is sent to it now should arrive; Detail says why not.
	Dispatchable bool       `json:"dispatchable"`
	Detail       string     `json:"detail,omitempty"`
	LastSeen     *time.Time `json:"lastSeen"`
	Version      string     `json:"version"`
	// CertNotAfter is the end of the certificate of a dialled runner; null for one that has none.
	CertNotAfter *time.Time `json:"certNotAfter"`
	InFlight     int        `json:"inFlight"`
	Limit        int        `json:"limit"`
	// LimitEnforced is always true: the runner itself refuses what is over its limit (SPEC D6).
	LimitEnforced bool    `json:"limitEnforced"`
	Draining      bool    `json:"draining"`
	Signals       Signals `json:"signals"`
}

// Signals are the observations behind Connected, each by itself.
type Signals struct {
	Connection string `json:"connection"` // `up` or `down`
	Heartbeat  string `json:"heartbeat"`  // `fresh`, `late`, `none`, or `ended` for an outbound runner whose key was revoked or has expired
	// Responders is `heard` when what was last published to the runner's session arrived, `none` when the bus said that nobody
	// listens, and `not asked` when nothing was published since it was linked.
	Responders string `json:"responders"`
}

// shown is without what was true of a link that is gone.
func (s Signals) shown() Signals {
	if s.Connection == "down" && s.Responders == RespondersHeard {
		s.Responders = RespondersUnasked
	}
	return s
}

// Candidate is one runner of a tenant as dispatch.Select sees it.
type Candidate struct {
	Ref  schemas.RunnerRef
	Name string // that of a dialled runner is unique among those; that of any other is claimed
	// Revoked: the key that holds the id was revoked. Pending: registered and never enrolled (dialled runners only).
	Revoked, Pending bool
	// Connected: the link is up and the process said hello. Draining: it takes no new work.
	Connected, Draining bool
	// Work is the subject of the session's work.
	Work string
	// Can is what the runner knows of what not every runner does.
	Can bus.Abilities
	// Deaf: nobody listened on the session's subjects when something was last published there. Unheard: that, or nothing that was
	// published there is known to have arrived.
	Deaf, Unheard bool
	// Offline says why it can't take work now; empty when it can.
	Offline string
	Session string
	Limit   int
	// SessionAt and LinkAt are when the session was given and when this replica saw the link come up.
	SessionAt, LinkAt time.Time
	Link              string // `outbound`, `dialled` or `local`
	Pid               int64

	of *runner // nil for one that is not the registry's
}

// Label is what texts call the runner: the name that people gave it, or its id.
func (c Candidate) Label() string {
	if c.Link == LinkDialled {
		return c.Name
	}
	return c.Ref.Runner
}

// The values of Runner and Candidate that name what a runner is.
const (
	KindSelfHosted = "self_hosted"
	KindManaged    = "managed"

	LinkOutbound = "outbound"
	LinkDialled  = "dialled"
	LinkLocal    = "local"

	StatePending = string(roster.Pending)
	StateActive  = string(roster.Active)
	StateRevoked = string(roster.Revoked)
	StateRunning = "RUNNING"
	StateUnknown = "UNKNOWN"
)

// runner is the API's view of one runner. Claims outlive the process: they are those of the last one seen.
func (s *seen) runner() Runner {
	r := s.selfHosted()
	switch {
	case s.dialled != nil:
		s.describeDialled(&r)
	case s.candidate.Link == LinkLocal:
		describeManaged(&r)
	}
	return r
}

// selfHosted is what there is to say of an outbound runner.
func (s *seen) selfHosted() Runner {
	state := StateActive
	if s.candidate.Revoked {
		state = StateRevoked
	}
	name := cmp.Or(s.candidate.Name, s.candidate.Ref.Runner)
	lastSeen := s.rec.LastSeen
	if s.known.LastSeen.After(lastSeen) {
		lastSeen = s.known.LastSeen
	}
	version := cmp.Or(s.rec.Version, s.known.Version)
	r := Runner{
		ID: s.candidate.Ref.Runner, Name: name, DisplayName: name, Kind: KindSelfHosted,
		Labels: map[string]string{}, State: state, Link: s.candidate.Link,
		Claims: Claims{
			Name: s.candidate.Name, Version: version, Capabilities: slices.Clone(s.rec.Capabilities),
			LoadScore: s.rec.LoadScore, Pid: s.rec.Pid, Policy: s.rec.Policy,
		},
		Health: Health{
			Connected: s.candidate.Connected, Dispatchable: s.candidate.Offline == "", Detail: s.candidate.Offline,
			Version: version, InFlight: s.rec.InFlight, Limit: s.rec.Limit, LimitEnforced: true,
			Draining: s.candidate.Draining, Signals: s.status.signals.shown(),
		},
	}
	if r.Claims.Capabilities == nil {
		r.Claims.Capabilities = []string{}
	}
	if s.ended { // what came before tells nothing of a process that nobody listens to any more
		r.Health.Connected, r.Health.Signals.Heartbeat = false, "ended"
	}
	if !r.Health.Connected {
		r.Health.InFlight = 0
	}
	if r.Health.Dispatchable && s.candidate.Deaf {
		r.Health.Dispatchable, r.Health.Detail = false, "no responders: nobody listened when work was last sent"
	}
	if !lastSeen.IsZero() {
		r.Health.LastSeen = &lastSeen
	}
	return r
}
