package intake

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/schemas"
)

// answersWithin is how long the link in use has to answer before a newcomer replaces it (DESIGN, "One bus").
const answersWithin = 2 * time.Second

// ErrNoLink says that the control plane has not dialled, or its link has ended.
var ErrNoLink = errors.New("the control plane has not dialled yet")

// Link is one link that a control plane offers.
type Link struct {
	Conn net.Conn
	// Leaf tells which leaf of the runner the handshake of this link was made with.
	Leaf string
	// Replica is the boot of the replica that dialled.
	Replica string
	// User and Password are what the NATS client shows on it.
	User, Password string
}

// Slot holds the one link in use and is the dialer (nats.CustomDialer) of the NATS client on it. Set Answers and Arrived before the
// first Offer. Safe for concurrent use.
type Slot struct {
	// Answers reports whether the NATS connection on the link in use answers, until ctx ends.
	Answers func(ctx context.Context) bool
	// Arrived is called when a link waits to be dialled.
	Arrived func()

	deciding sync.Mutex // one newcomer at a time

	mu      sync.Mutex
	waiting *Link // taken, and not dialled yet
	used    *Link // in use
	closed  bool
}

// Offer decides on a link. While the one in use answers, another is refused (link.ErrLinkedElsewhere), unless it comes from the same
// replica, whose own end must be gone or is being given up, or with another leaf, since a renewal takes effect by a new link. Who is
// taken is told so, and waits for the NATS client.
func (s *Slot) Offer(ctx context.Context, l *Link) error {
	s.deciding.Lock()
	defer s.deciding.Unlock()
	if have := s.current(); have != nil && have.Replica != l.Replica && have.Leaf == l.Leaf {
		ping, cancel := context.WithTimeout(ctx, answersWithin)
		answers := s.Answers(ping)
		cancel()
		if answers && s.current() == have {
			return link.ErrLinkedElsewhere()
		}
	}
	if err := link.Take(l.Conn); err != nil {
		return err
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return schemas.Errorf(schemas.CodeUnavailable, "the runner stops")
	}
	old := s.waiting
	s.waiting = l
	s.mu.Unlock()
	if old != nil {
		_ = old.Conn.Close()
	}
	s.Arrived()
	return nil
}

// current is the newest link.
func (s *Slot) current() *Link {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting != nil {
		return s.waiting
	}
	return s.used
}

// Dial hands the waiting link to the NATS client, at once or never: nats.go holds its lock meanwhile. Without one it is ErrNoLink.
func (s *Slot) Dial(string, string) (net.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting == nil {
		return nil, ErrNoLink
	}
	s.used, s.waiting = s.waiting, nil
	return &usedConn{Conn: s.used.Conn, slot: s, link: s.used}, nil
}

// SkipTLSHandshake tells nats.go that a link is secure already.
func (s *Slot) SkipTLSHandshake() bool { return true }

// UserInfo is what the NATS client shows on the link that it dialled last.
func (s *Slot) UserInfo() (user, password string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used == nil {
		return "", ""
	}
	return s.used.User, s.used.Password
}

// Waiting reports whether a link waits to be dialled.
func (s *Slot) Waiting() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting != nil
}

// Close ends the waiting link and takes no more. The one in use is the NATS client's.
func (s *Slot) Close() {
	s.mu.Lock()
	s.closed = true
	l := s.waiting
	s.waiting = nil
	s.mu.Unlock()
	if l != nil {
		_ = l.Conn.Close()
	}
}

// usedConn is the link in use; when the NATS client closes it, the slot is free.
type usedConn struct {
	net.Conn
	slot *Slot
	link *Link
}

// Close ends the link.
func (c *usedConn) Close() error {
	c.slot.mu.Lock()
	if c.slot.used == c.link {
		c.slot.used = nil
	}
	c.slot.mu.Unlock()
	return c.Conn.Close()
}
