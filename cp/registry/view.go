package registry

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
)

// runner is all that this replica knows of one runner. Guarded by Registry.mu.
type runner struct {
	ref schemas.RunnerRef
	// rec is the last record seen; live is false when its key is gone since. A zero ProcessNonce means never seen.
	rec      Record
	revision uint64
	live     bool
	known    *Known
	knownRev uint64 // revision of known
	work     string // subject of the work of session workOf
	workOf   string
	indexed  string        // the name under which Registry.named has it; "" for none
	changes  atomic.Uint64 // of all this, counted after each
	links    processLinks
	sealing  *sealingKey // of the session, once it was used
	// responders is what became of the last work or order that was published to it.
	responders responders
	watches    *Watch // the last that began; the others are behind it
	forgotten  bool   // the registry has another entry for it, or none
	revoked    bool   // a dialled one: it was revoked while this replica knew of its process
}

// runner finds or makes the entry of ref. r.mu must be held.
func (r *Registry) runner(ref schemas.RunnerRef) *runner {
	tenant := r.fleet[ref.Tenant]
	if tenant == nil {
		tenant = make(map[string]*runner)
		r.fleet[ref.Tenant] = tenant
	}
	rn := tenant[ref.Runner]
	if rn == nil {
		ref.Tenant = shared(ref.Tenant)
		rn = &runner{ref: ref}
		tenant[ref.Runner] = rn
	}
	return rn
}

// update runs change on ref's entry, then everything that follows from a change.
func (r *Registry) update(ref schemas.RunnerRef, change func(*runner)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rn := r.runner(ref)
	meant, name := rn.outbound(), rn.indexed
	change(rn)
	r.review(rn)
	r.index(rn)
	if rn.changes.Add(1); rn.outbound() != meant || rn.indexed != name {
		r.answers.meanings.Add(1)
	}
	if !rn.live && rn.known == nil && len(rn.links) == 0 && rn.watches == nil {
		delete(r.fleet[ref.Tenant], ref.Runner)
		rn.forgotten = true
		if len(r.fleet[ref.Tenant]) == 0 {
			delete(r.fleet, ref.Tenant)
		}
	}
	r.signal()
}

// nameKey is a name within a tenant.
type nameKey struct{ tenant, name string }

// index keeps rn under the name that it has. r.mu must be held.
func (r *Registry) index(rn *runner) {
	name := ""
	if rn.live || rn.known != nil {
		name = rn.name()
	}
	if name == rn.indexed {
		return
	}
	if before := (nameKey{rn.ref.Tenant, rn.indexed}); rn.indexed != "" {
		if delete(r.named[before], rn); len(r.named[before]) == 0 {
			delete(r.named, before)
		}
	}
	if rn.indexed = name; name != "" {
		key := nameKey{rn.ref.Tenant, name}
		if r.named[key] == nil {
			r.named[key] = make(map[*runner]struct{})
		}
		r.named[key][rn] = struct{}{}
	}
}

// name is what the runner calls itself.
func (rn *runner) name() string {
	if rn.rec.Name == "" && rn.known != nil {
		return rn.known.Name
	}
	return rn.rec.Name
}

// signal tells those who wait for a change. r.mu must be held.
func (r *Registry) signal() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// Changed returns a channel that is closed at the next change of the view, or when it is readable again.
func (r *Registry) Changed() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changed
}

// recordChanged takes one change of the heartbeats bucket.
func (r *Registry) recordChanged(row jetstream.Row[Record]) {
	ref, err := schemas.ParseRunnerKey(row.Key)
	if err != nil {
		r.d.Log.Error("foreign key in the heartbeats bucket", "key", row.Key, "error", err)
		return
	}
	linked := true
	r.update(ref, func(rn *runner) {
		rn.revision = row.Revision
		rn.live = !row.Deleted
		if !row.Deleted {
			rn.rec = r.share(row.Value, rn)
			_, linked = rn.links.of(rn.rec.ProcessNonce)
			linked = linked || rn.rec.Left
		}
	})
	if !linked {
		r.askScan() // its connect event may have been lost
	}
}

// knownChanged takes one change of the known bucket.
func (r *Registry) knownChanged(row jetstream.Row[Known]) {
	ref, err := schemas.ParseRunnerKey(row.Key)
	if err != nil {
		r.d.Log.Error("foreign key in the known bucket", "key", row.Key, "error", err)
		return
	}
	r.update(ref, func(rn *runner) {
		rn.known, rn.knownRev = nil, row.Revision
		if !row.Deleted {
			known := row.Value
			known.share(rn.ref)
			rn.known = &known
		}
	})
}

// record is the record of ref as the view has it; ok is false when its key is gone, and rec then is the last one seen.
func (r *Registry) record(ref schemas.RunnerRef) (rec Record, revision uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rn := r.fleet[ref.Tenant][ref.Runner]
	if rn == nil {
		return Record{}, 0, false
	}
	return rn.rec, rn.revision, rn.live
}

// knownRow is what is known of ref and its revision, as the view has it.
func (r *Registry) knownRow(ref schemas.RunnerRef) (known Known, revision uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rn := r.fleet[ref.Tenant][ref.Runner]
	if rn == nil || rn.known == nil {
		return Known{}, 0, false
	}
	return *rn.known, rn.knownRev, true
}

