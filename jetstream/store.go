package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// Options say how the streams are made and how often they are looked after. The zero value is good for one replica on a
// data folder that was used before.
type Options struct {
	// Replicas of each stream: 1 alone, 3 in a cluster. Zero means 1.
	Replicas int
	// Fresh says that the data folder was initialised just now: only then are the streams that hold security decisions
	// created. Memory buckets are created whenever they are missing.
	Fresh bool
	// Format is the format of a data folder that is not fresh: security streams that came after it are created as well, for
	// the folder can't have held them. Zero means Format, the present one: then none are. The caller notes Format in the
	// folder when Open has returned, and from then on a missing one is an alarm.
	Format int
	// HeartbeatTTL is how long a key of Heartbeats outlives its last write, in whole seconds. Zero means 60 s.
	HeartbeatTTL time.Duration
	// ConfirmEvery is how often a View asks the leader whether it is current. Zero means 5 s.
	ConfirmEvery time.Duration
	// RescanEvery is how often a View compares its keys with the leader's, and the store checks its streams and mirrors. Zero
	// means 30 s. A View that needs long for it does so less often.
	RescanEvery time.Duration
	// Log of the store; nil means slog.Default().
	Log *slog.Logger
}

func (o *Options) defaults() error {
	if o.Replicas == 0 {
		o.Replicas = 1
	}
	if o.Format == 0 {
		o.Format = Format
	}
	if o.HeartbeatTTL == 0 {
		o.HeartbeatTTL = 60 * time.Second
	}
	if o.HeartbeatTTL < time.Second || o.HeartbeatTTL%time.Second != 0 {
		return fmt.Errorf("the heartbeat TTL %v is not in whole seconds", o.HeartbeatTTL)
	}
	if o.ConfirmEvery == 0 {
		o.ConfirmEvery = 5 * time.Second
	}
	if o.RescanEvery == 0 {
		o.RescanEvery = 30 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return nil
}

// askTimeout bounds one request to the server: longer than any answer of a leader, shorter than what a caller waits.
const askTimeout = 2 * time.Second

// askTries is how often a request that changes nothing, or nothing more the second time, is made. A process, or its whole machine, may
// stand still for some seconds: then the time of a request is over before its answer is looked at.
const askTries = 2

// ask makes a request within that time, and again if that is over and ctx has more. The error is of the last try.
func ask(ctx context.Context, within time.Duration, request func(context.Context) error) error {
	for try := 1; ; try++ {
		one, cancel := context.WithTimeout(ctx, within)
		err := request(one)
		late := one.Err() != nil
		cancel()
		if err == nil || !late || ctx.Err() != nil || try == askTries {
			return err
		}
	}
}

// openTimeout bounds what Open asks about one stream: to make it takes several writes to a disk that may be busy.
const openTimeout = 15 * time.Second

// Store is the open set of buckets and streams. It is safe for concurrent use.
type Store struct {
	o    Options
	nc   *nats.Conn
	js   natsjs.JetStream
	defs map[string]definition

	ctx    context.Context //nolint:containedctx // the life of the store's tasks, which outlive the call that starts them; ends with Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	look   chan struct{} // asks the keeper to look now

	mirrors sync.Mutex // held while one is looked at: who sees a wrong one at once with another would delete what that has just made

	mu      sync.Mutex
	closed  bool
	streams map[string]natsjs.Stream // handles for leader reads: never refreshed, so direct get stays off
	ops     natsjs.JetStream         // account OPS, once OpenMirrors was called
}

// Open verifies, and where Options allow creates, all buckets and streams over a connection in account SEC. It returns
// ErrMissing if a security stream is gone, ErrDrift if one is configured otherwise in a way that can't be corrected, and
// ErrUnavailable if JetStream doesn't answer. Close the store before the connection.
func Open(ctx context.Context, sec *nats.Conn, o Options) (*Store, error) {
	if err := o.defaults(); err != nil {
		return nil, err
	}
	js, err := natsjs.New(sec, natsjs.WithDefaultTimeout(askTimeout))
	if err != nil {
		return nil, fmt.Errorf("open JetStream: %w", err)
	}
	s := &Store{
		o: o, nc: sec, js: js,
		defs: map[string]definition{}, streams: map[string]natsjs.Stream{},
		look: make(chan struct{}, 1),
	}
	for _, d := range definitions(o) {
		var st natsjs.Stream
		var created bool
		if err := ask(ctx, openTimeout, func(ctx context.Context) (err error) {
			st, created, err = ensure(ctx, js, d, !d.security || o.Fresh || d.since > o.Format)
			return err
		}); err != nil {
			return nil, err
		}
		if created {
			o.Log.Info("stream created", "stream", d.config.Name, "storage", d.config.Storage.String())
		}
		s.defs[d.config.Name] = d
		s.streams[d.config.Name] = st
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.task(s.keep)
	return s, nil
}

// Close stops the store's tasks and every View made from it. The connections stay open: they are the caller's.
func (s *Store) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.tasks.Wait()
}

// Check returns nil if every stream is there and its leader answers; else ErrMissing or ErrUnavailable.
func (s *Store) Check(ctx context.Context) error {
	for name, d := range s.defs {
		err := ask(ctx, askTimeout, func(ctx context.Context) error {
			_, err := s.js.Stream(ctx, name)
			return err
		})
		if errors.Is(err, natsjs.ErrStreamNotFound) && d.security {
			return fmt.Errorf("%w: %s", ErrMissing, name)
		}
		if err != nil {
			return readError("check stream "+name, err)
		}
	}
	return nil
}

// task runs f until the store is closed; false if it is closed already.
func (s *Store) task(f func(context.Context)) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.tasks.Go(func() { f(s.ctx) })
	return true
}

