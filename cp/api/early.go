package api

import (
	"context"
	"sync"

	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
)

// earlyFetches are the fetches whose ids were told ahead of the answer: who has one may cancel before the dispatch is among the running ones.
// Safe for concurrent use; the zero value is empty.
type earlyFetches struct {
	mu  sync.Mutex
	all map[string]earlyFetch
}

type earlyFetch struct {
	tenant string
	cancel context.CancelFunc
}

// begin adds a fetch of tenant. The context that it is to run with ends when it is cancelled; end takes the fetch out.
func (e *earlyFetches) begin(ctx context.Context, tenant, id string) (run context.Context, end func()) {
	run, cancel := context.WithCancel(ctx)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.all == nil {
		e.all = map[string]earlyFetch{}
	}
	e.all[id] = earlyFetch{tenant, cancel}
	return run, func() {
		e.mu.Lock()
		delete(e.all, id)
		e.mu.Unlock()
		cancel()
	}
}

// cancel cancels the fetch, and reports whether tenant has such a one here.
func (e *earlyFetches) cancel(tenant, id string) bool {
	e.mu.Lock()
	f, has := e.all[id]
	e.mu.Unlock()
	if !has || f.tenant != tenant {
		return false
	}
	f.cancel()
	return true
}

// cancelEarly cancels a fetch that does not run here as a dispatch, if its id was told and it has yet to. by may cancel.
func (s *server) cancelEarly(by auth.Principal, id string) bool {
	if !s.early.cancel(by.Tenant, id) {
		return false
	}
	e := audit.Event(by.Actor(), "dispatch.cancel", audit.Subject("dispatch", id), "ok")
	e.Tenant = by.Tenant
	s.Audit.Note(e)
	return true
}
