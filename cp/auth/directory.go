package auth

import (
	"cmp"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/org-runink/runbus/jetstream"
)

// underWay is how long an older row may come after the removal of its record, and more than that.
const underWay = time.Hour

// tomb is a record that was removed, as of this revision.
type tomb struct {
	key      string
	revision uint64
	at       time.Time // when that was taken in
}

// directory is the view of the identities, decoded and indexed. Rows come from the watch and from this process's own
// writes, in any order; the revision decides which is the newer.
type directory struct {
	log *slog.Logger

	changes atomic.Uint64 // of public, counted after each

	mu        sync.RWMutex
	complete  bool              // the initial state is in: what changes now is news
	revisions map[string]uint64 // by bucket key
	tombs     []tomb            // in the order of time: what revisions need not have for ever
	tenants   map[string]tenantRecord
	people    map[string]personRecord  // by bucket key
	sessions  map[string]sessionRecord // by token hash
	keys      map[string]keyRecord     // by bucket key
	public    map[string]Key           // by public key: an index of keys
	onRevoked []func(Key)
}

func newDirectory(log *slog.Logger) *directory {
	return &directory{
		log: log, revisions: map[string]uint64{}, tenants: map[string]tenantRecord{}, people: map[string]personRecord{},
		sessions: map[string]sessionRecord{}, keys: map[string]keyRecord{}, public: map[string]Key{},
	}
}

// loaded says that the initial state is in.
func (d *directory) loaded() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.complete = true
}

// apply takes one row in. It calls the functions of OnKeyRevoked for each key that it sees revoked for the first time.
func (d *directory) apply(row jetstream.Row[record]) {
	revoked, tell := d.take(row)
	for _, key := range revoked {
		for _, fn := range tell {
			fn(key)
		}
	}
}

func (d *directory) take(row jetstream.Row[record]) (revoked []Key, tell []func(Key)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if row.Deleted {
		if row.Revision != 0 && row.Revision < d.revisions[row.Key] {
			return nil, nil
		}
		d.bury(row.Key, row.Revision)
		return nil, nil
	}
	if row.Revision <= d.revisions[row.Key] {
		return nil, nil
	}
	revoked, err := d.put(row.Key, row.Value)
	if err != nil {
		// The old state stays: an unreadable record must not let anybody in, and must not throw everybody out either.
		d.log.Error("unreadable identity record", "key", row.Key, "revision", row.Revision, "error", err)
		return nil, nil
	}
	d.revisions[row.Key] = row.Revision
	if !d.complete {
		return nil, nil
	}
	return revoked, slices.Clone(d.onRevoked)
}

func (d *directory) put(key string, value record) (revoked []Key, err error) {
	switch {
	case strings.HasPrefix(key, tenantPrefix):
		return nil, decodeInto(d.tenants, strings.TrimPrefix(key, tenantPrefix), value)
	case strings.HasPrefix(key, personPrefix), key == operatorKey:
		return nil, decodeInto(d.people, key, value)
	case strings.HasPrefix(key, sessionPrefix):
		return nil, decodeInto(d.sessions, strings.TrimPrefix(key, sessionPrefix), value)
	case strings.HasPrefix(key, keyPrefix):
		old := d.keys[key]
		if err := decodeInto(d.keys, key, value); err != nil {
			return nil, err
		}
		return d.index(old, d.keys[key]), nil
	}
	return nil, nil // a kind of a later version
}

// index replaces the entries of one name by those of its new record and returns the keys that were revoked by it.
func (d *directory) index(old, now keyRecord) (revoked []Key) {
	for _, k := range now.Keys {
		before := d.public[k.PublicKey]
		if k.RevokedAt != nil && before.RevokedAt == nil {
			revoked = append(revoked, k)
		}
	}
	for _, k := range old.Keys {
		delete(d.public, k.PublicKey)
	}
	for _, k := range now.Keys {
		d.public[k.PublicKey] = k
	}
	d.changes.Add(1)
	return revoked
}

func (d *directory) remove(key string) {
	switch {
	case strings.HasPrefix(key, tenantPrefix):
		delete(d.tenants, strings.TrimPrefix(key, tenantPrefix))
	case strings.HasPrefix(key, personPrefix), key == operatorKey:
		delete(d.people, key)
	case strings.HasPrefix(key, sessionPrefix):
		delete(d.sessions, strings.TrimPrefix(key, sessionPrefix))
	case strings.HasPrefix(key, keyPrefix):
		d.index(d.keys[key], keyRecord{})
		delete(d.keys, key)
	}
}

