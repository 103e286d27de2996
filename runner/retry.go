package runner

import (
	"errors"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	firstRetry   = 2 * time.Second // SPEC E8: within 5 s
	slowestRetry = 20 * time.Second
	eager        = 20 * time.Second       // more than the grace that running works have (SPEC D13)
	atOnce       = 250 * time.Millisecond // an attempt that failed sooner has cost the control plane nothing
)

// retryDelay spaces attempts for ever: after the first failure (attempt 1) at most firstRetry, then doubling to slowestRetry,
// each from a quarter of that to the whole of it, so that many runners don't come at once.
func retryDelay(attempt int) time.Duration {
	doublings := min(max(attempt, 1)-1, 10)
	most := min(firstRetry<<doublings, slowestRetry)
	return most/4 + rand.N(most*3/4) //nolint:gosec // spreads load, keeps no secret
}

// redial paces the attempts to make one link anew; nats.go asks it from one goroutine at a time. As long as the works of this process
// may be waited for, a link that can be had again is not waited for: the pauses grow then only by attempts that something heavy
// answered, too slowly or with a refusal, and not by those that found nobody, however long a busy host takes for that.
type redial struct {
	lost, next time.Time   // when the link was lost, and when the last pause was over
	nobody     atomic.Bool // the last dial was refused by a host: nobody listens there
}

// through has redial see what comes of each dial of d.
func (r *redial) through(d nats.CustomDialer) nats.CustomDialer { return watchedDialer{d, r} }

type watchedDialer struct {
	nats.CustomDialer
	redial *redial
}

// Dial connects to addr.
func (w watchedDialer) Dial(network, addr string) (net.Conn, error) {
	c, err := w.CustomDialer.Dial(network, addr)
	w.redial.nobody.Store(errors.Is(err, syscall.ECONNREFUSED))
	return c, err
}

// pause is the pause before an attempt (1: the first since the link was lost) that would be wait. refused says that the control plane
// itself ended the attempt before.
func (r *redial) pause(attempt int, wait time.Duration, refused bool, now time.Time) time.Duration {
	if attempt <= 1 {
		r.lost = now
	} else if heavy := refused || now.Sub(r.next) >= atOnce; (r.nobody.Load() || !heavy) && now.Sub(r.lost) < eager {
		wait = min(wait, retryDelay(1))
	}
	r.next = now.Add(wait)
	return wait
}
