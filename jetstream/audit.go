package jetstream

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"
)

// AppendAudit appends body if the stream's last sequence is expectedLast, and returns its sequence. encoding, if not empty, is said in the
// header Content-Encoding. ErrLost: it isn't, and body was not appended. ErrUnknown: call again with the same body and expectedLast to find
// out; it is never appended twice. ErrUnavailable: not appended.
func (s *Store) AppendAudit(ctx context.Context, body []byte, encoding string, expectedLast uint64) (uint64, error) {
	var header nats.Header
	if encoding != "" {
		header = nats.Header{"Content-Encoding": {encoding}}
	}
	seq, err := s.commit(ctx, write{
		subject: auditSubject, header: header, body: body,
		guard: natsjs.ExpectedLastSeqHeader, expected: expectedLast, appends: true,
		standing: func(ctx context.Context) (*natsjs.RawStreamMsg, error) {
			m, err := s.stream(auditStream).GetMsg(ctx, expectedLast+1)
			if err != nil {
				return nil, readError("read the audit stream", err)
			}
			return m, nil
		},
	})
	if err != nil {
		return 0, fmt.Errorf("append to the audit stream: %w", err)
	}
	return seq, nil
}

// auditReadTimeout bounds the read of one message, of up to 512 KiB, from a leader that may be busy.
const auditReadTimeout = 4 * askTimeout

// ReadAuditAt reads the message at sequence seq from the leader; ErrNotFound if there is none.
func (s *Store) ReadAuditAt(ctx context.Context, seq uint64) ([]byte, error) {
	var m *natsjs.RawStreamMsg
	if err := ask(ctx, auditReadTimeout, func(ctx context.Context) (err error) {
		m, err = s.stream(auditStream).GetMsg(ctx, seq)
		return err
	}); err != nil {
		return nil, readError(fmt.Sprintf("read audit message %d", seq), err)
	}
	return m.Data, nil
}

// LastAudit reads the last message of the audit stream from the leader; sequence 0 if nothing was ever appended. That the
// last message is gone though its sequence was given out is ErrNotFound: somebody removed it.
func (s *Store) LastAudit(ctx context.Context) (seq uint64, body []byte, err error) {
	seq, err = s.lastAuditSeq(ctx)
	if err != nil || seq == 0 {
		return 0, nil, err
	}
	body, err = s.ReadAuditAt(ctx, seq)
	return seq, body, err
}

func (s *Store) lastAuditSeq(ctx context.Context) (uint64, error) {
	var st natsjs.Stream
	err := ask(ctx, askTimeout, func(ctx context.Context) (err error) {
		st, err = s.js.Stream(ctx, auditStream)
		return err
	})
	if errors.Is(err, natsjs.ErrStreamNotFound) {
		return 0, fmt.Errorf("%w: %s", ErrMissing, auditStream)
	}
	if err != nil {
		return 0, readError("ask for the end of the audit stream", err)
	}
	return st.CachedInfo().State.LastSeq, nil
}

// auditWindow is how many messages ReadAudit asks for at once: up to 2 MiB.
const auditWindow = 4

// ReadAudit calls fn for each message from sequence fromSeq (0 and 1 mean the first) up to the last one at the time of the
// call, in order, from the leader. A sequence whose message is gone is left out: fn sees the gap. An error of fn ends it
// and is returned as it is.
func (s *Store) ReadAudit(ctx context.Context, fromSeq uint64, fn func(seq uint64, body []byte) error) error {
	last, err := s.lastAuditSeq(ctx)
	if err != nil {
		return err
	}
	for from := max(fromSeq, 1); from <= last; from += auditWindow {
		n := min(auditWindow, last-from+1)
		bodies := make([][]byte, n)
		there := make([]bool, n)
		group, ctx := errgroup.WithContext(ctx)
		for i := range n {
			group.Go(func() error {
				body, err := s.ReadAuditAt(ctx, from+i)
				if errors.Is(err, ErrNotFound) {
					return nil
				}
				bodies[i], there[i] = body, err == nil
				return err
			})
		}
		if err := group.Wait(); err != nil {
			return err
		}
		for i := range n {
			if !there[i] {
				continue
			}
			if err := fn(from+i, bodies[i]); err != nil {
				return err
			}
		}
	}
	return nil
}
