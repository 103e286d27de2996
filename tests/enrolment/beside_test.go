package enrolment

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/enrol"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// held stops a replica where it splices its second link, which is made beside the first, until goOn is closed.
func held(t *testing.T) (option func(*enrol.DiallerDeps), making <-chan struct{}, goOn chan<- struct{}) {
	t.Helper()
	at, on := make(chan struct{}), make(chan struct{})
	return func(d *enrol.DiallerDeps) {
		server, links := d.Server, 0
		d.Server = func() (net.Conn, error) {
			if links++; links == 2 {
				close(at)
				select {
				case <-on:
				case <-t.Context().Done():
				}
			}
			return server()
		}
	}, at, on
}

// goodbyes has the goodbyes that a replica says passed on, to whom each is.
func goodbyes() (option func(*enrol.DiallerDeps), said <-chan schemas.RunnerRef) {
	to := make(chan schemas.RunnerRef, 100)
	return func(d *enrol.DiallerDeps) {
		d.Order = func(_ context.Context, ref schemas.RunnerRef, m *runbusv1.RunnerControl) (*runbusv1.RunnerControlReply, error) {
			if m.GetGoodbye().GetRevoked() {
				to <- ref
			}
			return nil, errors.New("it does not answer")
		}
	}, to
}

// linked has the replica link the runner.
func (p *plane) linked(t *testing.T, r roster.Runner, l *listener, a *replica) net.Conn {
	t.Helper()
	p.moveTo(t, r.ID, l.addr)
	conn := l.take(t)
	await(t, "a link", func() bool { return a.Linked(r.ID) })
	return conn
}

// eventually is the next of c.
func eventually[T any](t *testing.T, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("waited in vain for %s", what)
		panic("not reached")
	}
}

// C8: while a link is made for a renewed leaf, and until that is in use, the runner counts as one that is not to be renewed: it would be
// left with a key for nothing.
func TestALinkBesideIsNoTimeToRenew(t *testing.T) {
	p := start(t)
	r, h := p.enrolled(t, "edge")
	l := takesLinks(t, h)
	hold, making, goOn := held(t)
	a := p.replica(t, "a", p.Conn(t, embedded.UserSec), hold)
	p.linked(t, r, l, a)
	must(t, p.renewer(&orders{renewals: identity.NewRenewals(l.store)}, a.Redial).Renew(t.Context(), r))
	eventually(t, "the second link", making)
	if a.Linked(r.ID) || !a.Link(r.ID).Connected {
		t.Errorf("while the second link is made: may be renewed %v, link %+v", a.Linked(r.ID), a.Link(r.ID))
	}
	close(goOn)
	await(t, "the second link", func() bool { return a.Linked(r.ID) })
	if now := p.runner(t, r.ID); now.Next != nil || now.Current.Fingerprint != l.store.Fingerprint() {
		t.Errorf("it may be renewed, and the leaf of its link is not in use: %+v", now)
	}
}

// C9: a revoked runner is told so at once, also when its replica is about something else that takes long: what has not heard of it waits
// for a link for ever.
func TestARevokedRunnerIsToldWhileItsNewAddressIsTried(t *testing.T) {
	p := start(t)
	r, h := p.enrolled(t, "edge")
	l := takesLinks(t, h)
	hear, said := goodbyes()
	a := p.replica(t, "a", p.Conn(t, embedded.UserSec), hear, func(d *enrol.DiallerDeps) { d.DialWithin = 10 * patience })
	conn := p.linked(t, r, l, a)
	silent, dialled := answersNothing(t)
	p.moveTo(t, r.ID, silent)
	eventually(t, "the dial of the new address", dialled)
	_, err := p.roster.Revoke(t.Context(), ada, r.ID)
	must(t, err)
	if to := eventually(t, "the goodbye", said); to != r.Ref() {
		t.Errorf("the goodbye is to %+v", to)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("the link of a revoked runner goes on")
	}
}

// A runner that is removed as soon as it is revoked is told, too.
func TestARemovedRunnerIsTold(t *testing.T) {
	p := start(t)
	r, h := p.enrolled(t, "edge")
	l := takesLinks(t, h)
	hold, making, goOn := held(t)
	hear, said := goodbyes()
	a := p.replica(t, "a", p.Conn(t, embedded.UserSec), hold, hear)
	p.linked(t, r, l, a)
	a.Redial(r.ID)
	eventually(t, "the second link", making)
	_, err := p.roster.Revoke(t.Context(), ada, r.ID)
	must(t, err)
	must(t, p.roster.Remove(t.Context(), ada, r.ID))
	close(goOn)
	if to := eventually(t, "the goodbye", said); to != r.Ref() {
		t.Errorf("the goodbye is to %+v", to)
	}
}

// answersNothing is an address at which connections are taken, which dialled tells of, and nothing is said.
func answersNothing(t *testing.T) (address string, dialled <-chan struct{}) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	must(t, err)
	taken := make(chan struct{}, 100)
	var conns []net.Conn
	var accepting sync.WaitGroup
	accepting.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conns = append(conns, conn)
			taken <- struct{}{}
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		accepting.Wait()
		for _, conn := range conns {
			_ = conn.Close()
		}
	})
	return l.Addr().String(), taken
}
