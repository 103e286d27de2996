package bus_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const session = "5e551011"

// pair is a runner and a waiting replica on a real server, the runner's link through a proxy.
type pair struct {
	bus         *bustest.Bus
	proxy       *bustest.Proxy
	runner      *bus.Conn
	senders     *bus.Senders
	replica     *bus.Conn
	link        *cuttable // the replica's
	receivers   *bus.Receivers
	reconnected chan struct{}
}

func newPair(t testing.TB, options ...bus.Option) *pair {
	t.Helper()
	b := bustest.Start(t)
	p := &pair{bus: b, proxy: bustest.NewProxy(t, b.Addr()), reconnected: make(chan struct{}, 100)}
	p.replica = bus.NewConn(b.Conn(t, embedded.UserDispatch, func(o *nats.Options) error {
		p.link = &cuttable{InProcessConnProvider: o.InProcessServer}
		o.InProcessServer = p.link
		return nil
	}))
	var err error
	if p.receivers, err = bus.NewReceivers(p.replica, options...); err != nil {
		t.Fatal(err)
	}
	p.runner = bus.NewConn(p.dial(t, edge))
	if p.senders, err = bus.NewSenders(p.runner, edge, options...); err != nil {
		t.Fatal(err)
	}
	for _, c := range []*bus.Conn{p.runner, p.replica} {
		if err := c.NATS().Flush(); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := errors.Join(p.senders.Close(), p.receivers.Close()); err != nil {
			t.Error(err)
		}
		p.runner.NATS().Close()
	})
	return p
}

func (p *pair) dial(t testing.TB, ref schemas.RunnerRef) *nats.Conn {
	t.Helper()
	return p.bus.RunnerConn(t, ref, nats.ReconnectBufSize(-1), nats.SetCustomDialer(p.proxy),
		nats.ReconnectWait(5*time.Millisecond), nats.ReconnectJitter(0, 0),
		nats.ReconnectHandler(func(*nats.Conn) { p.reconnected <- struct{}{} }))
}

// open makes both ends of one dispatch.
func (p *pair) open(dispatch string, window int64) (*bus.Sender, *bus.Receiver) {
	r := p.receivers.Open(edge, session, dispatch, window)
	return p.senders.Open(dispatch, session, p.receivers.Replica(), r.Window()), r
}

func send(t testing.TB, s *bus.Sender, frames ...bus.Frame) {
	t.Helper()
	for _, f := range frames {
		if err := s.Send(within(t), f); err != nil {
			t.Fatal(err)
		}
	}
}

func next[F bus.Frame](t testing.TB, r *bus.Receiver) (f F) {
	t.Helper()
	got, err := r.Next(within(t))
	if err != nil {
		t.Fatal(err)
	}
	f, ok := got.(F)
	if !ok {
		t.Fatalf("frame %d is a %T, not a %T", got.GetSeq(), got, f)
	}
	return f
}

