package registry_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/registry"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
)

// A replica whose servers tell nothing of their links at first, as on a host that stands still, starts all the same, and knows them then.
func TestAStartWithoutAnAnswer(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Enrol(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	var asked atomic.Int32
	late := s.Replica(t, func(d *registry.Deps) {
		d.Sys = s.Conn(t, embedded.UserSys, rt.Meddle("SERVER.PING.CONNZ", func() bool { return asked.Add(1) > 1 }))
	})
	list, err := late.Snapshot(rt.Tenant)
	rt.Must(t, err)
	if len(list) != 2 || list[1].Session != r.Session || list[1].Offline != "" || asked.Load() < 2 {
		t.Errorf("the replica, which asked %d times, sees %+v", asked.Load(), list)
	}
}

// What the leader was asked before says nothing of the time since, whenever its answer is read.
func TestAnAnswerThatIsLate(t *testing.T) {
	s := rt.Start(t, nil)
	var meddle atomic.Bool
	question, let, over := make(chan struct{}), make(chan struct{}), make(chan struct{})
	own, err := jetstream.Open(t.Context(), s.Conn(t, embedded.UserSec, rt.Meddle("heartbeats.probe", func() bool {
		if meddle.Load() {
			select {
			case question <- struct{}{}:
				<-let
			case <-over:
			}
		}
		return true
	})), jetstream.Options{Log: s.Log})
	rt.Must(t, err)
	t.Cleanup(own.Close)
	replica := s.Replica(t, func(d *registry.Deps) { d.Store = own })
	t.Cleanup(func() { close(over) })
	meddle.Store(true)
	rt.Wait(t, "the question", question)
	s.Clock.Advance(16 * time.Second)
	let <- struct{}{}
	rt.Wait(t, "the next question", question) // the answer to the one before has been read
	if err := replica.Readable(); !errors.Is(err, schemas.ErrRegistryUnavailable(nil)) {
		t.Errorf("with an answer of 16 s ago it is readable: %v", err)
	}
	meddle.Store(false)
	let <- struct{}{}
	rt.AwaitOn(t, replica, "the leader answered anew", func() bool { return replica.Readable() == nil })
}
