// Package tunneltest is an HTTP proxy for tests: it does CONNECT and nothing else, and stands for a firewall that lets nothing
// but its port 443 out.
package tunneltest

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
)

// Proxy tunnels what it Knows, and refuses everything else with 403. Set its fields before the first connection.
type Proxy struct {
	Knows          map[string]string // host:port of a CONNECT → where it really is
	User, Password string            // wanted, unless empty
	Challenge      string            // Proxy-Authenticate of a 407; empty: Basic
	Answer         string            // instead of any other, as it is: the bytes of an HTTP response
	Silent         bool              // never answers

	listener net.Listener
	wg       sync.WaitGroup
	mu       sync.Mutex
	open     map[net.Conn]bool
	ended    bool
	asked    []string
}

// Start listens on a free port of 127.0.0.1 until the test ends; with TLS if cert is not nil.
func Start(t testing.TB, p *Proxy, cert *tls.Certificate) *Proxy {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p.listener, p.open = l, make(map[net.Conn]bool)
	if cert != nil {
		p.listener = tls.NewListener(l, &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{*cert}})
	}
	p.wg.Go(func() {
		for {
			c, err := p.listener.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() {
		if err := p.listener.Close(); err != nil {
			t.Error(err)
		}
		p.mu.Lock()
		p.ended = true
		p.mu.Unlock()
		p.Cut()
		p.wg.Wait()
	})
	return p
}

// Addr is where it listens, host:port.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Asked are the addresses of all CONNECTs so far.
func (p *Proxy) Asked() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.asked...)
}

// Cut ends all tunnels.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.open {
		_ = c.Close()
	}
}

// hold remembers c for Cut; false after the end.
func (p *Proxy) hold(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open[c] = true
	return !p.ended
}

func (p *Proxy) drop(c net.Conn) {
	_ = c.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.open, c)
}

func (p *Proxy) serve(c net.Conn) {
	defer p.drop(c)
	if !p.hold(c) {
		return
	}
	r := bufio.NewReader(c)
	req, err := http.ReadRequest(r)
	if err != nil {
		return
	}
	p.mu.Lock()
	p.asked = append(p.asked, req.Host)
	p.mu.Unlock()
	switch target := p.Knows[req.Host]; {
	case p.Silent:
		_, _ = r.ReadByte() // until the other side gives up
	case p.Answer != "":
		_, _ = io.WriteString(c, p.Answer)
	case p.User != "" && req.Header.Get("Proxy-Authorization") != "Basic "+base64.StdEncoding.EncodeToString([]byte(p.User+":"+p.Password)):
		challenge := p.Challenge
		if challenge == "" {
			challenge = `Basic realm="test"`
		}
		_, _ = fmt.Fprintf(c, "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: %s\r\nContent-Length: 0\r\n\r\n", challenge)
	case req.Method != http.MethodConnect || target == "":
		_, _ = io.WriteString(c, "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
	default:
		p.tunnel(c, r, target)
	}
}

func (p *Proxy) tunnel(c net.Conn, r *bufio.Reader, target string) {
	out, err := new(net.Dialer).DialContext(context.Background(), "tcp", target)
	if err != nil {
		_, _ = io.WriteString(c, "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
		return
	}
	defer p.drop(out)
	if !p.hold(out) {
		return
	}
	_, _ = io.WriteString(c, "HTTP/1.1 200 Connection established\r\n\r\n")
	var both sync.WaitGroup
	both.Go(func() { _, _ = io.Copy(out, r); _ = out.Close() })
	both.Go(func() { _, _ = io.Copy(c, out); _ = c.Close() })
	both.Wait()
}