// eventually waits until a counter that has no event of its own has a value: each look is behind a round trip of the server.
func eventually(t testing.TB, c *bus.Conn, what string, ok func() bool) {
	t.Helper()
	ctx := within(t)
	for !ok() {
		if err := c.NATS().FlushWithContext(ctx); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
}

func chunk(b []byte) *runbusv1.RunnerWorkChunk { return &runbusv1.RunnerWorkChunk{ArrowIpc: b} }

// stream sends total bytes from a seed in chunks of any size, then the result, and drains.
func stream(ctx context.Context, s *bus.Sender, seed uint64, total int) error {
	source := rand.NewChaCha8([32]byte{byte(seed)})
	random := rand.New(source)
	sum := sha256.New()
	if err := s.Send(ctx, &runbusv1.RunnerWorkAccepted{}); err != nil {
		return err
	}
	buffer := make([]byte, bus.ChunkBytes) // the same for all: Send must not keep it
	for sent := 0; sent < total; {
		b := buffer[:min(1+random.IntN(bus.ChunkBytes), total-sent)]
		if _, err := source.Read(b); err != nil {
			return err
		}
		sent += len(b)
		sum.Write(b)
		if err := s.Send(ctx, chunk(b)); err != nil {
			return err
		}
		p := &runbusv1.RunnerWorkProgress{Update: &runbusv1.RunFetchUpdate{Phase: runbusv1.Phase_PHASE_STREAMING, Bytes: int64(sent)}}
		if err := s.Send(ctx, p); err != nil {
			return err
		}
	}
	if err := s.Send(ctx, &runbusv1.RunnerWorkResult{Started: true, StreamSha256: sum.Sum(nil)}); err != nil {
		return err
	}
	return s.Drain(ctx)
}

// receive reads a stream to its end and compares its checksum; between is called before each frame is consumed.
func receive(ctx context.Context, r *bus.Receiver, total int, between func(got int)) error {
	sum, got := sha256.New(), 0
	for seq := uint64(1); ; seq++ {
		f, err := r.Next(ctx)
		if err != nil {
			return err
		}
		if f.GetSeq() != seq {
			return fmt.Errorf("frame %d came in place of %d", f.GetSeq(), seq)
		}
		switch f := f.(type) {
		case *runbusv1.RunnerWorkChunk:
			got += len(f.GetArrowIpc())
			sum.Write(f.GetArrowIpc())
		case *runbusv1.RunnerWorkResult:
			r.Done(f)
			return compare(sum, f, got, total)
		}
		between(got)
		r.Done(f)
	}
}

func compare(sum hash.Hash, result *runbusv1.RunnerWorkResult, got, total int) error {
	if got != total || !bytes.Equal(sum.Sum(nil), result.GetStreamSha256()) {
		return fmt.Errorf("%d bytes of %d arrived, or not as they were sent", got, total)
	}
	return nil
}

func TestFramesArriveInOrder(t *testing.T) {
	p := newPair(t, bus.ProbeAfter(time.Hour)) // frames that a probe has sent again, on a slow machine, would be dropped
	const streams, total = 12, 6 << 20         // over eight streams the windows shrink
	ends := make(chan error)
	for i := range streams {
		s, r := p.open(fmt.Sprintf("d%d", i), bus.MaxWindow)
		go func() { ends <- stream(within(t), s, uint64(i), total) }()
		go func() { ends <- receive(within(t), r, total, func(int) {}) }()
	}
	for range 2 * streams {
		if err := <-ends; err != nil {
			t.Error(err)
		}
	}
	if d := p.receivers.Dropped(); len(d) != 0 {
		t.Errorf("dropped without a reason to: %v", d)
	}
	if n := p.senders.Ignored(); n != 0 {
		t.Errorf("%d credits ignored", n)
	}
}

func TestWindowStopsTheSender(t *testing.T) {
	p := newPair(t)
	s, r := p.open("d1", bus.MinWindow)
	half := make([]byte, bus.MinWindow/2)
	send(t, s, &runbusv1.RunnerWorkAccepted{}, chunk(half), chunk(half))
	frames := []bus.Frame{next[*runbusv1.RunnerWorkAccepted](t, r), next[*runbusv1.RunnerWorkChunk](t, r), next[*runbusv1.RunnerWorkChunk](t, r)}

	// Everything arrived and nothing was consumed: a chunk waits, for as long as its context lasts.
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := s.Send(ctx, chunk([]byte{1})); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a chunk over the window: %v", err)
	}
	// What is not a chunk passes all the same.
	send(t, s, &runbusv1.RunnerWorkProgress{Update: &runbusv1.RunFetchUpdate{Rows: 1}})
	if f := next[*runbusv1.RunnerWorkProgress](t, r); f.GetSeq() != 4 {
		t.Fatalf("the chunk that was given up left a gap: frame %d", f.GetSeq())
	}
	// Consuming half of it opens the window.
	sent := make(chan error)
	go func() { sent <- s.Send(within(t), chunk([]byte{2})) }()
	r.Done(frames[1])
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	if f := next[*runbusv1.RunnerWorkChunk](t, r); f.GetSeq() != 5 || f.GetArrowIpc()[0] != 2 {
		t.Fatalf("frame %d holds %v", f.GetSeq(), f.GetArrowIpc())
	}
	send(t, s, &runbusv1.RunnerWorkResult{})
	r.Done(next[*runbusv1.RunnerWorkResult](t, r))
	if err := s.Drain(within(t)); err != nil {
		t.Fatal(err)
	}
}

