package natsdial_test

import (
	"bufio"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/internal/natsdial"
)

func TestMain(m *testing.M) { leak.Main(m) }

// server answers the handshake of its n-th connection with the n-th line, the last one for all that follow.
func server(t *testing.T, lines ...string) (url string, taken *atomic.Int32) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	taken = new(atomic.Int32)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			n := int(taken.Add(1))
			if _, err := conn.Write([]byte(`INFO {"server_id":"S","max_payload":1048576}` + "\r\n")); err != nil {
				t.Error(err)
			}
			in := bufio.NewScanner(conn)
			for in.Scan() && in.Text() != "PING" {
			}
			if _, err := conn.Write([]byte(lines[min(n, len(lines))-1] + "\r\n")); err != nil {
				t.Error(err)
			}
			for in.Scan() {
			}
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-ended
	})
	return "nats://" + l.Addr().String(), taken
}

// A handshake that was slower than the server's first ping is made again, and nothing else is.
func TestConnect(t *testing.T) {
	var closed atomic.Int32
	options := []nats.Option{nats.NoReconnect(), nats.Timeout(time.Minute), nats.ClosedHandler(func(*nats.Conn) { closed.Add(1) })}
	url, taken := server(t, "PING", "PING", "PONG")
	nc, err := natsdial.Connect(time.Minute, url, options...)
	if err != nil || taken.Load() != 3 || closed.Load() != 0 {
		t.Fatalf("%v after %d connections, %d calls", err, taken.Load(), closed.Load())
	}
	nc.Close()

	url, taken = server(t, "-ERR 'Authentication Timeout'", "PONG")
	nc, err = natsdial.Connect(time.Minute, url, options...)
	if err != nil || taken.Load() != 2 {
		t.Fatalf("whom the server turned away since it was slow: %v after %d connections", err, taken.Load())
	}
	nc.Close()

	url, taken = server(t, "-ERR 'Authorization Violation'", "PONG")
	if _, err := natsdial.Connect(time.Minute, url, options...); !errors.Is(err, nats.ErrAuthorization) || taken.Load() != 1 {
		t.Errorf("%v after %d connections", err, taken.Load())
	}
	url, taken = server(t, "PING")
	if _, err := natsdial.Connect(100*time.Millisecond, url, options...); err == nil || !strings.Contains(err.Error(), "PING") {
		t.Errorf("a server that never answers: %v", err)
	}
	if n := taken.Load(); n > 2 { // the pause after the first try is as long as all may take
		t.Errorf("a server that never answers was dialled %d times", n)
	}
}

// pipes is a server in this process that closes the first connection that it has without a word, and lets no other in.
type pipes struct{ made atomic.Int32 }

var errNoSecond = errors.New("there is no second one")

func (p *pipes) InProcessConn() (net.Conn, error) {
	if p.made.Add(1) > 1 {
		return nil, errNoSecond
	}
	client, server := net.Pipe()
	go func() {
		_, _ = server.Write([]byte(`INFO {"server_id":"S","max_payload":1048576}` + "\r\n"))
		_ = server.Close()
	}()
	return client, nil
}

// What a server in the same process says last may not come through: its end of the pipe is closed while the client writes.
func TestConnectInProcess(t *testing.T) {
	p := new(pipes)
	nc, err := natsdial.Connect(time.Minute, "", nats.InProcessServer(p), nats.NoReconnect(), nats.Timeout(time.Minute))
	if !errors.Is(err, errNoSecond) {
		t.Errorf("%v, %v after %d connections", nc, err, p.made.Load())
	}
}
