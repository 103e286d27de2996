package registry

import (
	"fmt"
	"time"

	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/schemas"
)

// watch waits for the loss of one process. Guarded by Registry.mu.
type watch struct {
	session, nonce string
	lost           chan string
	grace          *time.Timer // runs while the process is out of sight
	over           bool
}

// WatchLoss watches the process that has session. lost gets one reason when that process is known not to go on (SPEC D13): a
// new process took the id, it said goodbye, its key was revoked, or it was out of sight for the grace. A cut shorter than the
// grace is no loss. Call stop when done; lost is never closed.
func (r *Registry) WatchLoss(ref schemas.RunnerRef, session string) (lost <-chan string, stop func()) {
	w := &watch{session: session, lost: make(chan string, 1)}
	r.mu.Lock()
	defer r.mu.Unlock()
	rn := r.runner(ref)
	if rn.rec.Session == session {
		w.nonce = rn.rec.ProcessNonce
	}
	rn.watches[w] = struct{}{}
	r.judge(rn, w)
	return w.lost, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		w.end()
		delete(rn.watches, w)
	}
}

// review judges all watches of rn anew. r.mu must be held.
func (r *Registry) review(rn *runner) {
	for w := range rn.watches {
		r.judge(rn, w)
	}
}

// judge judges one watch. r.mu must be held.
func (r *Registry) judge(rn *runner, w *watch) {
	if w.over {
		return
	}
	switch sight, why := rn.look(w); {
	case sight == gone:
		w.fire(why)
	case sight == inSight && w.grace != nil:
		w.grace.Stop()
		w.grace = nil
	case sight == outOfSight && w.grace == nil:
		r.startGrace(w, why)
	}
}

// startGrace gives w the grace to come back.
func (r *Registry) startGrace(w *watch, why string) {
	var timer *time.Timer
	timer = time.AfterFunc(r.d.Grace, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if w.grace == timer && !w.over {
			w.fire(fmt.Sprintf("%s and was not back within %s", why, r.d.Grace))
		}
	})
	w.grace = timer
}

func (w *watch) fire(why string) {
	w.end()
	w.lost <- why // has room for the one
}

func (w *watch) end() {
	w.over = true
	if w.grace != nil {
		w.grace.Stop()
		w.grace = nil
	}
}

// sight is how a watched process looks.
type sight int

const (
	inSight    sight = iota
	outOfSight       // may come back
	gone             // will not
)

// look judges the process that w watches.
func (rn *runner) look(w *watch) (sight, string) {
	if !rn.live {
		return outOfSight, "its heartbeats stopped"
	}
	if rn.rec.Session != w.session && (w.nonce == "" || rn.rec.ProcessNonce != w.nonce) {
		return gone, "a new process took its id"
	}
	if rn.rec.Left {
		if rn.rec.LeftReason == "" {
			return gone, "it said goodbye"
		}
		return gone, fmt.Sprintf("it said goodbye (%s)", rn.rec.LeftReason)
	}
	if _, up := rn.links[rn.rec.ProcessNonce]; !up {
		return outOfSight, "its link was cut"
	}
	return inSight, ""
}

// keyRevoked ends the works of all runners that enrolled with key: their links are being cut and they can't come back.
func (r *Registry) keyRevoked(key auth.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rn := range r.fleet[key.Tenant] {
		if rn.rec.PublicKey != key.PublicKey {
			continue
		}
		for w := range rn.watches {
			if !w.over {
				w.fire("its service-account key was revoked")
			}
		}
	}
}

// stopWatches ends all watches without a word.
func (r *Registry) stopWatches() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, tenant := range r.fleet {
		for _, rn := range tenant {
			for w := range rn.watches {
				w.end()
			}
		}
	}
}
