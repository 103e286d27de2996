package registry

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// handovers are the runners whose link is being replaced by another one of the same process. Between the end of the old and the
// beginning of the new nothing reaches the runner, and nothing is wrong with it: work waits.
type handovers struct {
	some atomic.Int32 // how many: what every dispatch asks
	mu   sync.Mutex
	of   map[schemas.RunnerRef]*handover
}

type handover struct {
	old  linkKey
	done chan struct{} // closed at the end
}

// Handover says that the link of ref is about to be replaced, by this control plane's own doing (SPEC C8). Until another link of the
// runner is up, at most that long, AwaitHandover holds back what is for it. A runner without a link is left alone.
func (r *Registry) Handover(ref schemas.RunnerRef, within time.Duration) {
	r.mu.Lock()
	rn := r.fleet[ref.Tenant][ref.Runner]
	if rn == nil || !rn.live {
		r.mu.Unlock()
		return
	}
	old, linked := rn.links.of(rn.rec.ProcessNonce)
	r.mu.Unlock()
	if !linked {
		return
	}
	h := &handover{old: old.key, done: make(chan struct{})}
	r.handovers.mu.Lock()
	if before := r.handovers.of[ref]; before != nil {
		close(before.done)
	} else {
		r.handovers.some.Add(1)
	}
	if r.handovers.of == nil {
		r.handovers.of = make(map[schemas.RunnerRef]*handover)
	}
	r.handovers.of[ref] = h
	r.handovers.mu.Unlock()
	time.AfterFunc(within, func() { r.handovers.end(ref, func(now *handover) bool { return now == h }) })
}

// linked ends the handover of ref if the link that has come up is another one.
func (s *handovers) linked(ref schemas.RunnerRef, key linkKey) {
	if s.some.Load() > 0 {
		s.end(ref, func(h *handover) bool { return h.old != key })
	}
}

func (s *handovers) end(ref schemas.RunnerRef, which func(*handover) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.of[ref]; h != nil && which(h) {
		delete(s.of, ref)
		s.some.Add(-1)
		close(h.done)
	}
}

// AwaitHandover waits while the link of the runner that is named, by id or name, is being replaced; it returns at once for all others.
func (r *Registry) AwaitHandover(ctx context.Context, tenant, idOrName string) {
	if r.handovers.some.Load() == 0 {
		return
	}
	id := idOrName
	if !schemas.IsDialledID(id) {
		d, ok, err := r.d.Roster.Find(tenant, idOrName)
		if err != nil || !ok {
			return // whoever selects says why
		}
		id = d.ID
	}
	r.handovers.mu.Lock()
	h := r.handovers.of[schemas.RunnerRef{Tenant: tenant, Runner: id}]
	r.handovers.mu.Unlock()
	if h == nil {
		return
	}
	select {
	case <-h.done:
	case <-ctx.Done():
	}
}
