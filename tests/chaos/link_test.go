package chaos

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// way is a direction of a link.
type way int

const (
	up   way = iota // from the runner to the control plane
	down            // from the control plane to the runner
)

// proxy stands between one runner and the bus. Its faults are of bytes (delay, throttle, hold in one direction or both, swallow, cut) and,
// where it can read the protocol of NATS, of messages (twice, and once more later). Times are those of the faults, not of a test that
// waits.
type proxy struct {
	t       testing.TB
	address string
	target  string
	between *inspection // ends the TLS of both sides to read it; nil: none
	sealed  bool        // TLS from end to end, below which no message can be told from another
	wg      sync.WaitGroup

	mu       sync.Mutex
	listener net.Listener // nil while links are refused
	links    map[*link]bool
	shut     bool
	dark     chan struct{}    // open: what is sent is swallowed, and who dials waits until it is closed; nil: it is light
	held     [2]chan struct{} // open: nothing goes this way until it is closed; nil: it flows
	delay    time.Duration
	rate     int // bytes a second, 0: no bound
	twice    int // the next so many messages that may come twice do
	repeated int // that did
	cuts     int
	began    int // links
}

type link struct {
	tcp  [2]*net.TCPConn
	ends [2]net.Conn // the same, or the TLS on them
	over chan struct{}
	once sync.Once
	lost atomic.Bool // it swallows what is sent, for good, and neither side learns that the other has gone
}

func (l *link) end() {
	l.once.Do(func() {
		close(l.over)
		for _, c := range l.tcp {
			_ = c.SetLinger(0) // what is under way is lost
			_ = c.Close()
		}
	})
}

// startProxy listens for links to p.target until the test ends.
func startProxy(t testing.TB, p *proxy) *proxy {
	t.Helper()
	p.t, p.address, p.links = t, "127.0.0.1:0", map[*link]bool{}
	if err := p.listen(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.heal()
		p.mu.Lock()
		_ = p.listener.Close()
		p.mu.Unlock()
		p.cut(true)
		p.wg.Wait()
	})
	return p
}

func (p *proxy) listen() error {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", p.address)
	if err != nil {
		return err
	}
	p.listener, p.address = l, l.Addr().String()
	p.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.splice(c.(*net.TCPConn)) })
		}
	})
	return nil
}

func (p *proxy) addr() string { return p.address }

// splice joins two connections until they end.
func (p *proxy) splice(client *net.TCPConn) {
	for dark := p.darkness(); dark != nil; dark = p.darkness() {
		<-dark // a lost SYN is sent again
	}
	c, err := new(net.Dialer).DialContext(context.Background(), "tcp", p.target)
	if err != nil {
		_ = client.Close()
		return
	}
	server := c.(*net.TCPConn)
	l := &link{tcp: [2]*net.TCPConn{client, server}, ends: [2]net.Conn{client, server}, over: make(chan struct{})}
	p.mu.Lock()
	p.links[l] = true
	if p.shut {
		l.end()
	}
	p.mu.Unlock()
	defer func() {
		l.end()
		p.mu.Lock()
		delete(p.links, l)
		p.mu.Unlock()
	}()
	if p.between != nil && p.between.shake(l) != nil {
		return
	}
	p.mu.Lock()
	p.began++
	p.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() { p.pump(l, up) })
	both.Go(func() { p.pump(l, down) })
	both.Wait()
}

func (p *proxy) darkness() chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dark
}

// unit is one line of the protocol with its payload, or some bytes.
type unit struct {
	bytes []byte
	due   time.Time
}

// pump carries one direction of a link.
func (p *proxy) pump(l *link, w way) {
	defer func() {
		if !l.lost.Load() {
			l.end()
		}
	}()
	units := make(chan unit, 1024)
	var writer sync.WaitGroup
	writer.Go(func() {
		for u := range units {
			if !p.pass(l, w, u) {
				l.end()
			}
		}
	})
	defer writer.Wait()
	defer close(units)
	in := bufio.NewReaderSize(l.ends[w], 64<<10)
	var again []byte // to come a third time
	var wait int
	read := readUnit
	if p.sealed {
		read = readBytes
	}
	for {
		b, mayRepeat, err := read(in)
		if err != nil {
			return
		}
		p.mu.Lock()
		due := time.Now().Add(p.delay)
		repeat := mayRepeat && p.twice > 0
		if repeat {
			p.twice--
			p.repeated++
		}
		p.mu.Unlock()
		out := [][]byte{b}
		if repeat {
			out = append(out, b)
		}
		if wait--; again != nil && wait <= 0 {
			out, again = append(out, again), nil
		}
		if repeat && again == nil {
			again, wait = b, 6
		}
		for _, b := range out {
			select {
			case units <- unit{b, due}:
			case <-l.over:
				return
			}
		}
	}
}

