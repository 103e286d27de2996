package intake

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

func TestMain(m *testing.M) { leak.Main(m) }

const patience = 2 * time.Minute

// pair is a CA with a certificate for each side.
type pair struct {
	roots          *x509.CertPool
	server, client tls.Certificate
}

func newPair(t *testing.T) pair {
	t.Helper()
	key := func() *ecdsa.PrivateKey {
		k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	caKey := key()
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	sign := func(c *x509.Certificate, k *ecdsa.PrivateKey) []byte {
		der, err := x509.CreateCertificate(rand.Reader, c, ca, k.Public(), caKey)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	caCert, err := x509.ParseCertificate(sign(ca, caKey))
	if err != nil {
		t.Fatal(err)
	}
	p := pair{roots: x509.NewCertPool()}
	p.roots.AddCert(caCert)
	for usage, to := range map[x509.ExtKeyUsage]*tls.Certificate{x509.ExtKeyUsageServerAuth: &p.server, x509.ExtKeyUsageClientAuth: &p.client} {
		k := key()
		der := sign(&x509.Certificate{SerialNumber: big.NewInt(2), NotBefore: ca.NotBefore, NotAfter: ca.NotAfter, DNSNames: []string{"runner"}, ExtKeyUsage: []x509.ExtKeyUsage{usage}}, k)
		*to = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: k}
	}
	return p
}

// open starts an Intake whose links go through slot, and returns its address.
func open(t *testing.T, p pair, slot *Slot, change func(*Config)) (*Intake, string) {
	t.Helper()
	c := Config{
		Listen: "127.0.0.1:0",
		TLS: func(string) (*tls.Config, error) {
			return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{p.server}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: p.roots}, nil
		},
		Enrol: func(context.Context, *tls.Conn) error { return errors.New("nobody enrols here") },
		Link: func(ctx context.Context, conn *tls.Conn, m *runbusv1.LinkPreface, leaf string) error {
			return slot.Offer(ctx, &Link{Conn: conn, Leaf: leaf, Replica: m.GetReplica(), User: "u", Password: m.GetToken()})
		},
		HandshakeWithin: patience, // however slow this machine is: that it is bounded is the flood's test
		Log:             slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&c)
	}
	i, err := Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- i.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Serve: %v", err)
		}
		slot.Close()
	})
	return i, i.Addr().String()
}

// dial makes a link as a replica does.
func dial(t *testing.T, p pair, address, replica string) (*tls.Conn, error) {
	t.Helper()
	conn, err := (&tls.Dialer{Config: &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: p.roots, ServerName: "runner", Certificates: []tls.Certificate{p.client}, NextProtos: []string{link.ProtoLink},
	}}).DialContext(t.Context(), "tcp", address)
	if err != nil {
		return nil, err
	}
	c := conn.(*tls.Conn)
	t.Cleanup(func() { _ = c.Close() })
	return c, link.Offer(c, time.Now().Add(patience), &runbusv1.LinkPreface{Replica: replica, Token: "of " + replica})
}

// newSlot is a slot whose link answers while answers says so.
func newSlot(answers func(context.Context) bool) (*Slot, <-chan struct{}) {
	arrived := make(chan struct{}, 16)
	return &Slot{Answers: answers, Arrived: func() { arrived <- struct{}{} }}, arrived
}

func always(context.Context) bool { return true }

// deaf answers nothing until its caller gives up.
func deaf(ctx context.Context) bool { <-ctx.Done(); return false }

// C11: exactly one link is in use, and the runner decides which.
func TestExactlyOneLinkIsInUse(t *testing.T) {
	p := newPair(t)
	var mu sync.Mutex
	answers := always
	slot, arrived := newSlot(func(ctx context.Context) bool {
		mu.Lock()
		now := answers
		mu.Unlock()
		return now(ctx)
	})
	_, address := open(t, p, slot, nil)

	if _, err := slot.Dial("", ""); !errors.Is(err, ErrNoLink) {
		t.Errorf("a dial without a link: %v", err)
	}
	a, err := dial(t, p, address, "a")
	if err != nil {
		t.Fatal(err)
	}
	<-arrived
	used, err := slot.Dial("", "")
	if err != nil {
		t.Fatal(err)
	}
	if user, password := slot.UserInfo(); user != "u" || password != "of a" {
		t.Errorf("the link is used as %s with %q", user, password)
	}

	_, err = dial(t, p, address, "b")
	if schemas.CodeOf(err) != schemas.CodeConflict || err.Error() != "linked elsewhere" {
		t.Fatalf("a second link while the first answers: %v", err)
	}
	mu.Lock()
	answers = deaf
	mu.Unlock()
	began := time.Now()
	b, err := dial(t, p, address, "b")
	if err != nil {
		t.Fatalf("a second link while the first is silent: %v", err)
	}
	if d := time.Since(began); d < answersWithin {
		t.Errorf("the first link was given up after %s", d)
	}
	<-arrived
	_ = used.Close()
	if _, err := a.Read(make([]byte, 1)); err == nil {
		t.Error("the first link goes on")
	}
	next, err := slot.Dial("", "")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = next.Write([]byte("x")) }()
	if _, err := io.ReadFull(b, make([]byte, 1)); err != nil {
		t.Errorf("the second link: %v", err)
	}

	// The same replica, and one that dials for a renewed leaf, need not wait.
	mu.Lock()
	answers = always
	mu.Unlock()
	if _, err := dial(t, p, address, "b"); err != nil {
		t.Errorf("a link of the same replica: %v", err)
	}
	<-arrived
	third, err := slot.Dial("", "")
	if err != nil {
		t.Fatal(err)
	}
	if err := third.Close(); err != nil {
		t.Error(err)
	}
	if _, err := dial(t, p, address, "c"); err != nil {
		t.Errorf("a link when there is none: %v", err)
	}
	<-arrived
}

