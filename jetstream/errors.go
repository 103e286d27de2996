package jetstream

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

var (
	// ErrNotFound says that there is no such key.
	ErrNotFound = errors.New("no such key")
	// ErrLost says that another writer won: what stands there is not what this write expected, and not this write.
	ErrLost = errors.New("another writer was first")
	// ErrUnknown says that a write was sent and that its outcome could not be established. It is not granted, and it may
	// still take effect.
	ErrUnknown = errors.New("the outcome of the write is unknown")
	// ErrUnavailable says that JetStream did not answer, or has no leader: nothing was read, nothing was written.
	ErrUnavailable = errors.New("the store is unavailable")
	// ErrMissing is an alarm: a bucket or stream that holds security decisions is gone though the data folder is not a
	// fresh one. It is never replaced by an empty one.
	ErrMissing = errors.New("a security stream is missing")
	// ErrDrift says that a stream exists with a configuration that is not ours and can't be changed into it.
	ErrDrift = errors.New("a stream is configured differently")
)

// Codes of the server for a compare-and-set that lost: wrong last sequence, and its constant form in a cluster.
const (
	codeWrongLastSequence         = 10071
	codeWrongLastSequenceConstant = 10164
)

// lost reports whether err is the server's refusal of a compare-and-set.
func lost(err error) bool {
	var api *natsjs.APIError
	if !errors.As(err, &api) {
		return false
	}
	return api.ErrorCode == codeWrongLastSequence || api.ErrorCode == codeWrongLastSequenceConstant
}

// unsent reports whether err proves that nobody took the message.
func unsent(err error) bool {
	return errors.Is(err, nats.ErrNoResponders) || errors.Is(err, natsjs.ErrNoStreamResponse) ||
		errors.Is(err, nats.ErrReconnectBufExceeded)
}

// readError turns the error of a read into one of this package's.
func readError(what string, err error) error {
	var api *natsjs.APIError
	switch {
	case errors.Is(err, natsjs.ErrMsgNotFound):
		return fmt.Errorf("%s: %w", what, ErrNotFound)
	case errors.As(err, &api):
		return fmt.Errorf("%s: %w: %w", what, ErrUnavailable, err)
	case errors.Is(err, context.Canceled):
		return fmt.Errorf("%s: %w", what, err)
	}
	return fmt.Errorf("%s: %w: %w", what, ErrUnavailable, err)
}
