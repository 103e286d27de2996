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
	"google.golang.org/protobuf/proto"

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
	proxy       *proxy
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
	p := &pair{bus: b, proxy: newProxy(t, b.Addr()), reconnected: make(chan struct{}, 100)}
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
	p := newPair(t)
	const streams, total = 12, 6 << 20 // over eight streams the windows shrink
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
			p.proxy.cut(false)
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
	p.proxy.cut(true)
	<-down
	send(t, s, chunk([]byte("rows")), &runbusv1.RunnerWorkResult{Started: true})
	p.proxy.cut(false)
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
	p := newPair(t)
	s, r := p.open("d1", 0)
	send(t, s, &runbusv1.RunnerWorkAccepted{})
	next[*runbusv1.RunnerWorkAccepted](t, r)
	r.Close()
	if _, err := r.Next(within(t)); !errors.Is(err, bus.ErrClosed) {
		t.Fatalf("next after Close: %v", err)
	}
	r.Done(&runbusv1.RunnerWorkAccepted{Seq: 1})
	send(t, s, chunk([]byte("late")), &runbusv1.RunnerWorkResult{})
	if err := s.Drain(within(t)); err != nil {
		t.Fatal(err)
	}
	if d := p.receivers.Dropped()[bus.DropLate]; d != 2 {
		t.Errorf("%d late frames counted: %v", d, p.receivers.Dropped())
	}

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

// forge publishes a message as a runner would, past the Sender.
func forge(t testing.TB, c *bus.Conn, subject string, m proto.Message) {
	t.Helper()
	if err := c.Publish(subject, m); err != nil {
		t.Fatal(err)
	}
}

func TestDroppedIsCounted(t *testing.T) {
	p := newPair(t, bus.ResendEvery(time.Hour), bus.TombstoneFor(time.Hour))
	replica := p.receivers.Replica()
	other := schemas.RunnerRef{Tenant: "acme", Runner: "edge.2"}
	thief := bus.NewConn(p.dial(t, other))
	defer thief.NATS().Close()
	r := p.receivers.Open(edge, session, "d1", 0)
	p.receivers.Open(edge, session, "gone", 0).Close()
	accepted := func(dispatch, session string, seq uint64) *runbusv1.RunnerWorkAccepted {
		return &runbusv1.RunnerWorkAccepted{DispatchId: dispatch, Session: session, Seq: seq}
	}
	ctl, data := schemas.ResultCtlSubject(edge, replica, "d1"), schemas.ResultDataSubject(edge, replica, "d1")
	for _, c := range []struct {
		reason  bus.DropReason
		from    *bus.Conn
		subject string
		m       proto.Message
	}{
		{bus.DropForeign, thief, schemas.ResultCtlSubject(other, replica, "d1"), accepted("d1", session, 1)},
		{bus.DropForeign, thief, schemas.ResultCtlSubject(other, replica, "gone"), accepted("gone", session, 1)},
		{bus.DropForeign, thief, schemas.ResultCtlSubject(other, replica, "d1"), &runbusv1.RunnerWorkResume{DispatchId: "d1", Session: session, Sent: 9}},
		{bus.DropUnknown, p.runner, schemas.ResultCtlSubject(edge, replica, "d2"), accepted("d2", session, 1)},
		{bus.DropUnknown, p.runner, schemas.ReplySubject(edge, replica, "x"), &runbusv1.RunnerControlReply{Id: "x"}},
		{bus.DropLate, p.runner, schemas.ResultCtlSubject(edge, replica, "gone"), accepted("gone", session, 1)},
		{bus.DropSession, p.runner, ctl, accepted("d1", "0000", 1)},
		{bus.DropSession, p.runner, ctl, &runbusv1.RunnerWorkResume{DispatchId: "d1", Session: "0000", Sent: 9}},
		{bus.DropInvalid, p.runner, ctl, accepted("d2", session, 1)},
		{bus.DropInvalid, p.runner, ctl, accepted("d1", session, 0)},
		{bus.DropInvalid, p.runner, data, accepted("d1", session, 1)},
		{bus.DropInvalid, p.runner, ctl, &runbusv1.RunnerHello{}},
		{bus.DropInvalid, p.runner, data, &runbusv1.RunnerWorkChunk{DispatchId: "d1", Session: session, Seq: 1, ArrowIpc: make([]byte, bus.ChunkBytes+1)}},
		{bus.DropGap, p.runner, ctl, accepted("d1", session, 3)},
	} {
		before := p.receivers.Dropped()
		forge(t, c.from, c.subject, c.m)
		eventually(t, c.from, string(c.reason), func() bool { return p.receivers.Dropped()[c.reason] > before[c.reason] })
	}
	forge(t, p.runner, ctl, accepted("d1", session, 1))
	forge(t, p.runner, ctl, accepted("d1", session, 1))
	eventually(t, p.runner, "duplicate", func() bool { return p.receivers.Dropped()[bus.DropDuplicate] == 1 })
	if f := next[*runbusv1.RunnerWorkAccepted](t, r); f.GetSeq() != 1 {
		t.Errorf("frame %d", f.GetSeq())
	}
	forge(t, p.runner, ctl, &runbusv1.RunnerWorkResult{DispatchId: "d1", Session: session, Seq: 2})
	forge(t, p.runner, ctl, &runbusv1.RunnerWorkProgress{DispatchId: "d1", Session: session, Seq: 3})
	eventually(t, p.runner, "after the result", func() bool { return p.receivers.Dropped()[bus.DropOverrun] == 1 })
}