func decodeInto[T any](m map[string]T, key string, value record) error {
	var v T
	if err := json.Unmarshal(value, &v); err != nil {
		return err
	}
	m[key] = v
	return nil
}

// wrote takes in what this process wrote itself, so that it sees its own writes at once.
func wrote[T any](d *directory, key string, v T, revision uint64) {
	body, err := json.Marshal(v)
	if err != nil { // the same value was just written as JSON
		d.log.Error("encode an identity record", "key", key, "error", err)
		return
	}
	d.apply(jetstream.Row[record]{Key: key, Value: body, Revision: revision})
}

// deleted takes in that this process deleted the record of that revision.
func (d *directory) deleted(key string, revision uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.revisions[key] > revision {
		return
	}
	d.bury(key, revision)
}

// bury removes a record. What is older, and still under way, must not bring it back; long after that nothing is kept of it, since no two
// sessions have one key.
func (d *directory) bury(key string, revision uint64) {
	d.remove(key)
	d.revisions[key] = revision
	now := time.Now()
	d.tombs = append(d.tombs, tomb{key, revision, now})
	for len(d.tombs) > 0 && now.Sub(d.tombs[0].at) > underWay {
		if old := d.tombs[0]; d.revisions[old.key] == old.revision { // else it was made again, or removed once more
			delete(d.revisions, old.key)
		}
		d.tombs = d.tombs[1:]
	}
}

func (d *directory) revision(key string) uint64 {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.revisions[key]
}

func (d *directory) tenant(name string) (tenantRecord, bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	t, ok := d.tenants[name]
	return t, ok
}

func (d *directory) allTenants() []Tenant {
	d.mu.RLock()
	defer d.mu.RUnlock()
	out := make([]Tenant, 0, len(d.tenants))
	for _, t := range d.tenants {
		out = append(out, Tenant(t))
	}
	slices.SortFunc(out, func(a, b Tenant) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// session returns a session and its person. A session whose person was removed, or whose sessions were ended, is none.
func (d *directory) session(hash string) (sessionRecord, personRecord, bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	s, ok := d.sessions[hash]
	if !ok {
		return sessionRecord{}, personRecord{}, false
	}
	p, ok := d.people[s.personKey()]
	return s, p, ok && s.Generation != "" && p.Generation == s.Generation
}

// liveAdmins counts the sessions of each ORG_ADMIN of a tenant who has one.
func (d *directory) liveAdmins(tenant string, now time.Time) map[string]int {
	d.mu.RLock()
	defer d.mu.RUnlock()
	live := map[string]int{}
	for _, s := range d.sessions {
		p, ok := d.people[s.personKey()]
		if ok && p.Tenant == tenant && p.Role == RoleOrgAdmin && s.Generation != "" && p.Generation == s.Generation && now.Before(s.ExpiresAt) {
			live[p.Name]++
		}
	}
	return live
}

// deadSessions returns at most most hashes of sessions that are expired or count no more.
func (d *directory) deadSessions(now time.Time, most int) []string {
	d.mu.RLock()
	defer d.mu.RUnlock()
	var out []string
	for hash, s := range d.sessions {
		if len(out) == most {
			break
		}
		// A young session without a person may be one that is being made: its person follows.
		p, ok := d.people[s.personKey()]
		counts := ok && p.Generation == s.Generation
		if !now.Before(s.ExpiresAt) || !counts && now.Sub(s.CreatedAt) > time.Hour {
			out = append(out, hash)
		}
	}
	return out
}

func (d *directory) peopleOf(tenant string) []Person {
	d.mu.RLock()
	defer d.mu.RUnlock()
	out := []Person{}
	for key, p := range d.people {
		if inTenant(key, personPrefix, tenant) {
			out = append(out, Person{Tenant: p.Tenant, Name: p.Name, Role: p.Role, CreatedAt: p.CreatedAt, CreatedBy: p.CreatedBy})
		}
	}
	slices.SortFunc(out, func(a, b Person) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

func (d *directory) keysOf(tenant string) []Key {
	d.mu.RLock()
	defer d.mu.RUnlock()
	out := []Key{}
	for name, r := range d.keys {
		if inTenant(name, keyPrefix, tenant) {
			out = append(out, r.Keys...)
		}
	}
	slices.SortFunc(out, func(a, b Key) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), a.CreatedAt.Compare(b.CreatedAt))
	})
	return out
}

func (d *directory) byPublic(public string) (Key, bool) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	k, ok := d.public[public]
	return k, ok
}

func (d *directory) subscribeRevoked(fn func(Key)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.onRevoked = append(d.onRevoked, fn)
}