func TestSendRefusesWhatIsNoStream(t *testing.T) {
	p := newPair(t)
	s, _ := p.open("d1", 0)
	invalid := func(what string, s *bus.Sender, f bus.Frame) {
		t.Helper()
		if err := s.Send(within(t), f); schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("%s: %v", what, err)
		}
	}
	invalid("a chunk that is too large", s, chunk(make([]byte, bus.ChunkBytes+1)))
	send(t, s, &runbusv1.RunnerWorkAccepted{})
	invalid("accepted again", s, &runbusv1.RunnerWorkAccepted{})
	send(t, s, &runbusv1.RunnerWorkResult{})
	invalid("a chunk after the result", s, chunk(nil))
	invalid("a second result", s, &runbusv1.RunnerWorkResult{})
	invalid("a dispatch that is a wildcard", p.senders.Open("*", session, p.receivers.Replica(), 0), &runbusv1.RunnerWorkAccepted{})
	s.Close()
	if err := s.Send(within(t), &runbusv1.RunnerWorkProgress{}); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if err := s.Drain(within(t)); !errors.Is(err, bus.ErrClosed) {
		t.Errorf("drain after Close: %v", err)
	}
}

// A link that is cut again and again while a result passes, losing what is under way in both directions: every byte
// arrives once and in order, and the sender never keeps more than its window.
func TestStreamSurvivesCuts(t *testing.T) {
	p := newPair(t, bus.ResumeEvery(50*time.Millisecond), bus.ResendEvery(50*time.Millisecond))
	s, r := p.open("d1", bus.DefaultWindow)
	const total, cuts = 24 << 20, 6
	ends := make(chan error)
	go func() { ends <- stream(within(t), s, 7, total) }()
	go func() {
		cut := 1
		ends <- receive(within(t), r, total, func(got int) {
			if cut > cuts || got < cut*total/(cuts+1) {
				return
			}
			cut++
			p.proxy.Cut(false)
			<-p.reconnected // what the runner does after its hello:
			p.senders.Resume()
		})
	}()
	for range 2 {
		if err := <-ends; err != nil {
			t.Error(err)
		}
	}
	t.Logf("dropped: %v", p.receivers.Dropped())
}

// The result is sent while there is no link at all: Send says nothing is wrong, and it arrives when the link is back.
func TestResultOutlivesALinkThatIsDown(t *testing.T) {
	p := newPair(t)
	s, r := p.open("d1", 0)
	send(t, s, &runbusv1.RunnerWorkAccepted{})
	r.Done(next[*runbusv1.RunnerWorkAccepted](t, r))
	down := p.runner.NATS().StatusChanged(nats.RECONNECTING)
	defer p.runner.NATS().RemoveStatusListener(down)
	p.proxy.Cut(true)
	<-down
	send(t, s, chunk([]byte("rows")), &runbusv1.RunnerWorkResult{Started: true})
	p.proxy.Cut(false)
	<-p.reconnected
	p.senders.Resume()
	if f := next[*runbusv1.RunnerWorkChunk](t, r); string(f.GetArrowIpc()) != "rows" {
		t.Fatalf("the chunk holds %q", f.GetArrowIpc())
	}
	r.Done(next[*runbusv1.RunnerWorkResult](t, r))
	if err := s.Drain(within(t)); err != nil {
		t.Fatal(err)
	}
}

// cuttable is a replica's link inside the process that a test can cut.
type cuttable struct {
	nats.InProcessConnProvider
	mu   sync.Mutex
	conn net.Conn
	shut bool
}

func (c *cuttable) InProcessConn() (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shut {
		return nil, errors.New("the link is cut")
	}
	var err error
	c.conn, err = c.InProcessConnProvider.InProcessConn()
	return c.conn, err
}