// A gap is asked for once, by a credit that says what is here.
func TestGapAsksForResend(t *testing.T) {
	p := newPair(t, bus.ResendEvery(time.Hour))
	credits, err := p.runner.NATS().SubscribeSync(schemas.CreditSubject(edge, "d1"))
	if err != nil {
		t.Fatal(err)
	}
	p.receivers.Open(edge, session, "d1", 0)
	data := schemas.ResultDataSubject(edge, p.receivers.Replica(), "d1")
	for _, seq := range []uint64{1, 2, 4, 5, 6} {
		forge(t, p.runner, data, &runbusv1.RunnerWorkChunk{DispatchId: "d1", Session: session, Seq: seq, ArrowIpc: []byte("rows")})
	}
	msg, err := credits.NextMsgWithContext(within(t))
	if err != nil {
		t.Fatal(err)
	}
	c := &runbusv1.RunnerWorkCredit{}
	if err := bus.Decode(msg, c); err != nil || !c.GetResend() || c.GetAcknowledged() != 2 {
		t.Fatalf("credit %v, %v", c, err)
	}
	if want := int64(bus.DefaultWindow - 8); c.GetWindowBytes() != want {
		t.Fatalf("the window is %d, not %d: what is held here still counts", c.GetWindowBytes(), want)
	}
	eventually(t, p.runner, "all dropped", func() bool { return p.receivers.Dropped()[bus.DropGap] == 3 })
	if err := p.runner.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	if n, _, err := credits.Pending(); err != nil || n != 0 {
		t.Fatalf("%d more credits, %v", n, err)
	}
}

// An assignment that reached nobody surfaces from Next, which then goes on waiting for the next attempt.
func TestAssignmentReachesNobody(t *testing.T) {
	p := newPair(t)
	s, r := p.open("d1", 0)
	assignment := &runbusv1.RunnerWorkAssignment{DispatchId: "d1", Session: session, Replica: p.receivers.Replica()}
	work := schemas.WorkSubject(edge, session)
	for range 3 {
		if err := p.replica.PublishWithReply(work, r.ReplySubject(), assignment); err != nil {
			t.Fatal(err)
		}
		if f, err := r.Next(within(t)); !errors.Is(err, bus.ErrNoResponders) {
			t.Fatalf("next: %v, %v", f, err)
		}
	}
	got := make(chan string, 1)
	if _, err := p.runner.Subscribe(work, func(msg *nats.Msg) { got <- bus.TypeOf(msg) }); err != nil {
		t.Fatal(err)
	}
	if err := p.runner.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	if err := p.replica.PublishWithReply(work, r.ReplySubject(), assignment); err != nil {
		t.Fatal(err)
	}
	if name := <-got; name != "RunnerWorkAssignment" {
		t.Fatalf("the runner got a %s", name)
	}
	send(t, s, &runbusv1.RunnerWorkAccepted{})
	next[*runbusv1.RunnerWorkAccepted](t, r)
	if d := p.receivers.Dropped(); len(d) != 0 {
		t.Errorf("dropped %v", d)
	}
}

