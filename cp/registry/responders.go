package registry

import (
	"time"

	"github.com/org-runink/runbus/schemas"
)

// The values of Signals.Responders.
const (
	RespondersHeard   = "heard"
	RespondersNone    = "none"
	RespondersUnasked = "not asked"
)

// responders is what became of the last work or order that was published to a session.
type responders struct {
	session string
	none    bool
	at      time.Time
}

// NobodyHeard notes that the server told of no responders: nobody was subscribed to the work or control subject of the
// runner's session. It stands until that session is heard again, or its link is made anew. The runner is given work all the same:
// the next try costs one message.
func (r *Registry) NobodyHeard(ref schemas.RunnerRef, session string) {
	r.noteResponders(ref, session, true)
}

// Heard notes that the runner's session got what was published to it.
func (r *Registry) Heard(ref schemas.RunnerRef, session string) {
	r.noteResponders(ref, session, false)
}

func (r *Registry) noteResponders(ref schemas.RunnerRef, session string, none bool) {
	r.mu.Lock()
	known := r.fleet[ref.Tenant][ref.Runner] != nil
	r.mu.Unlock()
	if known {
		r.update(ref, func(rn *runner) { rn.responders = responders{session: session, none: none, at: r.d.Now()} })
	}
}

// responding is the third signal: whether the session got what was last published to it.
func (rn *runner) responding() string {
	link, _ := rn.links.of(rn.rec.ProcessNonce)
	switch s := rn.responders; {
	case s.session == "" || s.session != rn.rec.Session:
		return RespondersUnasked
	case !s.none:
		return RespondersHeard
	case link.at.After(s.at):
		return RespondersUnasked // a new link, with new subscriptions
	}
	return RespondersNone
}
