package registry

import (
	"slices"
	"strings"
	"unique"

	"github.com/org-runink/runbus/schemas"
)

// Each heartbeat is decoded anew, and most of what it says was said by the one before, or by thousands of other runners: what is kept
// are the strings of those.

// mostLists bounds the lists of capabilities that are shared. Any runner can make one up.
const mostLists = 256

// shared is the one copy of s that all who ask share, for as long as one of them keeps it.
func shared(s string) string { return unique.Make(s).Value() }

// same is before if it equals now.
func same(before, now string) string {
	if before == now {
		return before
	}
	return now
}

// share is rec as rn is to keep it. r.mu must be held.
func (r *Registry) share(rec Record, rn *runner) Record {
	was := &rn.rec
	if rec.Tenant == rn.ref.Tenant && rec.Runner == rn.ref.Runner {
		rec.Tenant, rec.Runner = rn.ref.Tenant, rn.ref.Runner
	}
	rec.Name = same(rn.ref.Runner, same(was.Name, rec.Name))
	rec.Session, rec.ProcessNonce = same(was.Session, rec.Session), same(was.ProcessNonce, rec.ProcessNonce)
	rec.Version, rec.Replica = shared(rec.Version), shared(rec.Replica)
	rec.PublicKey, rec.KeyID = shared(rec.PublicKey), shared(rec.KeyID)
	rec.Capabilities = r.sharedList(was.Capabilities, rec.Capabilities)
	if slices.Equal(was.Replaced, rec.Replaced) {
		rec.Replaced = was.Replaced
	}
	if was.Policy != nil && rec.Policy != nil && was.Policy.equal(rec.Policy) {
		rec.Policy = was.Policy
	}
	if rn.sealing != nil && rn.sealing.Session != rec.Session {
		rn.sealing = nil
	}
	return rec
}

// sharedList is now, of which nobody may change anything. r.mu must be held.
func (r *Registry) sharedList(before, now []string) []string {
	if slices.Equal(before, now) && (before == nil) == (now == nil) {
		return before
	}
	key := strings.Join(now, "\x00")
	list, known := r.lists[key]
	if !known || !slices.Equal(list, now) {
		if len(r.lists) >= mostLists {
			clear(r.lists)
		}
		list = now
		r.lists[key] = list
	}
	return list
}

// equal reports whether p and o say the same.
func (p *Policy) equal(o *Policy) bool {
	return p.Digest == o.Digest && p.Default == o.Default && p.AllowRules == o.AllowRules && p.DenyRules == o.DenyRules &&
		slices.Equal(p.RuleNames, o.RuleNames) && p.Journal == o.Journal && p.JournalHead == o.JournalHead
}

// share has k keep the strings that others keep too.
func (k *Known) share(ref schemas.RunnerRef) {
	if k.Tenant == ref.Tenant && k.Runner == ref.Runner {
		k.Tenant, k.Runner = ref.Tenant, ref.Runner
	}
	k.Name = same(ref.Runner, k.Name)
	k.Version, k.PublicKey, k.KeyID = shared(k.Version), shared(k.PublicKey), shared(k.KeyID)
}
