// Package roster is the registry of dialled runners (SPEC R1, R2, R5): one document per tenant with its runners and their
// enrolment tokens, so that every change, "consume the token and activate the runner" too, is one compare-and-set and the
// limits hold whoever else writes.
//
// Reads come from a watched view in memory and fail with schemas.ErrRegistryUnavailable while that is not confirmed; changes
// are decided on the leader and durable in the audit log before they are acknowledged. A token leaves the package once, in
// Minted; its SHA-256 is what is stored, and its proof key lives in a memory bucket until the token expires (SPEC C3).
package roster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/egress"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
)

// Deps are what a Roster needs. Store and Audit are required.
type Deps struct {
	Store *jetstream.Store
	Audit *audit.Log
	// Admins are those who may change runners (CORE_RUNNER_ADMINS, SPEC R6): `name` is the person of that name in any tenant,
	// `tenant/name` the one of that tenant, each for their own tenant only. Empty: everybody who is signed in but a READER.
	// A READER never may.
	Admins []string
	// Dial are where runners are dialled: an address that they refuse is not taken.
	Dial egress.Rules
	// Step is told when a change was decided, before the audit log has it, and when a leaf was promoted, for tests that end the
	// process there. May be nil.
	Step func(name string)
	// StaleAfter is how long the view is trusted without a confirmation by the bucket's leader. Zero means 30 s.
	StaleAfter time.Duration
	Log        *slog.Logger     // nil: slog.Default()
	Now        func() time.Time // of what is recorded; nil: time.Now
}

// Roster is the registry of dialled runners. Safe for concurrent use.
type Roster struct {
	d      Deps
	docs   *jetstream.Table[document]
	proofs *jetstream.Table[proof]
	view   *jetstream.View[document]

	writing sync.Map // tenant → *writers, who take turns

	telling sync.Mutex // held while one change is taken in and told, so that all hear of changes in their order

	changes atomic.Uint64 // of tenants and byID, counted after each

	mu       sync.RWMutex
	tenants  map[string]*tenant
	byID     map[string]Runner
	onChange []func(Runner)
}

// tenant is one document as the view has it, indexed.
type tenant struct {
	revision uint64
	doc      document
	named    map[string]string // id by name
}

// New follows the bucket and returns when its present content is in memory, and what a process before this one changed and did not record is in
// the audit log, which must be running.
func New(ctx context.Context, d Deps) (*Roster, error) {
	if d.Store == nil || d.Audit == nil {
		return nil, errors.New("roster: Store and Audit are required")
	}
	d.Log = cmp.Or(d.Log, slog.Default())
	d.StaleAfter = cmp.Or(d.StaleAfter, 30*time.Second)
	if d.Now == nil {
		d.Now = time.Now
	}
	if d.Step == nil {
		d.Step = func(string) {}
	}
	r := &Roster{
		d: d, docs: jetstream.TableOf[document](d.Store, jetstream.Roster), proofs: jetstream.TableOf[proof](d.Store, jetstream.Proofs),
		tenants: map[string]*tenant{}, byID: map[string]Runner{},
	}
	var err error
	if r.view, err = r.docs.Follow(ctx, r.take); err != nil {
		return nil, fmt.Errorf("follow the registry: %w", err)
	}
	r.payOwed(ctx)
	return r, nil
}

// Close stops following. Reads fail a while later.
func (r *Roster) Close() { r.view.Close() }

// Readable returns nil while the view is confirmed, else ErrRegistryUnavailable.
func (r *Roster) Readable() error {
	if age := time.Since(r.view.Confirmed()); age >= r.d.StaleAfter {
		return schemas.ErrRegistryUnavailable(fmt.Errorf("the view of the dialled runners was not confirmed for %s", age.Round(time.Second)))
	}
	return nil
}

