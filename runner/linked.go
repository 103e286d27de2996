package runner

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/sync/errgroup"

	"github.com/org-runink/runbus/runner/intake"
	"github.com/org-runink/runbus/schemas"
)

// linkedURL stands for the control plane in nats.go, which dials by a name; the dialer knows better.
const linkedURL = "nats://link.invalid:4222"

// lookAgain is how often the NATS client looks for a link beside being told of one: nats.go forgets a ForceReconnect that comes
// between two of its pauses.
const lookAgain = 250 * time.Millisecond

// linked is what a runner has that gets its connections from the control plane: over its port (dialled), or as its child. It holds
// the one link in use.
type linked struct {
	slot intake.Slot
	log  *slog.Logger

	attached chan struct{} // closed when nc is set
	nc       atomic.Pointer[nats.Conn]
}

func (l *linked) open(log *slog.Logger) {
	l.log, l.attached = log, make(chan struct{})
	l.slot.Answers, l.slot.Arrived = l.answers, l.arrived
}

// await begins to take links and waits until it is known who this runner is: when a dialled one is enrolled, or a child has its first
// link. What takes the links runs in group. It is errDrained when the runner is drained before.
func (a *Agent) await(ctx context.Context, group *errgroup.Group) error {
	var who func(context.Context) (schemas.RunnerRef, error)
	if a.child != nil {
		who = a.child.who
		group.Go(guard("lifeline", func() error { return a.child.serve(ctx) }))
	} else {
		who = a.dialled.who
		if err := a.listen(ctx, group); err != nil {
			return err
		}
	}
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-a.drainNow:
			stop()
		case <-waiting.Done():
		}
	})
	defer watch.Wait()
	defer stop()
	ref, err := who(waiting)
	switch {
	case err != nil && ctx.Err() == nil:
		return errDrained
	case err != nil:
		return err
	}
	a.ref = ref
	if a.child != nil { // those of several tenants write into one log
		a.log = a.log.With("managed", ref.Tenant)
		a.works.done.log = a.log
	}
	if a.cfg.Name == "" {
		a.cfg.Name = a.dialled.store.Name()
	}
	return nil
}

// dialer is how nats.go gets at a connection.
func (a *Agent) dialer(dialling context.Context) nats.CustomDialer {
	if a.linked != nil {
		return &a.linked.slot
	}
	return &dialer{dialling, a.tunnel, a.waits.connect, a.polling()}
}

// servers are the URLs for nats.go.
func (a *Agent) servers() string {
	if a.linked != nil {
		return linkedURL
	}
	return strings.Join(a.cfg.Addrs, ",")
}

// attach gives the NATS connection to those who decide on links.
func (l *linked) attach(nc *nats.Conn) {
	l.nc.Store(nc)
	close(l.attached)
	if l.slot.Waiting() {
		l.arrived()
	}
}

// arrived makes the NATS client take the link that waits. It leaves one that it has.
func (l *linked) arrived() {
	nc := l.nc.Load()
	if nc == nil {
		return // its first dial is to come
	}
	if err := nc.ForceReconnect(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
		l.log.Warn("take the new link", "error", err)
	}
}

// answers reports whether the link in use answers before ctx ends; one that the NATS client is still taking gets the time to.
func (l *linked) answers(ctx context.Context) bool {
	select {
	case <-l.attached:
	case <-ctx.Done():
		return false
	}
	nc := l.nc.Load()
	connected := nc.StatusChanged(nats.CONNECTED)
	defer nc.RemoveStatusListener(connected)
	for {
		if nc.IsConnected() && nc.FlushWithContext(ctx) == nil {
			return true
		}
		select {
		case <-connected:
		case <-ctx.Done():
			return false
		}
	}
}

// option shows the token of the link.
func (l *linked) option() nats.Option { return nats.UserInfoHandler(l.slot.UserInfo) }