// A link is read from what Conn makes of its socket.
func TestALinkIsReadFromItsConn(t *testing.T) {
	p := newPair(t)
	slot, _ := newSlot(always)
	var read atomic.Int64
	taken := make(chan *tls.Conn, 1)
	_, address := open(t, p, slot, func(c *Config) {
		c.Conn = func(conn net.Conn) net.Conn { return counted{conn, &read} }
		offer := c.Link
		c.Link = func(ctx context.Context, conn *tls.Conn, m *runbusv1.LinkPreface, leaf string) error {
			taken <- conn
			return offer(ctx, conn, m, leaf)
		}
	})
	there, err := dial(t, p, address, "a")
	if err != nil {
		t.Fatal(err)
	}
	here := <-taken
	before := read.Load()
	if _, err := there.Write([]byte("next")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(here, make([]byte, 4)); err != nil || read.Load() == before {
		t.Errorf("the socket was read instead: %v", err)
	}
}

type counted struct {
	net.Conn
	read *atomic.Int64
}

func (c counted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.read.Add(int64(n))
	return n, err
}

// A renewal takes effect by a new link with the new leaf, whichever replica dials it.
func TestANewLeafReplacesTheLink(t *testing.T) {
	slot, _ := newSlot(always)
	offer := func(leaf, replica string) error {
		ours, theirs := net.Pipe()
		t.Cleanup(func() { _ = ours.Close(); _ = theirs.Close() })
		go func() { _, _ = io.Copy(io.Discard, theirs) }()
		return slot.Offer(t.Context(), &Link{Conn: ours, Leaf: leaf, Replica: replica})
	}
	if err := offer("old", "a"); err != nil {
		t.Fatal(err)
	}
	if err := offer("old", "b"); err == nil {
		t.Error("another replica replaced a link that answers")
	}
	if err := offer("new", "b"); err != nil {
		t.Errorf("the new leaf: %v", err)
	}
	slot.Close()
	if err := offer("new", "b"); err == nil {
		t.Error("a closed slot took a link")
	}
}

// Who has shaken hands is the control plane: strangers that come while the runner decides don't put it out.
func TestWhoHasShakenHandsIsNotPutOut(t *testing.T) {
	p := newPair(t)
	slot, _ := newSlot(always)
	deciding, goOn, taken := make(chan struct{}, 2), make(chan struct{}), make(chan *tls.Conn, 2)
	i, address := open(t, p, slot, func(c *Config) {
		c.PerAddress = 1
		c.Link = func(_ context.Context, conn *tls.Conn, _ *runbusv1.LinkPreface, _ string) error {
			deciding <- struct{}{}
			<-goOn
			err := link.Take(conn)
			taken <- conn // what the test closes has been answered
			return err
		}
	})
	answers := make(chan error, 2)
	for _, replica := range []string{"a", "b"} {
		go func() {
			_, err := dial(t, p, address, replica)
			answers <- err
		}()
		select {
		case <-deciding:
		case err := <-answers:
			t.Fatalf("a link that nobody has decided on is answered: %v", err)
		}
	}
	close(goOn)
	for range 2 {
		if err := <-answers; err != nil {
			t.Errorf("a link that was being decided on: %v", err)
		}
		_ = (<-taken).Close()
	}
	if _, evicted := i.gate.open(); evicted != 0 {
		t.Errorf("%d were put out", evicted)
	}
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// Who comes when the gate is full takes the place of the oldest: of its own address if that has its share, else of all.
func TestTheGateEvictsTheOldest(t *testing.T) {
	g := newGate(2, 3)
	enter := func(ip string) (*visit, *closable) {
		c := &closable{from: net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(ip), 1))}
		return g.enter(c), c
	}
	a1, ca1 := enter("192.0.2.1")
	_, ca2 := enter("::ffff:192.0.2.1") // the same
	_, cb := enter("2001:db8::1")
	_, ca3 := enter("192.0.2.1")
	if !ca1.closed || ca2.closed || cb.closed || ca3.closed {
		t.Fatal("not the oldest of the address was put out")
	}
	g.leave(a1) // has been put out: changes nothing
	_, cb2 := enter("2001:db8::2")
	if !ca2.closed || cb.closed || cb2.closed {
		t.Fatal("not the oldest of all was put out")
	}
	_, _ = enter("2001:db8::ffff") // the same /64
	if !cb.closed || cb2.closed {
		t.Error("the /64 has more than its share")
	}
	if now, evicted := g.open(); now != 3 || evicted != 3 {
		t.Errorf("%d open, %d put out", now, evicted)
	}
}

