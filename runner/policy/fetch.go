package policy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/org-runink/runbus/schemas"
)

const ownerHint = "the owner of the runner's host decides this, in the file that RUNNER_POLICY names there"

// Fetch is the policy over one fetch: its methods are hooks for what the fetch is about to do, each nil or a refusal of
// CodeForbiddenHop that names the rule. Safe for concurrent use.
type Fetch struct {
	keeper *Keeper
	policy *Policy
	kind   string
	counts bool // a budget a day

	mu      sync.Mutex
	sent    int64
	by      []*Rule  // allow rules that were used
	rules   []string // their labels, and those of defaults
	dialled []string
	refused string
}

// totalLabel names the budget of all fetches; no rule can have that name.
const totalLabel = "total budget"

// maxDialled bounds what a fetch remembers of its dials.
const maxDialled = 20

// Begin starts a fetch under the policy in force. End must be called.
func (k *Keeper) Begin(kind string) *Fetch {
	f := &Fetch{}
	k.BeginIn(f, kind)
	return f
}

// BeginIn is Begin in memory of the caller's, a Fetch that was never used.
func (k *Keeper) BeginIn(f *Fetch, kind string) {
	f.keeper, f.policy, f.kind = k, k.Policy(), kind
	if f.counts = f.policy.Daily(); f.counts {
		k.usage.begin()
	}
}

// End gives back what was counted ahead of a budget. An error means that the count may be too high.
func (f *Fetch) End() error {
	if !f.counts {
		return nil
	}
	return f.keeper.usage.end(day(f.keeper.now()))
}

// Start decides before the connector runs: over the kind, and over a setting `path` that needs no look at the files.
func (f *Fetch) Start(settings map[string]string) error {
	if d := f.policy.Kind(f.kind); !d.Allowed {
		return f.refuse(d.Rule, "a source of kind "+f.kind)
	}
	path := settings["path"]
	if filepath.IsAbs(path) && !strings.ContainsAny(path, `*?[\`) {
		// A path that leads over symbolic links is decided when it is opened; here it is only refused if its text is.
		if d := f.policy.Path(f.kind, filepath.Clean(path), Resolve(path)); !d.Allowed {
			return f.refuse(d.Rule, quote(path))
		}
	}
	return f.left(nil)
}

// Resolve is path with its symbolic links resolved as far as it exists.
func Resolve(path string) string {
	path = filepath.Clean(path)
	if actual, err := filepath.EvalSymlinks(path); err == nil {
		return actual
	}
	if parent := filepath.Dir(path); parent != path {
		return filepath.Join(Resolve(parent), filepath.Base(path))
	}
	return path
}

// Dial is a source.Permit.
func (f *Fetch) Dial(host string, ip netip.Addr, port uint16) error {
	d := f.policy.Dial(f.kind, host, ip, port)
	to := net.JoinHostPort(ip.String(), strconv.Itoa(int(port)))
	if !d.Allowed {
		what := to
		if plainHost(host) != ip.String() {
			what += " (" + quote(host) + ")"
		}
		return f.refuse(d.Rule, what)
	}
	f.mu.Lock()
	if !slices.Contains(f.dialled, to) && len(f.dialled) < maxDialled {
		f.dialled = append(f.dialled, to)
	}
	f.mu.Unlock()
	return f.use(d)
}

// Path is for source.Roots.By.
func (f *Fetch) Path(asked, actual string) error {
	d := f.policy.Path(f.kind, asked, actual)
	if !d.Allowed {
		return f.refuse(d.Rule, quote(asked))
	}
	return f.use(d)
}

// use notes that a rule allowed something: its budget counts from now on.
func (f *Fetch) use(d Decision) error {
	f.mu.Lock()
	if !slices.Contains(f.rules, d.Rule) {
		f.rules = append(f.rules, d.Rule)
	}
	if d.rule != nil && !slices.Contains(f.by, d.rule) {
		f.by = append(f.by, d.rule)
	}
	f.mu.Unlock()
	return f.left(d.rule)
}

// left refuses if a budget a day is used up: r's, or that of all for nil.
func (f *Fetch) left(r *Rule) error {
	label, key, budget := "", totalKey, Budget{}
	switch {
	case f.policy == nil:
	case r == nil:
		label, budget = totalLabel, f.policy.Budget
	case r.Budget != nil:
		label, key, budget = r.Label(), ruleKey(r.Name), *r.Budget
	}
	if budget.PerDay == 0 {
		return nil
	}
	return f.counted(f.keeper.usage.left(day(f.keeper.now()), key, budget.PerDay), label, budget)
}

// Send counts n bytes that are about to leave for the caller.
func (f *Fetch) Send(n int) error {
	if f.policy == nil {
		return nil
	}
	f.mu.Lock()
	f.sent += int64(n)
	sent, by := f.sent, slices.Clone(f.by)
	f.mu.Unlock()
	if err := f.spend(totalLabel, totalKey, f.policy.Budget, sent, n); err != nil {
		return err
	}
	for _, r := range by {
		if r.Budget == nil {
			continue
		}
		if err := f.spend(r.Label(), ruleKey(r.Name), *r.Budget, sent, n); err != nil {
			return err
		}
	}
	return nil
}

func (f *Fetch) spend(label, key string, b Budget, sent int64, n int) error {
	if b.PerFetch > 0 && sent > b.PerFetch {
		return f.refuse(label, fmt.Sprintf("more than %d bytes of one fetch", b.PerFetch))
	}
	if b.PerDay == 0 {
		return nil
	}
	return f.counted(f.keeper.usage.spend(day(f.keeper.now()), key, b.PerDay, int64(n)), label, b)
}

// counted is what a count of the day means for the fetch.
func (f *Fetch) counted(err error, label string, b Budget) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errUsedUp):
		return f.refuse(label, fmt.Sprintf("more than %d bytes a day (UTC)", b.PerDay))
	}
	return schemas.Wrap(schemas.CodeFailed, err, "the runner can't count the bytes of its policy's budget, so it sends none").
		WithHint("its log has the cause; see that its state folder can be written")
}

// refuse is the error for what rule refuses.
func (f *Fetch) refuse(rule, what string) error {
	f.mu.Lock()
	f.refused = rule
	f.mu.Unlock()
	if !strings.HasPrefix(rule, "default ") {
		rule = "rule " + strconv.Quote(rule)
	}
	return schemas.Errorf(schemas.CodeForbiddenHop, "the runner's policy refuses %s: %s", what, rule).WithHint(f.keeper.owner)
}

// Told is what a fetch did under the policy, for a record of it.
type Told struct {
	Rules   []string // that allowed something
	Dialled []string // addresses with port, at most 20
	Refused string   // the last rule that refused something
}

// Told may be called at any time.
func (f *Fetch) Told() Told {
	f.mu.Lock()
	defer f.mu.Unlock()
	return Told{Rules: slices.Clone(f.rules), Dialled: slices.Clone(f.dialled), Refused: f.refused}
}

// Digest is the policy's.
func (f *Fetch) Digest() string { return f.policy.Digest() }

// QueryText is the policy's.
func (f *Fetch) QueryText() bool { return f.policy.QueryText() }
