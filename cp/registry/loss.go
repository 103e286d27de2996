package registry

import (
	"fmt"
	"maps"
	"sync/atomic"
	"time"

	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/schemas"
)

// Watch watches one process for one dispatch. It belongs to who watches, so that watching makes no object. The zero value, and one that
// Forget has ended, is ready for WatchLoss; it may not be copied.
type Watch struct {
	lost atomic.Pointer[string]
	wake func()

	// Guarded by Registry.mu.
	of             *runner
	session, nonce string
	grace          *time.Timer // runs while the process is out of sight
	over           bool
	before, after  *Watch // among those of the runner
}

// Lost says why the process is known not to go on; false while it isn't. It may be called at any time.
func (w *Watch) Lost() (why string, lost bool) {
	if p := w.lost.Load(); p != nil {
		return *p, true
	}
	return "", false
}

// WatchLoss watches the process that has c's session, until Forget. w gets one reason when that process is known not to go on (SPEC
// D13): a new process took the id, it said goodbye, its key or the runner was revoked, or it was out of sight for the grace. A cut shorter than
// the grace is no loss. wake is called once then; it must neither block nor call the registry.
func (r *Registry) WatchLoss(w *Watch, c *Candidate, wake func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rn, session := c.of, c.Session
	if rn == nil || rn.forgotten {
		rn = r.runner(c.Ref)
	}
	w.of, w.session, w.nonce, w.wake, w.over = rn, session, "", wake, false
	w.lost.Store(nil)
	if rn.rec.Session == session {
		w.nonce = rn.rec.ProcessNonce
	}
	if w.after = rn.watches; w.after != nil {
		w.after.before = w
	}
	rn.watches = w
	_, ended := r.revoked[rn.rec.PublicKey]
	switch {
	case ended:
		w.fire(keyWasRevoked)
	case rn.revoked:
		w.fire(runnerWasRevoked)
	default:
		r.judge(rn, w)
	}
}

// Forget ends a watch. One that was never begun, or has ended, is left as it is.
func (r *Registry) Forget(w *Watch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w.of == nil {
		return
	}
	w.end()
	if w.before != nil {
		w.before.after = w.after
	} else {
		w.of.watches = w.after
	}
	if w.after != nil {
		w.after.before = w.before
	}
	w.of, w.before, w.after = nil, nil, nil
}

// review judges all watches of rn anew. r.mu must be held.
func (r *Registry) review(rn *runner) {
	for w := rn.watches; w != nil; w = w.after {
		r.judge(rn, w)
	}
}

// judge judges one watch. r.mu must be held.
func (r *Registry) judge(rn *runner, w *Watch) {
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
func (r *Registry) startGrace(w *Watch, why string) {
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

func (w *Watch) fire(why string) {
	w.end()
	w.lost.Store(&why)
	w.wake()
}

func (w *Watch) end() {
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
func (rn *runner) look(w *Watch) (sight, string) {
	if !rn.live {
		return outOfSight, "its heartbeats stopped"
	}
	if rn.rec.Session != w.session && (w.nonce == "" || rn.rec.ProcessNonce != w.nonce) {
		return gone, "a new process took its id"
	}
	if rn.rec.Left {
		switch rn.rec.LeftReason {
		case "":
			return gone, "it said goodbye"
		case processEnded:
			return gone, processEnded
		}
		return gone, fmt.Sprintf("it said goodbye (%s)", rn.rec.LeftReason)
	}
	if _, up := rn.links.of(rn.rec.ProcessNonce); !up {
		return outOfSight, "its link was cut"
	}
	return inSight, ""
}

const (
	keyWasRevoked    = "its service-account key was revoked"
	runnerWasRevoked = "it was revoked"
	// revokedFor is how long a revoked key is remembered for who selected a runner just before, and begins to watch it just after.
	revokedFor = time.Minute
)

// keyRevoked ends the works of all runners that enrolled with key: their links are being cut and they can't come back.
func (r *Registry) keyRevoked(key auth.Key) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.revoked, func(_ string, at time.Time) bool { return now.Sub(at) > revokedFor })
	r.revoked[key.PublicKey] = now
	for _, rn := range r.fleet[key.Tenant] {
		if rn.rec.PublicKey == key.PublicKey {
			rn.lose(keyWasRevoked)
		}
	}
}

// runnerRevoked ends the works of a dialled runner that was revoked, for good. Its link is left to it for a moment, so that it can hear of
// that: meanwhile one that does not mean to go must neither be sent the credentials of a work, nor be waited for. r.mu must be held.
func (r *Registry) runnerRevoked(ref schemas.RunnerRef) {
	if rn := r.fleet[ref.Tenant][ref.Runner]; rn != nil { // else it was selected by nobody
		rn.revoked = true
		rn.lose(runnerWasRevoked)
	}
}

// lose tells all that watch rn. Registry.mu must be held.
func (rn *runner) lose(why string) {
	for w := rn.watches; w != nil; w = w.after {
		if !w.over {
			w.fire(why)
		}
	}
}

// stopWatches ends all watches without a word.
func (r *Registry) stopWatches() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, tenant := range r.fleet {
		for _, rn := range tenant {
			for w := rn.watches; w != nil; w = w.after {
				w.end()
			}
		}
	}
}
