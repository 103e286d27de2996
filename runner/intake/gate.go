package intake

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
)

// gate bounds the connections that have not come to anything yet, in all and from one address. Who comes when it is full takes the
// place of the one that has dawdled longest: a control plane behind the same address as a flood needs milliseconds, the flood's
// connections stand still.
type gate struct {
	perAddress, total int

	mu        sync.Mutex
	all       *list.List // of *visit, oldest first
	byAddress map[netip.Prefix]*list.List
	evicted   uint64
}

// visit is one connection in the gate.
type visit struct {
	conn      net.Conn
	from      netip.Prefix
	inAll, in *list.Element // nil when it has left
}

func newGate(perAddress, total int) *gate {
	return &gate{perAddress: perAddress, total: total, all: list.New(), byAddress: make(map[netip.Prefix]*list.List)}
}

// enter lets conn in and closes another one if that is needed.
func (g *gate) enter(conn net.Conn) *visit {
	v := &visit{conn: conn, from: network(conn.RemoteAddr())}
	g.mu.Lock()
	defer g.mu.Unlock()
	same := g.byAddress[v.from]
	if same == nil {
		same = list.New()
		g.byAddress[v.from] = same
	}
	if same.Len() >= g.perAddress {
		g.evict(same.Front())
	} else if g.all.Len() >= g.total {
		g.evict(g.all.Front())
	}
	if g.byAddress[v.from] == nil { // its last one was evicted
		g.byAddress[v.from] = same
	}
	v.inAll, v.in = g.all.PushBack(v), same.PushBack(v)
	return v
}

func (g *gate) evict(e *list.Element) {
	v, _ := e.Value.(*visit)
	g.remove(v)
	g.evicted++
	_ = v.conn.Close() // its own goroutine sees the end
}

// leave takes a connection out: it has come to something, or has ended.
func (g *gate) leave(v *visit) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.remove(v)
}

func (g *gate) remove(v *visit) {
	if v.in == nil {
		return
	}
	g.all.Remove(v.inAll)
	same := g.byAddress[v.from]
	if same.Remove(v.in); same.Len() == 0 {
		delete(g.byAddress, v.from)
	}
	v.in, v.inAll = nil, nil
}

// open is how many are in the gate, and how many have been put out so far.
func (g *gate) open() (now int, evicted uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.all.Len(), g.evicted
}

// network is what counts as one address: an IPv4 address, or the /64 of an IPv6 one, of which a single host has all.
func network(a net.Addr) netip.Prefix {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	ip := tcp.AddrPort().Addr().Unmap().WithZone("")
	bits := 64
	if ip.Is4() {
		bits = 32
	}
	p, err := ip.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}