// Runners are the dialled runners of tenant, revoked ones too, by name.
func (r *Roster) Runners(tenant string) ([]Runner, error) {
	if err := r.Readable(); err != nil {
		return nil, err
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	t := r.tenants[tenant]
	if t == nil {
		return nil, nil
	}
	runners := t.doc.clone().Runners
	slices.SortFunc(runners, func(a, b Runner) int { return cmp.Compare(a.Name, b.Name) })
	return runners, nil
}

// Tokens are the tokens of tenant, ended ones too until they are pruned, by time of creation.
func (r *Roster) Tokens(tenant string) ([]Token, error) {
	if err := r.Readable(); err != nil {
		return nil, err
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	t := r.tenants[tenant]
	if t == nil {
		return nil, nil
	}
	return slices.Clone(t.doc.Tokens), nil
}

// ByID is the runner of that id, of whatever tenant.
func (r *Roster) ByID(id string) (Runner, bool, error) {
	if err := r.Readable(); err != nil {
		return Runner{}, false, err
	}
	runner, ok := r.lookUp(id)
	return runner, ok, nil
}

// lookUp is ByID whether or not the view is confirmed: where a decision follows on the leader.
func (r *Roster) lookUp(id string) (Runner, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	runner, ok := r.byID[id]
	return runner.clone(), ok
}

// Find is the runner of tenant that idOrName names. It costs the same whatever the number of runners.
func (r *Roster) Find(tenant, idOrName string) (Runner, bool, error) {
	if err := r.Readable(); err != nil {
		return Runner{}, false, err
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	t := r.tenants[tenant]
	if t == nil {
		return Runner{}, false, nil
	}
	id, ok := t.named[idOrName]
	if !ok {
		id = idOrName
	}
	runner, ok := r.byID[id]
	if !ok || runner.Tenant != tenant {
		return Runner{}, false, nil
	}
	return runner.clone(), true, nil
}

// Changes counts the changes of the view: as long as it says the same, Find finds the same.
func (r *Roster) Changes() uint64 { return r.changes.Load() }

// All are the dialled runners of all tenants, revoked ones too, by id.
func (r *Roster) All() ([]Runner, error) {
	if err := r.Readable(); err != nil {
		return nil, err
	}
	r.mu.RLock()
	runners := make([]Runner, 0, len(r.byID))
	for _, runner := range r.byID {
		runners = append(runners, runner.clone())
	}
	r.mu.RUnlock()
	slices.SortFunc(runners, func(a, b Runner) int { return cmp.Compare(a.ID, b.ID) })
	return runners, nil
}

// OnChange has fn called with every runner that was created or changed from now on, by whatever replica, after reads see it;
// with one that is removed it is called with that runner as Revoked. Calls come in the order of the changes, one at a time. fn
// may read the roster; it must not block and must not change the roster before it returns.
func (r *Roster) OnChange(fn func(Runner)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.onChange = append(r.onChange, fn)
}

// take takes one change of the bucket in, from the watch or from this process's own write.
func (r *Roster) take(row jetstream.Row[document]) {
	r.telling.Lock()
	defer r.telling.Unlock()
	changed, tell := r.index(row)
	for _, runner := range changed {
		for _, fn := range tell {
			fn(runner.clone())
		}
	}
}

// index replaces what is known of a tenant and returns what is different.
func (r *Roster) index(row jetstream.Row[document]) (changed []Runner, tell []func(Runner)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer r.changes.Add(1)
	before := r.tenants[row.Key]
	if before != nil && row.Revision <= before.revision && !row.Deleted {
		return nil, nil
	}
	was := map[string]Runner{}
	if before != nil {
		for _, runner := range before.doc.Runners {
			was[runner.ID] = runner
			delete(r.byID, runner.ID)
		}
		delete(r.tenants, row.Key)
	}
	if !row.Deleted {
		now := &tenant{revision: row.Revision, doc: row.Value, named: make(map[string]string, len(row.Value.Runners))}
		r.tenants[row.Key] = now
		for _, runner := range now.doc.Runners {
			r.byID[runner.ID] = runner
			now.named[runner.Name] = runner.ID
			if old, ok := was[runner.ID]; !ok || !old.equal(runner) {
				changed = append(changed, runner)
			}
			delete(was, runner.ID)
		}
	}
	for _, gone := range was {
		gone.State = Revoked
		changed = append(changed, gone)
	}
	return changed, slices.Clone(r.onChange)
}
