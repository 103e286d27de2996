package embedded

import (
	"net"
	"sync/atomic"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// watchers tells who may watch in account OPS. Every dispatch asks, and mostly there is nobody: to count connections costs a fifth of
// comparing a subject with what they subscribe. It waits for no connection.
type watchers struct {
	ops   *server.Account           // of this start for good: the configuration is not loaded again
	alone bool                      // no other server is connected to this one: see alone
	own   atomic.Pointer[[]*inmate] // those of Connect in OPS; a list never changes
}

// alone reports whether a server of these options has all clients of an account itself. Those of another server are counted here only
// when it tells of them, every 30 s, while what they subscribe is known at once.
func alone(o *server.Options) bool {
	return o.Cluster.Port == 0 && len(o.Routes) == 0 && o.Gateway.Name == "" && o.LeafNode.Port == 0 && len(o.LeafNode.Remotes) == 0
}

// admit counts a connection of this process in, if it is in OPS. Those of Connect come one after the other.
func (w *watchers) admit(u User, nc *nats.Conn, i *inmate) {
	if u != UserMicro && u != UserMirror {
		return
	}
	i.nc = nc
	i.connected(nc)
	own := []*inmate{i}
	if before := w.own.Load(); before != nil {
		for _, o := range *before {
			if !o.nc.IsClosed() {
				own = append(own, o)
			}
		}
	}
	w.own.Store(&own)
}

// some is Server.Watchers.
func (w *watchers) some() bool {
	if !w.alone {
		return true
	}
	before := w.ours()
	n := w.ops.NumConnections()
	return n > min(before, w.ours()) // one that goes or comes in between may not be among the n
}

// ours is how many connections of this process stand in OPS.
func (w *watchers) ours() (n int) {
	if own := w.own.Load(); own != nil {
		for _, i := range *own {
			if i.there() {
				n++
			}
		}
	}
	return n
}

// watched is Server.Watched.
func (w *watchers) watched(subject string) bool {
	return w.some() && w.ops.SubscriptionInterest(subject)
}

// Watchers reports whether anybody may be in account OPS but the connections of Connect: nobody else can watch. If other servers are
// connected to this one, somebody may be. One of Connect's that the server has dropped hides another until its end of the pipe is read.
func (s *Server) Watchers() bool { return s.watchers.some() }

// Watched reports whether anybody in account OPS subscribes a subject that is not imported there. Connections of Connect don't count:
// their users may not. It waits for none of them.
func (s *Server) Watched(subject string) bool { return s.watchers.watched(subject) }

// inmate tells whether a connection of Connect stands, without its lock: nats.go holds that while it writes. It says no rather too often:
// from the moment on at which the pipe to the server fails, and until the server has let the next one in.
type inmate struct {
	nc     *nats.Conn // when it is admitted
	from   nats.InProcessConnProvider
	newest atomic.Pointer[pipe]
	let    atomic.Pointer[pipe] // in, by the server
}

// follow is an option of nats.go behind all others of a connection.
func (i *inmate) follow(o *nats.Options) error {
	i.from, o.InProcessServer = o.InProcessServer, i
	then := o.ReconnectedCB
	o.ReconnectedCB = func(nc *nats.Conn) {
		i.connected(nc)
		if then != nil {
			then(nc)
		}
	}
	return nil
}

// InProcessConn is nats.InProcessConnProvider.
func (i *inmate) InProcessConn() (net.Conn, error) {
	c, err := i.from.InProcessConn()
	if err != nil {
		return nil, err
	}
	p := &pipe{Conn: c}
	i.newest.Store(p)
	return p, nil
}

// connected is called after the server has let nc in; nc may have been dropped since, and be on its next pipe. There is another call when
// that one is let in.
func (i *inmate) connected(nc *nats.Conn) {
	if p := i.newest.Load(); nc.IsConnected() && i.newest.Load() == p {
		i.let.Store(p)
	}
}

func (i *inmate) there() bool {
	p := i.let.Load()
	return p != nil && !p.ended.Load()
}

// pipe is one of a connection to the server.
type pipe struct {
	net.Conn
	ended atomic.Bool
}

// Read is net.Conn's. One that fails ends the connection: nats.go sets no deadline behind the handshake.
func (p *pipe) Read(b []byte) (int, error) {
	n, err := p.Conn.Read(b)
	if err != nil {
		p.ended.Store(true)
	}
	return n, err
}

// Close is net.Conn's.
func (p *pipe) Close() error {
	p.ended.Store(true)
	return p.Conn.Close()
}
