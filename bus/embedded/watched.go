package embedded

import (
	"sync/atomic"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// watchers tells who may watch in account OPS. Every dispatch asks, and mostly there is nobody: to count connections costs a fifth of
// comparing a subject with what they subscribe.
type watchers struct {
	ops *server.Account              // of this start for good: the configuration is not loaded again
	own atomic.Pointer[[]*nats.Conn] // those of Connect in OPS; a list never changes
}

// admit counts a connection of this process in. Those of Connect come one after the other.
func (w *watchers) admit(u User, nc *nats.Conn) {
	if u != UserMicro && u != UserMirror {
		return
	}
	var own []*nats.Conn
	if before := w.own.Load(); before != nil {
		for _, c := range *before {
			if !c.IsClosed() {
				own = append(own, c)
			}
		}
	}
	own = append(own, nc)
	w.own.Store(&own)
}

// some is Server.Watchers.
func (w *watchers) some() bool {
	n := w.ops.NumConnections()
	if own := w.own.Load(); own != nil {
		for _, c := range *own {
			if c.IsConnected() {
				n--
			}
		}
	}
	return n > 0
}

// Watchers reports whether anybody is in account OPS but the connections of Connect: nobody else can watch. One of those that the server
// has just dropped, and that does not know it yet, can hide another.
func (s *Server) Watchers() bool { return s.watchers.some() }

// Watched reports whether anybody in account OPS subscribes a subject that is not imported there. Connections of Connect don't count:
// their users may not.
func (s *Server) Watched(subject string) bool {
	return s.Watchers() && s.watchers.ops.SubscriptionInterest(subject)
}
