package bustest

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
)

// Proxy is a TCP proxy in front of a server whose links a test can cut, losing what is under way. While it is shut, whoever
// dials is cut at once.
type Proxy struct {
	listener net.Listener
	target   string
	wg       sync.WaitGroup

	mu    sync.Mutex
	links map[*net.TCPConn]bool // both sides
	shut  bool
}

// NewProxy listens on a free port of 127.0.0.1 in front of target until the test ends.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{listener: l, target: target, links: make(map[*net.TCPConn]bool)}
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		p.Cut(true)
		p.wg.Wait()
	})
	return p
}

// Addr is where the proxy listens.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Dial connects to the proxy whatever the address is: a nats.CustomDialer.
func (p *Proxy) Dial(network, _ string) (net.Conn, error) {
	return new(net.Dialer).DialContext(context.Background(), network, p.Addr())
}

func (p *Proxy) accept() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.link(c.(*net.TCPConn)) })
	}
}

func (p *Proxy) link(client *net.TCPConn) {
	c, err := new(net.Dialer).DialContext(context.Background(), "tcp", p.target)
	if err != nil {
		_ = client.Close()
		return
	}
	server := c.(*net.TCPConn)
	p.mu.Lock()
	p.links[client], p.links[server] = true, true
	shut := p.shut
	p.mu.Unlock()
	if shut {
		reset(client, server)
	}
	var both sync.WaitGroup
	both.Go(func() { _, _ = io.Copy(server, client); reset(client, server) })
	both.Go(func() { _, _ = io.Copy(client, server); reset(client, server) })
	both.Wait()
	p.mu.Lock()
	delete(p.links, client)
	delete(p.links, server)
	p.mu.Unlock()
}

// reset closes connections and throws away what they had not delivered.
func reset(links ...*net.TCPConn) {
	for _, c := range links {
		_ = c.SetLinger(0)
		_ = c.Close()
	}
}

// Cut ends all links; shut says whether new ones are refused from now on.
func (p *Proxy) Cut(shut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shut = shut
	for c := range p.links {
		reset(c)
	}
}