// stream is the handle for leader reads.
func (s *Store) stream(name string) natsjs.Stream {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.streams[name]
}

// keep looks after the streams and the mirrors, on a timer, after each reconnect, and when asked to.
func (s *Store) keep(ctx context.Context) {
	status := s.nc.StatusChanged(nats.CONNECTED)
	defer s.nc.RemoveStatusListener(status)
	tick := time.NewTicker(s.o.RescanEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-status:
		case <-s.look:
		}
		s.inspect(ctx)
	}
}

// lookNow wakes the keeper.
func (s *Store) lookNow() {
	select {
	case s.look <- struct{}{}:
	default:
	}
}

// inspect makes what holds no security decision again when it is missing, reports missing security streams, and repairs the mirrors.
func (s *Store) inspect(ctx context.Context) {
	for name, d := range s.defs {
		err := ask(ctx, askTimeout, func(ctx context.Context) error {
			if d.security {
				_, _, err := ensure(ctx, s.js, d, false)
				return err
			}
			return s.ensureAgain(ctx, name)
		})
		switch {
		case err == nil || ctx.Err() != nil:
		case errors.Is(err, ErrUnavailable):
			s.o.Log.Warn("stream does not answer", "stream", name, "error", err)
		default:
			s.o.Log.Error("stream is not as it must be", "stream", name, "error", err)
		}
	}
	s.mu.Lock()
	ops := s.ops
	s.mu.Unlock()
	if ops == nil {
		return
	}
	for _, name := range mirrored {
		if err := s.mirror(ctx, ops, name); err != nil && ctx.Err() == nil {
			s.o.Log.Warn("mirror can't be kept", "stream", name, "error", err)
		}
	}
}

// ensureAgain makes a stream that holds no security decision, and is gone, again.
func (s *Store) ensureAgain(ctx context.Context, name string) error {
	_, created, err := ensure(ctx, s.js, s.defs[name], true)
	if err != nil {
		return err
	}
	if created {
		s.o.Log.Warn("stream was gone and is made again, empty", "stream", name)
		s.lookNow()
	}
	return nil
}
