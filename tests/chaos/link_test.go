package chaos

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"
)

// way is a direction of a link.
type way int

const (
	up   way = iota // from the runner to the control plane
	down            // from the control plane to the runner
)

// proxy stands between one runner and the bus. It reads the protocol of NATS, so its faults are of bytes (delay, throttle, hold in one
// direction or both, cut) and of messages (twice, and once more later). Times are those of the faults, not of a test that waits.
type proxy struct {
	listener net.Listener
	target   string
	wg       sync.WaitGroup

	mu       sync.Mutex
	links    map[*link]bool
	shut     bool
	held     [2]chan struct{} // open: nothing goes this way until it is closed; nil: it flows
	delay    time.Duration
	rate     int // bytes a second, 0: no bound
	twice    int // the next so many messages that may come twice do
	repeated int // that did
	cuts     int
}

type link struct {
	ends [2]*net.TCPConn
	over chan struct{}
	once sync.Once
}

func (l *link) end() {
	l.once.Do(func() {
		close(l.over)
		for _, c := range l.ends {
			_ = c.SetLinger(0) // what is under way is lost
			_ = c.Close()
		}
	})
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: l, target: target, links: map[*link]bool{}}
	p.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.splice(t, c.(*net.TCPConn)) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.heal()
		p.cut(true)
		p.wg.Wait()
	})
	return p
}

func (p *proxy) addr() string { return p.listener.Addr().String() }

func (p *proxy) splice(t testing.TB, client *net.TCPConn) {
	c, err := new(net.Dialer).DialContext(t.Context(), "tcp", p.target)
	if err != nil {
		_ = client.Close()
		return
	}
	l := &link{ends: [2]*net.TCPConn{client, c.(*net.TCPConn)}, over: make(chan struct{})}
	p.mu.Lock()
	p.links[l] = true
	if p.shut {
		l.end()
	}
	p.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() { p.pump(l, up) })
	both.Go(func() { p.pump(l, down) })
	both.Wait()
	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
}

// unit is one line of the protocol with its payload.
type unit struct {
	bytes []byte
	due   time.Time
}

// pump carries one direction of a link.
func (p *proxy) pump(l *link, w way) {
	defer l.end()
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
	for {
		b, mayRepeat, err := readUnit(in)
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
	_, err := l.ends[1-w].Write(u.bytes)
	return err == nil
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
	p.shut, p.delay, p.rate, p.twice = false, 0, 0, 0
}

// counts is how many messages came twice and how often the links were cut.
func (p *proxy) counts() (repeated, cuts int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.repeated, p.cuts
}