func (c *cuttable) cut(t testing.TB, shut bool) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shut = shut
	if shut {
		if err := c.conn.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// What the replica's own link loses comes again too, though the runner noticed no cut and has nothing more to send: here
// its last frames.
func TestProbeFindsFramesTheReplicaLost(t *testing.T) {
	p := newPair(t, bus.ProbeAfter(50*time.Millisecond))
	s, r := p.open("d1", 0)
	send(t, s, &runbusv1.RunnerWorkAccepted{})
	r.Done(next[*runbusv1.RunnerWorkAccepted](t, r))
	down := p.replica.NATS().StatusChanged(nats.RECONNECTING)
	defer p.replica.NATS().RemoveStatusListener(down)
	p.link.cut(t, true)
	<-down
	send(t, s, chunk([]byte("rows")), &runbusv1.RunnerWorkResult{})
	if err := p.runner.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	p.link.cut(t, false)
	if f := next[*runbusv1.RunnerWorkChunk](t, r); string(f.GetArrowIpc()) != "rows" || f.GetSeq() != 2 {
		t.Fatalf("frame %d holds %q", f.GetSeq(), f.GetArrowIpc())
	}
	r.Done(next[*runbusv1.RunnerWorkResult](t, r))
	if err := s.Drain(within(t)); err != nil {
		t.Fatal(err)
	}
}

func TestOrphanedWhenTheReplicaIsSilent(t *testing.T) {
	p := newPair(t, bus.OrphanAfter(100*time.Millisecond), bus.KeepaliveEvery(10*time.Millisecond))
	alive, r := p.open("d1", 0)
	send(t, alive, &runbusv1.RunnerWorkAccepted{})
	next[*runbusv1.RunnerWorkAccepted](t, r) // never consumed: a slow caller, whose replica lives
	orphan := p.senders.Open("d2", session, schemas.NewID(), 0)
	send(t, orphan, &runbusv1.RunnerWorkAccepted{})
	select {
	case <-orphan.Orphaned():
	case <-within(t).Done():
		t.Fatal("nobody waits for it and it does not say so")
	}
	if err := p.receivers.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-alive.Orphaned():
	case <-within(t).Done():
		t.Fatal("its replica has gone and it does not say so")
	}
}

// A slow caller is not a dead replica: keepalives come though nothing is consumed.
func TestKeepalive(t *testing.T) {
	p := newPair(t, bus.KeepaliveEvery(10*time.Millisecond))
	credits, err := p.runner.NATS().SubscribeSync(schemas.CreditSubject(edge, "*"))
	if err != nil {
		t.Fatal(err)
	}
	s, r := p.open("d1", 0)
	send(t, s, &runbusv1.RunnerWorkAccepted{})
	next[*runbusv1.RunnerWorkAccepted](t, r)
	for range 3 {
		msg, err := credits.NextMsgWithContext(within(t))
		if err != nil {
			t.Fatal(err)
		}
		c := &runbusv1.RunnerWorkCredit{}
		if err := bus.Decode(msg, c); err != nil || c.GetAcknowledged() != 0 || c.GetResend() {
			t.Fatalf("keepalive %v, %v", c, err)
		}
	}
}

// A closed dispatch is acknowledged all the same: its runner lets go of the result, and of what it resumes.
func TestClosedDispatchIsAcknowledged(t *testing.T) {
	p := newPair(t, bus.ProbeAfter(time.Hour), bus.KeepaliveEvery(time.Hour)) // late frames are counted, once, and it is Close that acknowledges
	s, r := p.open("d1", 0)
	send(t, s, &runbusv1.RunnerWorkAccepted{})
	next[*runbusv1.RunnerWorkAccepted](t, r)
	r.Close()
	if _, err := r.Next(within(t)); !errors.Is(err, bus.ErrClosed) {
		t.Fatalf("next after Close: %v", err)
	}
	r.Done(&runbusv1.RunnerWorkAccepted{Seq: 1})
	// No chunk: its window may be shut by now.
	send(t, s, &runbusv1.RunnerWorkProgress{}, &runbusv1.RunnerWorkResult{})
	if err := s.Drain(within(t)); err != nil {
		t.Fatal(err)
	}
	// They are counted when their acknowledgement may have left already.
	eventually(t, p.replica, "two late frames are counted", func() bool { return p.receivers.Dropped()[bus.DropLate] == 2 })

	s, r = p.open("d2", 0)
	send(t, s, &runbusv1.RunnerWorkAccepted{})
	r.Done(next[*runbusv1.RunnerWorkAccepted](t, r))
	r.Close() // right after Done, as a caller does that has the result
	if err := s.Drain(within(t)); err != nil {
		t.Fatal(err)
	}
	// From here on its window is shut for chunks; what passes is acknowledged by a resume.
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := s.Send(ctx, chunk([]byte("late"))); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a chunk for a dispatch that is closed: %v", err)
	}
	send(t, s, &runbusv1.RunnerWorkProgress{})
	p.senders.Resume()
	if err := s.Drain(within(t)); err != nil {
		t.Fatal(err)
	}
}
