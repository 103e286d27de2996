package runner

import (
	"context"
	"crypto/ed25519"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"syscall"
	"testing"
	"time"

	buslink "github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// parent is the control plane's side of a runner that is its child, though in one process with it.
type parent struct {
	*buslink.Lifeline
	public []byte
	child  *Agent
	ended  chan error
}

func newParent(t *testing.T) *parent {
	t.Helper()
	lifeline, file, err := buslink.NewLifeline()
	must(t, err)
	t.Cleanup(func() { _ = lifeline.Close() })
	fd, err := syscall.Dup(int(file.Fd()))
	must(t, err)
	must(t, file.Close())
	p := &parent{Lifeline: lifeline, ended: make(chan error, 1)}
	p.child, err = New(Config{Lifeline: fd, StateDir: t.TempDir(), Log: slog.New(newJournal())})
	must(t, err)
	greeting, err := lifeline.Greeting(time.Now().Add(patience))
	must(t, err)
	p.public = greeting.GetPublicKey()
	go func() { p.ended <- p.child.Run(context.Background()) }()
	return p
}

// end waits for the end of the child.
func (p *parent) end(t *testing.T) error {
	t.Helper()
	select {
	case err := <-p.ended:
		return err
	case <-time.After(patience):
		t.Fatal("the child has not ended")
		return nil
	}
}

// offer hands a link over that is said to be of this runner.
func (p *parent) offer(t *testing.T, ref schemas.RunnerRef) (net.Conn, error) {
	t.Helper()
	conn, err := p.Hand()
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn, buslink.Offer(conn, time.Now().Add(patience), &runbusv1.LinkPreface{Tenant: ref.Tenant, RunnerId: ref.Runner, Replica: "here"})
}

// A child whose control plane is gone ends, whether it has a link or not.
func TestAnOrphanEnds(t *testing.T) {
	p := newParent(t)
	must(t, p.Close())
	if err := p.end(t); !errors.Is(err, errOrphaned) || ExitCode(err) != ExitFailed {
		t.Errorf("without a link it ended with %v", err)
	}
	p = newParent(t)
	conn, err := p.offer(t, schemas.RunnerRef{Tenant: "acme", Runner: schemas.ConsoleRunner})
	must(t, err)
	must(t, conn.Close())
	must(t, p.Close())
	if err := p.end(t); !errors.Is(err, errOrphaned) {
		t.Errorf("with one it ended with %v", err)
	}
}

// One that is told to stop before it has a link has nothing to wait for.
func TestAChildStopsBeforeItsFirstLink(t *testing.T) {
	p := newParent(t)
	p.child.Drain()
	if err := p.end(t); err != nil {
		t.Errorf("it ended with %v", err)
	}
}

// The first link says who a child is, for good.
func TestWhoAChildIs(t *testing.T) {
	p := newParent(t)
	console := schemas.RunnerRef{Tenant: "acme", Runner: schemas.ConsoleRunner}
	for _, ref := range []schemas.RunnerRef{{}, {Tenant: "acme"}, {Tenant: "ac.me", Runner: "console"}, {Tenant: "acme", Runner: "*"}} {
		if _, err := p.offer(t, ref); err == nil {
			t.Errorf("it takes a link of %q", ref)
		}
	}
	first, err := p.offer(t, console)
	must(t, err)
	if _, err := p.offer(t, schemas.RunnerRef{Tenant: "umbrella", Runner: schemas.ConsoleRunner}); err == nil {
		t.Error("it takes a link of another tenant")
	}
	second, err := p.offer(t, console)
	must(t, err)
	h := &runbusv1.RunnerHello{ProcessNonce: "n", SealingKey: []byte("k")}
	must(t, p.child.cred.sign(console, h))
	if !schemas.VerifyHello(p.public, schemas.HelloSigningInput(console, h), h.GetSignature()) {
		t.Error("its hello is not signed by the key that it greeted with")
	}
	key, err := x509.ParsePKIXPublicKey(p.public)
	if _, ok := key.(ed25519.PublicKey); err != nil || !ok {
		t.Errorf("its key is a %T, %v", key, err)
	}
	_, _ = first.Close(), second.Close()
	must(t, p.Close())
	if err := p.end(t); !errors.Is(err, errOrphaned) {
		t.Errorf("it ended with %v", err)
	}
}
