package embedded_test

import (
	"net"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
)

// Who watches counts from the moment on at which its subscription stands, and as long as it does. The connections of the control plane in
// OPS, and the mirrors there, are no watchers; nobody else is looked for when there is nobody else.
func TestWatched(t *testing.T) {
	b := bustest.Start(t)
	work := schemas.WorkSubject(acme, "s")
	if b.Watchers() || b.Watched(work) {
		t.Error("somebody watches before anybody is there")
	}
	newStore(t.Context(), t, b)
	micro := b.Conn(t, embedded.UserMicro)
	_, err := micro.SubscribeSync("runbus.ops.*")
	if err == nil {
		err = micro.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	if b.Watchers() || b.Watched(work) {
		t.Error("the control plane's own connections are watchers")
	}
	ops := b.OpsConn(t)
	if !b.Watchers() || b.Watched(work) {
		t.Error("ops watch without a subscription")
	}
	for _, subject := range []string{"runbus.v1.>", "runbus.v1.*.runner.*.work.*", work} {
		view, err := ops.SubscribeSync(subject)
		if err == nil {
			err = ops.Flush()
		}
		if err != nil {
			t.Fatal(err)
		}
		if !b.Watched(work) {
			t.Errorf("%s is not watched", subject)
		}
		if err = view.Unsubscribe(); err == nil {
			err = ops.Flush()
		}
		if err != nil {
			t.Fatal(err)
		}
		if b.Watched(work) {
			t.Errorf("%s is watched after its end", subject)
		}
	}
	again, err := ops.SubscribeSync("runbus.v1.>")
	if err == nil {
		err = ops.Flush()
	}
	if err != nil || !b.Watched(work) {
		t.Fatalf("%s is not watched, %v", again.Subject, err)
	}
	micro.Close() // one less of the control plane's does not hide a watcher
	if !b.Watched(work) {
		t.Error("ops are not seen when a connection of the control plane has gone")
	}
	ops.Close()
	for give := time.Now().Add(soon); b.Watchers(); runtime.Gosched() {
		if time.Now().After(give) {
			t.Fatal("ops are still there")
		}
	}
	if b.Watched(work) {
		t.Error("somebody watches who has gone")
	}
}

// stuck is a way into the server that does not take what is written while on is set, until let is closed.
type stuck struct {
	from    nats.InProcessConnProvider
	on      atomic.Bool
	writing chan struct{} // has one, when a write is held
	let     chan struct{}
}

func (s *stuck) option(o *nats.Options) error {
	s.from, o.InProcessServer = o.InProcessServer, s
	return nil
}

func (s *stuck) InProcessConn() (net.Conn, error) {
	c, err := s.from.InProcessConn()
	return &stuckConn{c, s}, err
}

type stuckConn struct {
	net.Conn
	s *stuck
}

func (c *stuckConn) Write(b []byte) (int, error) {
	if c.s.on.Load() {
		select {
		case c.s.writing <- struct{}{}:
		default:
		}
		<-c.s.let
	}
	return c.Conn.Write(b)
}

// Who asks whether somebody watches waits for no connection that writes, whether somebody does or not.
func TestWatchedWaitsForNoWrite(t *testing.T) {
	b := bustest.Start(t)
	work := schemas.WorkSubject(acme, "s")
	s := &stuck{writing: make(chan struct{}, 1), let: make(chan struct{})}
	micro := b.Conn(t, embedded.UserMicro, s.option)
	s.on.Store(true)
	published := make(chan error, 1)
	go func() { published <- micro.Publish(work, []byte("copy")) }()
	<-s.writing
	asked := make(chan bool, 1)
	go func() { asked <- b.Watched(work) }()
	select {
	case watched := <-asked:
		if watched {
			t.Error("the control plane's own connection is a watcher while it writes")
		}
	case <-time.After(soon):
		t.Error("whether somebody watches is not answered while a connection writes")
	}
	close(s.let)
	if err := <-published; err != nil {
		t.Fatal(err)
	}
}

// A connection of the control plane that was dropped hides nobody, and is none who watches when it is back.
func TestWatchedWhenAConnectionIsBack(t *testing.T) {
	b := bustest.Start(t)
	work := schemas.WorkSubject(acme, "s")
	down, back := make(chan struct{}, 1), make(chan struct{}, 1)
	micro := b.Conn(t, embedded.UserMicro, nats.DisconnectErrHandler(func(*nats.Conn, error) { down <- struct{}{} }),
		nats.ReconnectHandler(func(*nats.Conn) { back <- struct{}{} }))
	id, err := micro.GetClientID()
	if err != nil {
		t.Fatal(err)
	}
	ops := b.OpsConn(t)
	view, err := ops.SubscribeSync("runbus.v1.>")
	if err == nil {
		err = ops.Flush()
	}
	if err != nil || !b.Watched(work) {
		t.Fatalf("%s is not watched, %v", view.Subject, err)
	}
	kick(t, b, id)
	for _, step := range []chan struct{}{down, back} {
		select {
		case <-step:
		case <-time.After(3 * soon):
			t.Fatal("the connection is not dropped, or not back")
		}
		if !b.Watched(work) {
			t.Error("ops are not seen when a connection was dropped")
		}
	}
	ops.Close()
	for give := time.Now().Add(soon); b.Watchers(); runtime.Gosched() {
		if time.Now().After(give) {
			t.Fatal("a connection that is back is one who watches")
		}
	}
}

func BenchmarkWatched(b *testing.B) {
	bus := bustest.Start(b)
	bus.Conn(b, embedded.UserMicro)
	bus.Conn(b, embedded.UserMirror)
	work := schemas.WorkSubject(acme, "s")
	for b.Loop() {
		if bus.Watched(work) {
			b.Fatal("nobody watches")
		}
	}
}
