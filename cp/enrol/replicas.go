package enrol

import (
	"crypto/sha256"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// Subjects of account SEC, in which only replicas are.
const (
	beaconSubject  = "runbus.links.replica."
	connectSubject = "runbus.links.connect"
)

const (
	beaconEvery = 500 * time.Millisecond
	// heardWithin is how lately a replica must have been heard to count (DESIGN, "One bus").
	heardWithin = 2 * time.Second
)

// replicas knows which replicas are there, by what they say of themselves over core NATS: no leader is asked, since who dials must be
// settled while there is none. Safe for concurrent use.
type replicas struct {
	self string
	nc   *nats.Conn
	now  func() time.Time

	mu    sync.Mutex
	heard map[string]time.Time
}

func newReplicas(nc *nats.Conn, self string, now func() time.Time) *replicas {
	return &replicas{self: self, nc: nc, now: now, heard: make(map[string]time.Time)}
}

// follow listens for the others.
func (r *replicas) follow() (*nats.Subscription, error) {
	sub, err := r.nc.Subscribe(beaconSubject+"*", func(msg *nats.Msg) { r.hear(strings.TrimPrefix(msg.Subject, beaconSubject)) })
	if err != nil {
		return nil, fmt.Errorf("listen for other replicas: %w", err)
	}
	return sub, nil
}

func (r *replicas) hear(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	for other, at := range r.heard {
		if now.Sub(at) > heardWithin {
			delete(r.heard, other)
		}
	}
	r.heard[id] = now
}

// call tells the others that this replica is there.
func (r *replicas) call() error { return r.nc.Publish(beaconSubject+r.self, nil) }

// live reports whether a replica was heard lately; this one always was.
func (r *replicas) live(id string) bool {
	if id == r.self {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	at, ok := r.heard[id]
	return ok && r.now().Sub(at) <= heardWithin
}

// owner is the replica that should dial a runner: of those that are there the one with the highest hash, so that the runners of one
// that is gone spread over the rest, and no other runner moves.
func (r *replicas) owner(runner string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	best, most := r.self, weight(r.self, runner)
	now := r.now()
	for id, at := range r.heard {
		if now.Sub(at) > heardWithin {
			continue
		}
		if w := weight(id, runner); w > most {
			best, most = id, w
		}
	}
	return best
}

func weight(replica, runner string) string {
	sum := sha256.Sum256([]byte(replica + "\x00" + runner))
	return string(sum[:])
}
