package jetstream

import (
	"context"
	"errors"
	"fmt"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/schemas"
)

const (
	traceStream = "RUNBUS_TRACE"
	tracePrefix = "runbus.trace."

	// traceAge and traceBytes bound what is kept of the dispatches' timelines: a day, and at a high rate less.
	traceAge   = 24 * time.Hour
	traceBytes = 1 << 30
	// maxTraceMessage bounds one message, headers included.
	maxTraceMessage = 512 << 10
)

// TraceKind says which timelines a message of the trace stream holds.
type TraceKind string

// The kinds. Each message holds timelines of one tenant only.
const (
	// TraceEnded holds dispatches that have ended; each dispatch is in one such message only.
	TraceEnded TraceKind = "ended"
	// TraceRunning holds all long dispatches of one replica that run; its last message counts.
	TraceRunning TraceKind = "running"
)

// TraceMessage is one message of the trace stream.
type TraceMessage struct {
	Seq  uint64
	At   time.Time // when it was stored, by the server's clock
	Body []byte
}

func traceSubject(tenant string, kind TraceKind, replica string) string {
	return tracePrefix + tenant + "." + string(kind) + "." + replica
}

// AppendTrace stores one message of a tenant's timelines, written by a replica, once. What the server doesn't acknowledge in time
// may be stored or not: ErrUnavailable.
func (s *Store) AppendTrace(ctx context.Context, tenant string, kind TraceKind, replica string, body []byte) error {
	id := natsjs.WithMsgID(schemas.NewID()) // by which the server knows the second try of what it has
	if err := ask(ctx, askTimeout, func(ctx context.Context) error {
		_, err := s.js.Publish(ctx, traceSubject(tenant, kind, replica), body, id)
		return err
	}); err != nil {
		return fmt.Errorf("%w: append to the trace stream: %w", ErrUnavailable, err)
	}
	return nil
}

// NextTrace is the first message of this tenant and kind at or behind sequence from, of any replica, read from the leader;
// ErrNotFound if there is none.
func (s *Store) NextTrace(ctx context.Context, tenant string, kind TraceKind, from uint64) (TraceMessage, error) {
	var m *natsjs.RawStreamMsg
	if err := ask(ctx, askTimeout, func(ctx context.Context) (err error) {
		m, err = s.stream(traceStream).GetMsg(ctx, max(from, 1), natsjs.WithGetMsgSubject(traceSubject(tenant, kind, "*")))
		return err
	}); err != nil {
		return TraceMessage{}, readError("read the trace stream", err)
	}
	return TraceMessage{Seq: m.Sequence, At: m.Time, Body: m.Data}, nil
}

// TraceBounds are the first and the last sequence of the trace stream; last is 0 when nothing was ever stored.
func (s *Store) TraceBounds(ctx context.Context) (first, last uint64, err error) {
	var st natsjs.Stream
	if err := ask(ctx, askTimeout, func(ctx context.Context) (err error) {
		st, err = s.js.Stream(ctx, traceStream)
		return err
	}); err != nil {
		return 0, 0, readError("ask for the end of the trace stream", err)
	}
	state := st.CachedInfo().State
	return state.FirstSeq, state.LastSeq, nil
}

// RunningTraces are the last messages of TraceRunning of a tenant, one for each replica that ever wrote one within the day.
func (s *Store) RunningTraces(ctx context.Context, tenant string) (all []TraceMessage, err error) {
	if err := ask(ctx, 2*askTimeout, func(ctx context.Context) (err error) {
		all, err = s.runningTraces(ctx, tenant)
		return err
	}); err != nil {
		return nil, readError("read the trace stream", err)
	}
	return all, nil
}

func (s *Store) runningTraces(ctx context.Context, tenant string) ([]TraceMessage, error) {
	st, err := s.js.Stream(ctx, traceStream)
	if err != nil {
		return nil, err
	}
	info, err := st.Info(ctx, natsjs.WithSubjectFilter(traceSubject(tenant, TraceRunning, "*")))
	if err != nil {
		return nil, err
	}
	var all []TraceMessage
	for subject := range info.State.Subjects {
		m, err := s.stream(traceStream).GetLastMsgForSubject(ctx, subject)
		if errors.Is(err, natsjs.ErrMsgNotFound) {
			continue // it has expired in between
		}
		if err != nil {
			return nil, err
		}
		all = append(all, TraceMessage{Seq: m.Sequence, At: m.Time, Body: m.Data})
	}
	return all, nil
}

// TraceBefore is the sequence at or behind which the first message of this tenant and kind that was stored at or after
// from stands: a bisection, about twenty reads of the leader.
func (s *Store) TraceBefore(ctx context.Context, tenant string, kind TraceKind, from time.Time) (uint64, error) {
	first, last, err := s.TraceBounds(ctx)
	if err != nil {
		return 0, err
	}
	lo, hi := first, last+1
	for lo < hi {
		mid := lo + (hi-lo)/2
		m, err := s.NextTrace(ctx, tenant, kind, mid)
		switch {
		case errors.Is(err, ErrNotFound):
			hi = mid
		case err != nil:
			return 0, err
		case m.At.Before(from):
			lo = m.Seq + 1
		default:
			hi = mid
		}
	}
	return lo, nil
}
