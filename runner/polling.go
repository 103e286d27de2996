package runner

import (
	"errors"
	"net"
	"os"
	"runtime"
	"syscall"
	"time"
)

const (
	// pollFor is how long a reader looks for the next message itself before it sleeps, if the last one came as soon.
	pollFor = 130 * time.Microsecond
	// pollSmall is the most bytes that come together for which it does: some assignments. Where more are under way there is work
	// meanwhile, and the processors are needed.
	pollSmall = 2 << 10
	// pollAlone is the most bytes of a message with one assignment, about. After such a one the processor is offered to others between
	// looks: the next message may wait for just who would have it. With several under way that gives the control plane a second
	// processor for moments that cost it more than they give (measured, 16 in flight: 56,000 dispatches/s, else 62,000).
	pollAlone = 512
)

// polling has the reader of a connection look for the next message itself for a while before it sleeps, as long as messages are small
// and follow one another within pollFor, no work runs, and one of Go's processors is enough.
//
// A thread that sleeps on a processor with nothing else to do is woken by an interrupt that another processor sends, which costs both
// more than a small work does (measured on two virtual processors, with one work in flight: 188 us a work and 294 us of processor
// time on both sides; so 84 us and 188 us). The price is at most pollFor of a processor that nobody needs, for each message; where
// messages seldom follow one another as soon there is none, since the reader sleeps at once.
//
// Between two looks it offers the processor to other threads: the control plane may be on the same machine, and what it writes to its
// audit log in between held up one dispatch in a hundred for as long as the reader polled (measured, one in flight: the slowest hundredth
// took 1.16 times as long as with plain request-reply; so 0.88 times).
type polling struct {
	fit    *processors
	busy   func() bool   // a work runs: what it waits for is noticed by a thread that sleeps
	within time.Duration // pollFor
}

// polling is nil where Go's processors are somebody else's decision, or there is only one.
func (a *Agent) polling() *polling {
	if a.fit == nil {
		return nil
	}
	return &polling{fit: a.fit, busy: func() bool { return a.works.count() > 0 }, within: pollFor}
}

// conn is c with such a reader; c itself if p is nil, or c is not plain TCP.
func (p *polling) conn(c net.Conn) net.Conn {
	tcp, ok := c.(*net.TCPConn)
	if p == nil || !ok {
		return c
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return c
	}
	polled := &polledConn{Conn: c, polling: p, raw: raw}
	polled.take = func(fd uintptr) bool {
		polled.n, polled.err = syscall.Read(int(fd), polled.into)
		return true
	}
	return polled
}

// polledConn is one connection. One goroutine at a time reads: all but Conn belongs to it.
type polledConn struct {
	net.Conn
	polling *polling
	raw     syscall.RawConn
	soon    bool // the next message may be near
	alone   bool // …and the last one had one assignment at most

	// Of try: made once, since it is called again and again.
	take func(fd uintptr) bool // reads into, which gives n and err
	into []byte
	n    int
	err  error
}

// Read polls if that seems worth it, and sleeps until there is something.
func (c *polledConn) Read(b []byte) (int, error) {
	began := uptime()
	if c.soon && len(b) > 0 {
		n, idleSince, err := c.poll(b)
		if n > 0 || err != nil {
			c.soon, c.alone = n <= pollSmall, n <= pollAlone
			return n, err
		}
		began = idleSince
	}
	n, err := c.Conn.Read(b)
	c.soon, c.alone = n <= pollSmall && uptime()-began < c.polling.within, n <= pollAlone
	return n, err
}

// poll looks until something has come, the time is over, or the processor is needed; then it returns 0 and no error. idleSince is the
// uptime from which on nobody needed it.
func (c *polledConn) poll(b []byte) (n int, idleSince time.Duration, err error) {
	n, open, err := c.try(b)
	if n > 0 || err != nil || !open {
		return n, uptime(), err
	}
	runtime.Gosched() // to those whom the last message gave something to do
	p := c.polling
	idleSince = uptime()
	now := idleSince
	for open && p.fit.narrow() && !p.busy() && now-idleSince < p.within {
		if n, open, err = c.try(b); n > 0 || err != nil {
			break
		}
		if c.alone {
			giveProcessor()
		}
		runtime.Gosched()
		now = uptime()
	}
	p.fit.polls(now - idleSince)
	return n, idleSince, err
}

// try is Read of what is there, 0 if nothing is or the stream has ended. open is false if Read won't wait: the connection was closed here,
// or its deadline is over.
func (c *polledConn) try(b []byte) (n int, open bool, err error) {
	c.into, c.n, c.err = b, 0, nil
	open = c.raw.Read(c.take) == nil
	c.into = nil
	switch {
	case c.n > 0:
		return c.n, open, nil
	case c.err == nil, errors.Is(c.err, syscall.EAGAIN), errors.Is(c.err, syscall.EINTR):
		return 0, open, nil
	}
	return 0, open, &net.OpError{Op: "read", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError("read", c.err)}
}
