package runner

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"
)

// polled is a connection whose next message may be near, and its peer. busy is asked before each look.
func polled(t *testing.T, busy func() bool) (*polledConn, *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer func() { _ = l.Close() }()
	here, err := net.Dial("tcp", l.Addr().String())
	must(t, err)
	peer, err := l.Accept()
	must(t, err)
	p := &polling{fit: &processors{}, busy: busy, within: time.Hour}
	c, ok := p.conn(here).(*polledConn)
	if !ok {
		t.Fatal("a TCP connection is not polled")
	}
	c.soon = true
	t.Cleanup(func() { _, _ = c.Close(), peer.Close() })
	return c, peer.(*net.TCPConn)
}

// A reader that polls gets what comes.
func TestPollingReads(t *testing.T) {
	looks := 0
	var peer *net.TCPConn
	c, peer := polled(t, func() bool {
		if looks++; looks == 3 {
			if _, err := peer.Write([]byte("next")); err != nil {
				t.Error(err)
			}
		}
		return false
	})
	b := make([]byte, 64)
	if n, err := c.Read(b); err != nil || string(b[:n]) != "next" || !c.soon {
		t.Errorf("%q, %v, soon: %t", b[:n], err, c.soon)
	}
	if looks < 3 || c.polling.fit.polled.Load() <= 0 {
		t.Errorf("%d looks, which took %d ns", looks, c.polling.fit.polled.Load())
	}
}

// A reader stops to poll when the processor is needed, and the time is over.
func TestPollingGivesWay(t *testing.T) {
	for name, change := range map[string]func(*polling){
		"works":      func(p *polling) { p.busy = func() bool { return true } },
		"processors": func(p *polling) { p.fit.wide.Store(true) },
		"time":       func(p *polling) { p.within = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := polled(t, func() bool { return false })
			change(c.polling)
			if n, _, err := c.poll(make([]byte, 64)); n != 0 || err != nil {
				t.Errorf("%d bytes, %v", n, err)
			}
		})
	}
}

// Whether the next message may be near follows from how soon the last came, and how much.
func TestPollingIsWorthIt(t *testing.T) {
	c, _ := polled(t, func() bool { return true })
	b := make([]byte, 2*pollSmall)
	for _, o := range []struct {
		bytes  int
		within time.Duration
		soon   bool
	}{{1, time.Hour, true}, {pollSmall, time.Hour, true}, {pollSmall + 1, time.Hour, false}, {1, 0, false}} {
		c.Conn, c.soon, c.polling.within = fixed{c.Conn, o.bytes}, false, o.within
		if n, err := c.Read(b); n != o.bytes || err != nil || c.soon != o.soon {
			t.Errorf("%d bytes within %s: soon: %t, %v", n, o.within, c.soon, err)
		}
	}
}

// fixed is a connection on which so many bytes come.
type fixed struct {
	net.Conn
	bytes int
}

func (f fixed) Read([]byte) (int, error) { return f.bytes, nil }

// However a connection ends, a reader that polls says so.
func TestPollingEnds(t *testing.T) {
	for name, o := range map[string]struct {
		end  func(c *polledConn, peer *net.TCPConn) error
		want error
	}{
		"closed there": {func(c *polledConn, peer *net.TCPConn) error { c.polling.within = 0; return peer.Close() }, io.EOF},
		"closed here":  {func(c *polledConn, _ *net.TCPConn) error { return c.Close() }, net.ErrClosed},
		"deadline":     {func(c *polledConn, _ *net.TCPConn) error { return c.SetReadDeadline(time.Unix(1, 0)) }, os.ErrDeadlineExceeded},
		"reset": {func(_ *polledConn, peer *net.TCPConn) error {
			return errors.Join(peer.SetLinger(0), peer.Close())
		}, syscall.ECONNRESET},
	} {
		t.Run(name, func(t *testing.T) {
			c, peer := polled(t, func() bool { return false })
			must(t, o.end(c, peer))
			if _, err := c.Read(make([]byte, 64)); !errors.Is(err, o.want) {
				t.Errorf("%v, not %v", err, o.want)
			}
		})
	}
}

// What is not plain TCP, and a process whose processors are not fitted, are left alone.
func TestPollingLeavesAlone(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if c := (&polling{}).conn(a); c != a {
		t.Errorf("a pipe became %T", c)
	}
	polled, _ := polled(t, nil)
	if c := (*polling)(nil).conn(polled.Conn); c != polled.Conn {
		t.Errorf("it became %T", c)
	}
	if p := (&Agent{}).polling(); p != nil {
		t.Error("polls though the processors are not fitted")
	}
}