func TestOrder(t *testing.T) {
	p := newPair(t)
	cancel := func() *runbusv1.RunnerControl {
		return &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Cancel{Cancel: &runbusv1.CancelOrder{DispatchId: "d1"}}}
	}
	if _, err := p.receivers.Order(within(t), edge, session, cancel()); !errors.Is(err, bus.ErrNoResponders) {
		t.Fatalf("nobody is there: %v", err)
	}
	other := schemas.RunnerRef{Tenant: "acme", Runner: "edge.2"}
	thief := bus.NewConn(p.dial(t, other))
	defer thief.NATS().Close()
	failed := make(chan error, 10)
	_, err := p.runner.Subscribe(schemas.ControlSubject(edge, session), func(msg *nats.Msg) {
		order := &runbusv1.RunnerControl{}
		if err := bus.Decode(msg, order); err != nil {
			failed <- err
			return
		}
		if order.GetHealth() != nil {
			return // never answered
		}
		// Another runner that learned the id can't answer in its place.
		foreign := &runbusv1.RunnerControlReply{Id: order.GetId(), CancelState: runbusv1.CancelState_CANCEL_STATE_ENDED}
		if err := thief.Publish(schemas.ReplySubject(other, order.GetReplica(), order.GetId()), foreign); err != nil {
			failed <- err
		}
		if err := thief.NATS().Flush(); err != nil {
			failed <- err
		}
		own := &runbusv1.RunnerControlReply{Id: order.GetId(), CancelState: runbusv1.CancelState_CANCEL_STATE_STOPPING}
		if err := p.runner.Publish(schemas.ReplySubject(edge, order.GetReplica(), order.GetId()), own); err != nil {
			failed <- err
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.runner.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	order := cancel()
	reply, err := p.receivers.Order(within(t), edge, session, order)
	if err != nil || reply.GetCancelState() != runbusv1.CancelState_CANCEL_STATE_STOPPING {
		t.Fatalf("reply %v, %v", reply, err)
	}
	if order.GetId() == "" || order.GetReplica() != p.receivers.Replica() {
		t.Errorf("the order went out as %v", order)
	}
	if n := p.receivers.Dropped()[bus.DropForeign]; n != 1 {
		t.Errorf("%d foreign replies counted", n)
	}
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer stop()
	health := &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Health{Health: &runbusv1.HealthOrder{}}}
	if _, err := p.receivers.Order(ctx, edge, session, health); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no reply: %v", err)
	}
	select {
	case err := <-failed:
		t.Error(err)
	default:
	}
}

// The windows of all open streams together stay within what one connection bears.
func TestWindowsAreShared(t *testing.T) {
	p := newPair(t)
	var open []*bus.Receiver
	sum := func() (n int64) {
		for _, r := range open {
			n += r.Window()
		}
		return n
	}
	for i := range 64 {
		open = append(open, p.receivers.Open(edge, session, fmt.Sprintf("d%d", i), bus.MaxWindow))
		if n := sum(); n > 32<<20 {
			t.Fatalf("%d streams have windows of %d bytes together", len(open), n)
		}
	}
	if w := open[0].Window(); w != bus.MinWindow {
		t.Fatalf("one of 64 has a window of %d", w)
	}
	for len(open) > 1 {
		open[0].Close()
		open = open[1:]
	}
	if w := open[0].Window(); w != bus.MaxWindow {
		t.Fatalf("the last one has a window of %d", w)
	}
}
