package jetstream

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
)

// Options say how the streams are made.
type Options struct {
	// Replicas of each stream: 1 alone, 3 in a cluster. Zero means 1.
	Replicas int
	// Fresh says that the data folder was initialised just now: only then are the streams that hold security decisions
	// created. Memory buckets are created whenever they are missing.
	Fresh bool
	// HeartbeatTTL is how long a key of Heartbeats outlives its last write, in whole seconds. Zero means 60 s.
	HeartbeatTTL time.Duration
	// ConfirmEvery is how often a View asks the leader whether it is current. Zero means 5 s.
	ConfirmEvery time.Duration
	// RescanEvery is how often a View reads its whole bucket again, and the store checks its streams and mirrors. Zero
	// means 30 s.
	RescanEvery time.Duration
	// Log of the store; nil means slog.Default().
	Log *slog.Logger
}

// Store is the open set of buckets and streams. It is safe for concurrent use.
type Store struct{ o Options }

// Open verifies, and where Options allow creates, all buckets and streams over a connection in account SEC.
func Open(ctx context.Context, sec *nats.Conn, o Options) (*Store, error) {
	return nil, errors.ErrUnsupported
}

// Close stops the store's tasks and every View made from it. The connections stay open: they are the caller's.
func (s *Store) Close() {}

// Check returns nil if every stream is there and its leader answers; else ErrMissing or ErrUnavailable.
func (s *Store) Check(ctx context.Context) error { return errors.ErrUnsupported }

// OpenMirrors makes the mirrors of heartbeats and audit over a connection in account OPS.
func (s *Store) OpenMirrors(ctx context.Context, mirror *nats.Conn) error {
	return errors.ErrUnsupported
}

// Bucket names one key-value bucket.
type Bucket string

// The buckets.
const (
	Identities Bucket = "runbus_identities" // file: service-account keys, sessions of people
	Known      Bucket = "runbus_known"      // file: outbound runners seen, and the key each id is bound to
	Heartbeats Bucket = "runbus_heartbeats" // memory, keys expire: the live runners
)
