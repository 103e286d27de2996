package jetstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/schemas"
)

// headerWrite carries a random id per write, by which a writer whose acknowledgement was lost knows its own again.
const headerWrite = "Runbus-Write"

const (
	commitTimeout   = 10 * time.Second       // of a write whose context has no earlier end
	writeAgainAfter = 100 * time.Millisecond // between two attempts of one write
)

// write is one compare-and-set.
type write struct {
	subject  string
	header   nats.Header
	body     []byte
	guard    string // the header that holds expected
	expected uint64
	appends  bool // goes behind expected, rather than in its place, and is known by its body rather than its id
	// standing reads from the leader what stands where this write goes; ErrNotFound if nothing does.
	standing func(context.Context) (*natsjs.RawStreamMsg, error)
}

// commit sends w and returns its sequence. A write that isn't acknowledged is established by a read from the leader: it
// stands there (granted), another one does (ErrLost), or neither, and then the same write is sent again while ctx lasts,
// which is safe since at most one of the two can pass the compare. What stays open is ErrUnknown.
func (s *Store) commit(ctx context.Context, w write) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, commitTimeout)
	defer cancel()
	id := schemas.NewID()
	sent := false
	for {
		seq, err := s.publish(ctx, w, id)
		switch {
		case err == nil:
			return seq, nil
		case lost(err) && w.appends:
			seq, err = s.establish(ctx, w, id)
			if errors.Is(err, errUnread) {
				break // it may be this one that stands there, and is asked for again
			}
			if errors.Is(err, errNotYet) {
				err = ErrLost // there is no place behind expected any more
			}
			return seq, err
		case !sent && lost(err):
			return 0, ErrLost
		case !sent && unsent(err):
			return 0, fmt.Errorf("%w: %w", ErrUnavailable, err)
		case !sent && refused(err):
			return 0, refusal(err)
		}
		sent = true
		seq, err = s.establish(ctx, w, id)
		if !errors.Is(err, errNotYet) {
			return seq, err
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("%w: %w", ErrUnknown, context.Cause(ctx))
		case <-s.ctx.Done():
			return 0, fmt.Errorf("%w: the store was closed", ErrUnknown)
		case <-time.After(writeAgainAfter):
		}
	}
}

func (s *Store) publish(ctx context.Context, w write, id string) (uint64, error) {
	ask, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	m := &nats.Msg{Subject: w.subject, Header: nats.Header{}, Data: w.body}
	for k, v := range w.header {
		m.Header[k] = v
	}
	m.Header.Set(w.guard, strconv.FormatUint(w.expected, 10))
	m.Header.Set(headerWrite, id)
	ack, err := s.js.PublishMsg(ask, m)
	if err != nil {
		return 0, err
	}
	return ack.Sequence, nil
}

// errNotYet says that a write was not found, and that it may still come.
var errNotYet = errors.New("the write is not there yet")

// errUnread is errNotYet for want of an answer.
var errUnread = fmt.Errorf("what stands there was not read: %w", errNotYet)

// establish finds out what became of a write that was not acknowledged. It gets a little time beyond ctx, which is
// usually over by then.
func (s *Store) establish(ctx context.Context, w write, id string) (uint64, error) {
	ask, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
	defer cancel()
	m, err := w.standing(ask)
	switch {
	case errors.Is(err, ErrNotFound) && (w.appends || w.expected == 0):
		return 0, errNotYet
	case errors.Is(err, ErrNotFound):
		return 0, ErrLost // what it was to replace is gone, so it can't pass any more
	case err != nil && ctx.Err() == nil && s.ctx.Err() == nil && !s.nc.IsClosed():
		return 0, errUnread
	case err != nil:
		return 0, fmt.Errorf("%w: %w", ErrUnknown, err)
	case w.appends && bytes.Equal(m.Data, w.body), !w.appends && m.Header.Get(headerWrite) == id:
		return m.Sequence, nil
	case m.Sequence == w.expected && !w.appends:
		return 0, errNotYet
	}
	return 0, ErrLost
}

// refused reports whether err is an answer of the server: it did not store the message.
func refused(err error) bool {
	var api *natsjs.APIError
	return errors.As(err, &api)
}

// refusal is the error of a write that the server refused. Where the server itself is in trouble it is ErrUnavailable.
func refusal(err error) error {
	var api *natsjs.APIError
	if errors.As(err, &api) && api.Code >= 500 {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return fmt.Errorf("the server refuses the write: %w", err)
}
