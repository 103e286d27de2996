package jetstream

import (
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
)

// The messages of a tenant are found one after the other, by time, and the last one of each replica; ops sees them all, and
// can't change any.
func TestTraces(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, nil)
	if err := s.OpenMirrors(ctx, b.Conn(t, embedded.UserMirror)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.NextTrace(ctx, "acme", TraceEnded, 0); !errors.Is(err, ErrNotFound) {
		t.Errorf("of an empty stream: %v", err)
	}
	if first, last, err := s.TraceBounds(ctx); err != nil || first > 1 || last != 0 {
		t.Errorf("an empty stream from %d to %d: %v", first, last, err)
	}
	var at []time.Time
	for i := range 20 {
		if err := s.AppendTrace(ctx, []string{"acme", "umbrella"}[i%2], TraceEnded, "r", fmt.Appendf(nil, "%d", i)); err != nil {
			t.Fatal(err)
		}
		m, err := s.NextTrace(ctx, []string{"acme", "umbrella"}[i%2], TraceEnded, uint64(i+1))
		if err != nil || string(m.Body) != strconv.Itoa(i) || m.Seq != uint64(i+1) {
			t.Fatalf("message %d: %+v, %v", i, m, err)
		}
		at = append(at, m.At)
	}
	seq, n := uint64(0), 0
	for {
		m, err := s.NextTrace(ctx, "umbrella", TraceEnded, seq)
		if errors.Is(err, ErrNotFound) {
			break
		}
		if err != nil || m.Seq%2 != 0 {
			t.Fatalf("%+v, %v", m, err)
		}
		seq, n = m.Seq+1, n+1
	}
	if n != 10 {
		t.Errorf("%d messages of umbrella", n)
	}
	for i := 0; i < len(at); i += 2 { // those of acme
		seq, err := s.TraceBefore(ctx, "acme", TraceEnded, at[i])
		if err != nil {
			t.Fatal(err)
		}
		if m, err := s.NextTrace(ctx, "acme", TraceEnded, seq); err != nil || m.Seq != uint64(i+1) {
			t.Errorf("from the time of %d: %+v, %v", i+1, m, err)
		}
	}
	if seq, err := s.TraceBefore(ctx, "acme", TraceEnded, time.Now().Add(time.Hour)); err != nil || seq < 20 {
		t.Errorf("from the future: %d, %v", seq, err)
	}
	for _, replica := range []string{"r1", "r2", "r1"} {
		if err := s.AppendTrace(ctx, "acme", TraceRunning, replica, []byte(replica)); err != nil {
			t.Fatal(err)
		}
	}
	if all, err := s.RunningTraces(ctx, "acme"); err != nil || len(all) != 2 {
		t.Errorf("%+v, %v", all, err)
	}
	if all, err := s.RunningTraces(ctx, "umbrella"); err != nil || len(all) != 0 {
		t.Errorf("%+v, %v", all, err)
	}
	if err := s.AppendTrace(ctx, "acme", TraceEnded, "r", make([]byte, maxTraceMessage+1)); !errors.Is(err, ErrUnavailable) {
		t.Errorf("a message over the limit: %v", err)
	}

	ops, err := natsjs.New(b.OpsConn(t))
	if err != nil {
		t.Fatal(err)
	}
	consumer, err := ops.OrderedConsumer(ctx, traceStream, natsjs.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 23 {
		m, err := consumer.Next(natsjs.FetchMaxWait(patience))
		if err != nil {
			t.Fatalf("message %d of the mirror: %v", i, err)
		}
		if meta, err := m.Metadata(); err != nil || meta.Sequence.Stream != uint64(i+1) {
			t.Errorf("message %d of the mirror: %+v, %v", i, meta, err)
		}
	}
	mirror, err := ops.Stream(ctx, traceStream)
	if err != nil {
		t.Fatal(err)
	}
	if c := mirror.CachedInfo().Config; c.MaxAge != traceAge || c.MaxBytes != traceBytes {
		t.Errorf("the mirror keeps %s, %d bytes", c.MaxAge, c.MaxBytes)
	}
}

// A trace stream that is gone is made again, empty, and written to.
func TestTraceStreamIsMadeAgain(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, func(o *Options) { o.RescanEvery = time.Hour }) // it is the test that looks
	if err := s.js.DeleteStream(ctx, traceStream); err != nil {
		t.Fatal(err)
	}
	if err := s.AppendTrace(ctx, "acme", TraceEnded, "r", []byte("x")); !errors.Is(err, ErrUnavailable) {
		t.Errorf("without a stream: %v", err)
	}
	s.inspect(ctx)
	if err := s.AppendTrace(ctx, "acme", TraceEnded, "r", []byte("x")); err != nil {
		t.Error(err)
	}
}