// pass sends one unit when the faults let it. It reports whether the link still stands.
func (p *proxy) pass(l *link, w way, u unit) bool {
	pause := time.Until(u.due)
	for {
		p.mu.Lock()
		held := p.held[w]
		if p.rate > 0 && held == nil {
			pause = max(pause, time.Duration(len(u.bytes))*time.Second/time.Duration(p.rate))
		}
		p.mu.Unlock()
		if held != nil {
			select {
			case <-held:
				continue
			case <-l.over:
				return false
			}
		}
		break
	}
	if pause > 0 {
		select {
		case <-time.After(pause):
		case <-l.over:
			return false
		}
	}
	if l.lost.Load() {
		return true
	}
	_, err := l.ends[1-w].Write(u.bytes)
	return err == nil
}

// readBytes reads what there is.
func readBytes(in *bufio.Reader) (b []byte, mayRepeat bool, err error) {
	b = make([]byte, 32<<10)
	n, err := in.Read(b)
	return b[:n], false, err
}

// readUnit reads a line of the protocol and its payload. Messages of the work itself (assignments, frames, credit, orders) may
// come twice: a hello or heartbeat that does is another process's word.
func readUnit(in *bufio.Reader) (b []byte, mayRepeat bool, err error) {
	line, err := in.ReadBytes('\n')
	if err != nil {
		return nil, false, err
	}
	fields := bytes.Fields(line)
	if len(fields) < 3 {
		return line, false, nil
	}
	switch string(bytes.ToUpper(fields[0])) {
	case "PUB", "HPUB", "MSG", "HMSG":
	default:
		return line, false, nil
	}
	size, err := strconv.Atoi(string(fields[len(fields)-1]))
	if err != nil {
		return nil, false, err
	}
	subject := fields[1]
	b = make([]byte, len(line)+size+2)
	if _, err := io.ReadFull(in, b[copy(b, line):]); err != nil {
		return nil, false, err
	}
	for _, kind := range []string{".work.", ".credit.", ".result.", ".control."} {
		mayRepeat = mayRepeat || bytes.Contains(subject, []byte(kind))
	}
	return b, mayRepeat, nil
}

// cut ends all links; shut refuses new ones until heal.
func (p *proxy) cut(shut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shut = p.shut || shut
	p.cuts++
	for l := range p.links {
		l.end()
	}
}

// refuse ends all links and refuses new ones until heal: nobody listens any more.
func (p *proxy) refuse() {
	p.mu.Lock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
	p.mu.Unlock()
	p.cut(true)
}

// blacken swallows what is sent on the links that there are, for good, and tells neither side; whoever dials until heal waits
// as long: a firewall that lost its table, and packets that nobody answers.
func (p *proxy) blacken() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cuts++
	if p.dark == nil {
		p.dark = make(chan struct{})
	}
	for l := range p.links {
		l.lost.Store(true)
	}
}

// hold lets nothing pass in these directions, and tells nobody.
func (p *proxy) hold(ways ...way) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range ways {
		if p.held[w] == nil {
			p.held[w] = make(chan struct{})
		}
	}
}

// slow delays each message, and bounds the bytes a second.
func (p *proxy) slow(delay time.Duration, rate int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay, p.rate = delay, rate
}

// repeat has the next n messages come twice.
func (p *proxy) repeat(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.twice = n
}

// heal ends all faults.
func (p *proxy) heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for w, c := range p.held {
		if c != nil {
			close(c)
			p.held[w] = nil
		}
	}
	if p.dark != nil {
		close(p.dark)
		p.dark = nil
	}
	p.shut, p.delay, p.rate, p.twice = false, 0, 0, 0
	if p.listener == nil && !eventually(20*time.Second, func() bool { return p.listen() == nil }) {
		p.t.Errorf("the proxy can't listen on %s again", p.address)
	}
}

// made is how many links have been made so far.
func (p *proxy) made() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.began
}

// counts is how many messages came twice and how often the links were cut.
func (p *proxy) counts() (repeated, cuts int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.repeated, p.cuts
}