// Bound is the public key that holds ref's id, from the view; false when nobody does. It never reads JetStream: it is for
// the auth callout.
func (r *Registry) Bound(ref schemas.RunnerRef) (publicKey string, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rn := r.fleet[ref.Tenant][ref.Runner]
	if rn == nil || rn.known == nil || rn.known.PublicKey == "" {
		return "", false
	}
	return rn.known.PublicKey, true
}

// status is what can be said of a runner's fitness for work.
type status struct {
	connected, draining bool
	offline             string // why it gets no work; empty when it does
	signals             Signals
}

// heartbeatFresh is Signals.Heartbeat of a process that reports.
const heartbeatFresh = "fresh"

// status judges the signals. The link is that of the process that holds the id; the link of any other says nothing.
func (rn *runner) status(now time.Time) status {
	s := status{signals: Signals{Connection: "down", Heartbeat: "none", Responders: rn.responding()}}
	if !rn.live || rn.rec.Left {
		s.offline = "not connected"
		return s
	}
	age := now.Sub(rn.rec.LastSeen)
	late := age > lateAfter
	switch {
	case late:
		s.signals.Heartbeat = "late"
	case rn.rec.Ready:
		s.signals.Heartbeat = heartbeatFresh
	}
	_, linked := rn.links.of(rn.rec.ProcessNonce)
	if linked {
		s.signals.Connection = "up"
	}
	s.connected = linked && !late
	s.draining = rn.rec.Draining
	switch {
	case !linked:
		s.offline = "not connected"
	case late:
		s.offline = fmt.Sprintf("no heartbeat for %s", age.Round(time.Second))
	case !rn.rec.Ready:
		s.offline = "no heartbeat yet"
	case rn.rec.Draining:
		s.offline = "draining"
	}
	return s
}

// seen is one runner, copied out of the view.
type seen struct {
	candidate Candidate
	status    status
	rec       Record
	known     Known
	holder    string         // public key that holds the id
	ended     bool           // that key was revoked or has expired
	dialled   *roster.Runner // nil for a runner that is not dialled
}

// snapshot copies what is known of the runners of tenant: `console`, then the others by id.
func (r *Registry) snapshot(tenant string) ([]seen, error) {
	if err := r.Readable(); err != nil {
		return nil, err
	}
	dialled, err := r.d.Roster.Runners(tenant)
	if err != nil {
		return nil, err
	}
	now := r.d.Now()
	r.mu.Lock()
	list := make([]seen, 1, 1+len(dialled)+len(r.fleet[tenant]))
	list[0] = r.managed(tenant, now)
	for _, d := range dialled {
		list = append(list, r.dialled(d, now))
	}
	for _, rn := range r.fleet[tenant] {
		if rn.outbound() {
			list = append(list, rn.seen(now))
		}
	}
	r.mu.Unlock()
	for i := range list {
		_, list[i].ended = list[i].candidate.judgeKey(r, list[i].holder)
	}
	slices.SortFunc(list[1:], func(a, b seen) int { return cmp.Compare(a.candidate.Ref.Runner, b.candidate.Ref.Runner) })
	return list, nil
}

// seen copies rn. r.mu must be held.
func (rn *runner) seen(now time.Time) seen {
	s := seen{status: rn.status(now), rec: rn.rec, holder: rn.holder()}
	if rn.known != nil {
		s.known = *rn.known
	}
	s.candidate = rn.candidate(s.status)
	return s
}

// candidate is rn, with this status, for dispatch. r.mu must be held.
func (rn *runner) candidate(s status) Candidate {
	link, _ := rn.links.of(rn.rec.ProcessNonce)
	if rn.workOf != rn.rec.Session {
		rn.work, rn.workOf = schemas.WorkSubject(rn.ref, rn.rec.Session), rn.rec.Session
	}
	return Candidate{
		Ref: rn.ref, Name: rn.name(), Link: LinkOutbound,
		Connected: s.connected, Draining: s.draining, Offline: s.offline,
		Session: rn.rec.Session, Work: rn.work, Limit: rn.rec.Limit, Pid: rn.rec.Pid,
		SessionAt: rn.rec.SessionAt, LinkAt: link.at,
		Deaf: s.signals.Responders == RespondersNone, Unheard: s.signals.Responders != RespondersHeard,
		Can: bus.AbilitiesOf(rn.rec.Capabilities), of: rn,
	}
}

// holder is the public key that holds the id, "" if none does. r.mu must be held.
func (rn *runner) holder() string {
	if rn.known == nil {
		return ""
	}
	return rn.known.PublicKey
}

// Snapshot is every runner of tenant for dispatch.Select, `console` and then the others by id. It returns
// ErrRegistryUnavailable while the view isn't confirmed against the leader (SPEC D7).
func (r *Registry) Snapshot(tenant string) ([]Candidate, error) {
	list, err := r.snapshot(tenant)
	if err != nil {
		return nil, err
	}
	candidates := make([]Candidate, len(list))
	for i := range list {
		candidates[i] = list[i].candidate
	}
	return candidates, nil
}

// List is every runner of tenant as the API shows it, `console` and then the others by id, and nobody else's (SPEC E9, R3). It
// returns ErrRegistryUnavailable while the view isn't confirmed.
func (r *Registry) List(tenant string) ([]Runner, error) {
	list, err := r.snapshot(tenant)
	if err != nil {
		return nil, err
	}
	runners := make([]Runner, len(list))
	for i := range list {
		runners[i] = list[i].runner()
	}
	return runners, nil
}