type closable struct {
	net.Conn
	from   net.Addr
	closed bool
}

func (c *closable) RemoteAddr() net.Addr { return c.from }
func (c *closable) Close() error         { c.closed = true; return nil }

// A client that says more than a handshake needs is cut, whoever it is: what it sends is kept until the handshake ends.
func TestAHandshakeThatIsTooLong(t *testing.T) {
	p := newPair(t)
	slot, _ := newSlot(always)
	_, address := open(t, p, slot, nil)
	plain := p.client
	for range 3 { // as the control plane's chain, and some
		p.client.Certificate = append(p.client.Certificate, plain.Certificate[0])
	}
	if _, err := dial(t, p, address, "a"); err != nil {
		t.Errorf("a chain of %d certificates: %v", len(p.client.Certificate), err)
	}
	for len(p.client.Certificate)*len(plain.Certificate[0]) < 64<<10 {
		p.client.Certificate = append(p.client.Certificate, plain.Certificate[0])
	}
	if _, err := dial(t, p, address, "a"); err == nil {
		t.Error("64 KiB of certificates were taken")
	}
	p.client = plain
	if _, err := dial(t, p, address, "a"); err != nil {
		t.Errorf("a link afterwards: %v", err)
	}
}

// What counts is what was read, in whatever pieces, until the handshake is over.
func TestEarlyBytesAreCounted(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	go func() {
		_, _ = far.Write(make([]byte, maxEarly+100))
		_ = far.Close()
	}()
	c := &earlyConn{Conn: near, left: maxEarly}
	read, b := 0, make([]byte, 1000)
	for {
		n, err := c.Read(b)
		read += n
		if err != nil {
			if !errors.Is(err, errEarly) || read != maxEarly {
				t.Errorf("%d bytes, %v", read, err)
			}
			break
		}
	}
	c.over = true
	if n, err := io.ReadFull(c, b[:100]); err != nil {
		t.Errorf("afterwards %d bytes, %v", n, err)
	}
}

// What offers no protocol of ours, or no certificate, is refused at the handshake.
func TestStrangersAreRefused(t *testing.T) {
	p := newPair(t)
	slot, _ := newSlot(always)
	_, address := open(t, p, slot, nil)
	for name, c := range map[string]*tls.Config{
		"no protocol":            {MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{p.client}},
		"no certificate":         {MinVersion: tls.VersionTLS13, NextProtos: []string{link.ProtoLink}},
		"a server's certificate": {MinVersion: tls.VersionTLS13, NextProtos: []string{link.ProtoLink}, Certificates: []tls.Certificate{p.server}},
		"TLS 1.2":                {MinVersion: tls.VersionTLS12, MaxVersion: tls.VersionTLS12, NextProtos: []string{link.ProtoLink}, Certificates: []tls.Certificate{p.client}},
	} {
		c.RootCAs, c.ServerName = p.roots, "runner"
		conn, err := (&tls.Dialer{Config: c}).DialContext(t.Context(), "tcp", address)
		if err == nil { // in TLS 1.3 the client learns it at its first read
			_, err = conn.Read(make([]byte, 1))
			_ = conn.Close()
		}
		if err == nil {
			t.Errorf("%s: taken", name)
		}
	}
	if slot.Waiting() {
		t.Error("a stranger has the link")
	}
}

// A taken port is an error that says so.
func TestATakenPort(t *testing.T) {
	slot, _ := newSlot(always)
	_, address := open(t, newPair(t), slot, nil)
	if _, err := Open(t.Context(), Config{Listen: address}); err == nil {
		t.Fatal("two listen at one address")
	}
}
