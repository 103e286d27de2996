package registry

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// Every dispatch asks who a name means, and mostly gets the answer that the one before got. An answer is kept as long as it is the one that
// would be found anew: all that it was made of counts its changes, and it knows when time alone would change it. Only answers are kept in
// which all runners are fit for work.

// mostAnswers is how many answers are kept; then all are dropped.
const mostAnswers = 4096

// believed is for how long an answer that held is taken to hold without a look at the clocks, as long as nothing changes: what time alone
// changes is a matter of seconds.
const believed = 20 * time.Millisecond

// answers are those that Named has found. The zero value is ready. Safe for concurrent use.
type answers struct {
	// meanings counts what changes the runners that a name may mean: which there are, and their names.
	meanings atomic.Uint64

	mu    sync.RWMutex
	known map[nameKey]*answer
}

// answer is who a name means. It never changes.
type answer struct {
	list []Candidate

	of                     []*runner // those of list
	changes                []uint64  // of each of these
	meanings, roster, keys uint64
	fresh                  time.Time // by Deps.Now: until then, that included, no heartbeat is late
	keyEnds                time.Time // by the clock of auth: then a key expires

	until atomic.Int64 // time, by Registry.clock, until which it is believed
}

func (s *answers) get(key nameKey) *answer {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.known[key]
}

func (s *answers) put(key nameKey, a *answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known == nil || len(s.known) >= mostAnswers {
		s.known = make(map[nameKey]*answer)
	}
	s.known[key] = a
}

// unchanged reports whether all that a was made of is as it was.
func (a *answer) unchanged(r *Registry) bool {
	if a.meanings != r.answers.meanings.Load() || a.roster != r.d.Roster.Changes() || a.keys != r.d.Auth.KeyChanges() {
		return false
	}
	for i, rn := range a.of {
		if a.changes[i] != rn.changes.Load() {
			return false
		}
	}
	return true
}

// holds reports whether a is what would be found now.
func (a *answer) holds(r *Registry, now time.Time) bool {
	return a.unchanged(r) && !now.After(a.fresh) && (a.keyEnds.IsZero() || !r.d.Auth.Expired(a.keyEnds))
}

// clock is a monotonic time.
func (r *Registry) clock() int64 { return int64(time.Since(r.began)) }

// Named is every runner of tenant that name may mean, by id: `console`, or the dialled runner whose id or registered name it is,
// else the outbound ones whose id or claimed name it is. A process that claims a name thus never gets the work of a runner that
// people gave this name. It costs the same whatever the size of the fleet, and fails as Snapshot does. What it returns may be another's,
// too: it must not be changed.
func (r *Registry) Named(tenant, name string) ([]Candidate, error) {
	key, clock := nameKey{tenant, name}, r.clock()
	kept := r.answers.get(key)
	if kept != nil && clock < kept.until.Load() && kept.unchanged(r) {
		return kept.list, nil
	}
	if err := r.Readable(); err != nil {
		return nil, err
	}
	now := r.d.Now()
	if kept != nil && kept.holds(r, now) {
		if r.realTime {
			kept.until.Store(clock + int64(believed))
		}
		return kept.list, nil
	}
	// The counts first: what changes while it is looked up makes the answer one that doesn't hold.
	a := &answer{meanings: r.answers.meanings.Load(), roster: r.d.Roster.Changes(), keys: r.d.Auth.KeyChanges()}
	dialled, found, err := r.d.Roster.Find(tenant, name)
	if err != nil {
		return nil, err
	}
	switch {
	case name == schemas.ConsoleRunner:
		r.mu.Lock()
		defer r.mu.Unlock()
		return []Candidate{r.entry(schemas.RunnerRef{Tenant: tenant, Runner: name}).managed(now)}, nil
	case found:
		r.mu.Lock()
		defer r.mu.Unlock()
		return []Candidate{r.entry(dialled.Ref()).dialled(dialled, now)}, nil
	}
	if r.ask(a, key, now) {
		r.answers.put(key, a)
	}
	return a.list, nil
}

// ask fills an answer with the outbound runners that a name means. It reports whether the answer may be kept.
func (r *Registry) ask(a *answer, key nameKey, now time.Time) bool {
	var holders []string
	add := func(rn *runner) {
		a.list = append(a.list, rn.candidate(rn.status(now)))
		a.of, a.changes = append(a.of, rn), append(a.changes, rn.changes.Load())
		holders = append(holders, rn.holder())
		if fresh := rn.rec.LastSeen.Add(lateAfter); a.fresh.IsZero() || fresh.Before(a.fresh) {
			a.fresh = fresh
		}
	}
	r.mu.Lock()
	if rn := r.fleet[key.tenant][key.name]; rn != nil && rn.outbound() {
		add(rn)
	}
	for rn := range r.named[key] {
		if rn.ref.Runner != key.name && rn.outbound() {
			add(rn)
		}
	}
	r.mu.Unlock()
	keep := len(a.list) > 0
	for i := range a.list {
		c := &a.list[i]
		ends, _ := c.judgeKey(r, holders[i])
		if !ends.IsZero() && (a.keyEnds.IsZero() || ends.Before(a.keyEnds)) {
			a.keyEnds = ends
		}
		keep = keep && c.Offline == "" && (!ends.IsZero() || holders[i] == "")
	}
	slices.SortFunc(a.list, func(a, b Candidate) int { return cmp.Compare(a.Ref.Runner, b.Ref.Runner) })
	return keep
}

// judgeKey takes a runner out whose key no longer holds, and reports whether it did; of a key that holds it returns when that ends. Called
// without r.mu: auth has locks of its own.
func (c *Candidate) judgeKey(r *Registry, holder string) (ends time.Time, ended bool) {
	if holder == "" {
		return time.Time{}, false
	}
	key, err := r.d.Auth.KeyByPublic(holder)
	switch {
	case err == nil:
		return key.ExpiresAt, false
	case key.RevokedAt != nil:
		c.Revoked = true
		c.Offline = keyWasRevoked
		return time.Time{}, true
	case schemas.CodeOf(err) == schemas.CodeForbidden:
		c.Offline = "its service-account key has expired"
		return time.Time{}, true
	}
	return time.Time{}, false
}
