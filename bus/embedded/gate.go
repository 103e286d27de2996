package embedded

import (
	"context"
	"crypto/tls"
	"errors"
	"sync/atomic"
	"time"
)

const (
	// gateSlots is how many TLS handshakes are under way at once, and slotMost how long one counts: what it costs is spent by then, and
	// clients that are slow, or mean to be, hold nobody up for longer.
	gateSlots = 256
	slotMost  = 250 * time.Millisecond
	// gateWait is how long a handshake waits for its turn: less than the server's patience (tls.timeout).
	gateWait = 7 * time.Second
	// fullEvery is how often it is asked whether there is room again.
	fullEvery = 2 * time.Millisecond
)

var errGateFull = errors.New("too many connect at once: try again")

// gate holds back handshakes while more clients connect than this machine can let in. Without it all of a fleet that comes back at
// once would share the processors, and each of them take longer than anybody waits. First come, first served. Who has waited too long
// is refused before anything was computed for him.
type gate struct {
	slots chan struct{}               // taken by handshakes under way
	turn  chan struct{}               // has room for the one who asks whether there is room behind the gate
	full  atomic.Pointer[func() bool] // nil: there always is
}

func newGate() *gate {
	return &gate{slots: make(chan struct{}, gateSlots), turn: make(chan struct{}, 1)}
}

// admit is for tls.Config.GetConfigForClient: it returns when the handshake may go on, as nil, or an error.
func (g *gate) admit(hello *tls.ClientHelloInfo) (*tls.Config, error) {
	ctx, cancel := context.WithTimeout(hello.Context(), gateWait)
	defer cancel()
	select {
	case g.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, errGateFull
	}
	defer func() { <-g.turn }()
	if err := g.room(ctx); err != nil {
		return nil, err
	}
	select {
	case g.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, errGateFull
	}
	// The handshake's context ends with the handshake.
	slot, release := context.WithTimeout(hello.Context(), slotMost)
	context.AfterFunc(slot, func() {
		release()
		<-g.slots
	})
	return nil, nil
}

// room waits until those behind the gate are few enough.
func (g *gate) room(ctx context.Context) error {
	full := g.full.Load()
	if full == nil || !(*full)() {
		return nil
	}
	tick := time.NewTicker(fullEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if !(*full)() {
				return nil
			}
		case <-ctx.Done():
			return errGateFull
		}
	}
}

// HoldWhile has new TLS connections wait while full says that those who have shaken hands wait for their answer already. full must
// answer at once.
func (s *Server) HoldWhile(full func() bool) { s.gate.full.Store(&full) }
