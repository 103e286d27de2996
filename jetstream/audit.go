package jetstream

import (
	"context"
	"errors"
)

// AppendAudit appends body if the stream's last sequence is expectedLast, and returns its sequence; ErrLost if it is not.
func (s *Store) AppendAudit(ctx context.Context, body []byte, expectedLast uint64) (uint64, error) {
	return 0, errors.ErrUnsupported
}

// LastAudit is the last message of the audit stream; sequence 0 if there is none.
func (s *Store) LastAudit(ctx context.Context) (seq uint64, body []byte, err error) {
	return 0, nil, errors.ErrUnsupported
}

// ReadAudit calls fn for each message from sequence fromSeq to the last one at the time of the call, in order.
func (s *Store) ReadAudit(ctx context.Context, fromSeq uint64, fn func(seq uint64, body []byte) error) error {
	return errors.ErrUnsupported
}
