package chaos

import (
	"bufio"
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// way is a direction of a link.
type way int

const (
	up   way = iota // from the runner to the control plane
	down            // from the control plane to the runner
)

// proxy stands between one runner and the bus, whoever of the two dials. Its faults are of bytes (delay, throttle, hold in one
// direction or both, swallow, cut) and, where it can read the protocol of NATS, of messages (twice, and once more later). Times are
// those of the faults, not of a test that waits.
type proxy struct {
	t       testing.TB
	address string
	target  string
	dialled bool // the control plane dials, and the target is the runner
	// shake makes the ends of a link readable, if anything has to be done for that. It reports whether they are.
	shake func(l *link) (readable bool, err error)
	// reader reads units of a readable link. Nil: they are plain NATS.
	reader func(w way) reader
	sealed bool // no link is readable: no message can be told from another
	wg     sync.WaitGroup

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
	tcp  [2]*net.TCPConn // of the runner, and of the control plane
	ends [2]net.Conn     // the same, or the TLS on them
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
	p.t, p.links = t, map[*link]bool{}
	for tries := 1; ; tries++ {
		p.address = stack.FreeAddress(t, "127.0.0.1:0") // it is listened on again after refuse
		if err := p.listen(); err == nil {
			break
		} else if tries == 10 { // else somebody else took it meanwhile
			t.Fatal(err)
		}
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
func (p *proxy) splice(from *net.TCPConn) {
	for dark := p.darkness(); dark != nil; dark = p.darkness() {
		<-dark // a lost SYN is sent again
	}
	c, err := new(net.Dialer).DialContext(context.Background(), "tcp", p.target)
	if err != nil {
		_ = from.Close()
		return
	}
	l := &link{tcp: [2]*net.TCPConn{from, c.(*net.TCPConn)}, over: make(chan struct{})}
	if p.dialled {
		l.tcp[0], l.tcp[1] = l.tcp[1], l.tcp[0]
	}
	l.ends = [2]net.Conn{l.tcp[0], l.tcp[1]}
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
	readable := !p.sealed
	if p.shake != nil {
		var err error
		if readable, err = p.shake(l); err != nil {
			return
		}
	}
	p.mu.Lock()
	p.began++
	p.mu.Unlock()
	var both sync.WaitGroup
	for _, w := range []way{up, down} {
		read := readBytes
		switch {
		case readable && p.reader != nil:
			read = p.reader(w)
		case readable:
			read = readUnit
		}
		both.Go(func() { p.pump(l, w, read) })
	}
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
func (p *proxy) pump(l *link, w way, read reader) {
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
	if p.listener == nil && !eventually(stack.Patience, func() bool { return p.listen() == nil }) {
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
