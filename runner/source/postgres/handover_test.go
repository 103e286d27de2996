package postgres

import (
	"bytes"
	"context"
	"net"
	"sync"
	"testing"

	"github.com/org-runink/runbus/runner/source"
)

// slowConn holds up the write that ends the authentication until the server has answered all of it and pgconn, which reads
// in the background while a write is slow, has begun to read what comes next.
type slowConn struct {
	net.Conn
	writes   int
	mu       sync.Mutex
	answered bool
	waiting  chan struct{} // closed when a read begins after the answer
	once     sync.Once
}

// saslFinalWrite counts startup, SASLInitialResponse, SASLResponse.
const saslFinalWrite = 3

func (c *slowConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if c.writes++; c.writes == saslFinalWrite && err == nil {
		<-c.waiting
	}
	return n, err
}

func (c *slowConn) Read(p []byte) (int, error) {
	c.mu.Lock()
	if c.answered {
		c.once.Do(func() { close(c.waiting) })
	}
	c.mu.Unlock()
	n, err := c.Conn.Read(p)
	if bytes.HasSuffix(p[:n], []byte{'Z', 0, 0, 0, 5, 'I'}) {
		c.mu.Lock()
		c.answered = true
		c.mu.Unlock()
	}
	return n, err
}

// pgconn may have a read under way when it hands a connection over; what that gets is not lost.
func TestHandoverWhilePgconnReads(t *testing.T) {
	var out bytes.Buffer
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := source.GuardedDial(&net.Dialer{})(ctx, network, addr)
		return &slowConn{Conn: conn, waiting: make(chan struct{})}, err
	}
	if err := New().Fetch(t.Context(), source.Env{Dial: dial}, request(shared, "SELECT 1"), source.NewOutput(&out, source.Limits{}, nil)); err != nil {
		t.Fatal(err)
	}
}
