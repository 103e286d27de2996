package registry_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/registry"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
)

func grace(d time.Duration) func(*registry.Deps) {
	return func(deps *registry.Deps) { deps.Grace = d }
}

// watchLoss watches the process of r.
func watchLoss(s *rt.Stack, r *rt.Runner) (lost <-chan string, stop func()) {
	var w registry.Watch
	told := make(chan string, 1)
	s.Registry.WatchLoss(&w, &registry.Candidate{Ref: r.Ref, Session: r.Session}, func() {
		why, _ := w.Lost()
		told <- why
	})
	return told, func() { s.Registry.Forget(&w) }
}

// Watches may end in any order, and each more than once; those that are left are told.
func TestForget(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Enrol(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	var lost []<-chan string
	var stop []func()
	for range 4 {
		l, f := watchLoss(s, r)
		lost, stop = append(lost, l), append(stop, f)
	}
	for _, i := range []int{3, 0, 1, 0} { // the last begun, the first, one between
		stop[i]()
	}
	l, f := watchLoss(s, r)
	lost, stop = append(lost, l), append(stop, f)
	r.Goodbye(t, "")
	for i, l := range lost {
		if ended := i == 0 || i == 1 || i == 3; ended {
			continue
		}
		if why := rt.Wait(t, "the loss", l); why != "it said goodbye" {
			t.Errorf("%d lost because %q", i, why)
		}
		stop[i]()
	}
	for _, i := range []int{0, 1, 3} {
		if len(lost[i]) != 0 {
			t.Errorf("%d was told after its end", i)
		}
	}
	var never registry.Watch
	s.Registry.Forget(&never)
}

// A running work's runner is lost as soon as that is known, with the reason (SPEC D13).
func TestLoss(t *testing.T) {
	for id, c := range map[string]struct {
		grace time.Duration
		lose  func(t *testing.T, s *rt.Stack, key rt.Credential, r *rt.Runner)
		why   string
	}{
		"replaced": {time.Hour, func(t *testing.T, s *rt.Stack, key rt.Credential, _ *rt.Runner) { s.Enrol(t, key, "replaced") }, "a new process took its id"},
		"goodbye":  {time.Hour, func(t *testing.T, _ *rt.Stack, _ rt.Credential, r *rt.Runner) { r.Goodbye(t, "SIGTERM") }, "it said goodbye (SIGTERM)"},
		"cut": {300 * time.Millisecond, func(_ *testing.T, _ *rt.Stack, _ rt.Credential, r *rt.Runner) {
			r.Cut()
		}, "its link was cut and was not back within 300ms"},
		"revoked": {time.Hour, func(t *testing.T, s *rt.Stack, key rt.Credential, _ *rt.Runner) { // which cuts it, too
			_, err := s.Auth.RevokeKey(t.Context(), s.Admin, key.ID)
			rt.Must(t, err)
		}, "its service-account key was revoked"},
	} {
		t.Run(id, func(t *testing.T) {
			s := rt.Start(t, grace(c.grace))
			key := s.Mint(t, s.Admin, "edge")
			r := s.Enrol(t, key, id)
			lost, stop := watchLoss(s, r)
			defer stop()
			c.lose(t, s, key, r)
			if why := rt.Wait(t, "the loss", lost); why != c.why {
				t.Errorf("lost because %q, want %q", why, c.why)
			}
			if id == "goodbye" {
				if c := s.Candidate(t, id); c.Offline != "not connected" {
					t.Errorf("after its goodbye: %+v", c)
				}
			}
		})
	}
}

// A cut is not a death: the runner is offline for new work at once, and its works go on when the same process is back.
func TestBackWithinGrace(t *testing.T) {
	s := rt.Start(t, grace(time.Hour))
	r := s.Enrol(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	lost, stop := watchLoss(s, r)
	defer stop()
	r.Cut()
	s.Await(t, "it is offline", func() bool { return s.Candidate(t, "edge-1").Offline == "not connected" })
	was := r.Session
	r.Dial(t, s)
	if a := r.Hello(t, nil); a.GetSession() != was {
		t.Fatalf("the same process got another session: %v", a)
	}
	s.Await(t, "it is back", func() bool { return s.Dispatchable(t, "edge-1") })
	select {
	case why := <-lost:
		t.Errorf("lost: %s", why)
	default:
	}
}

// A watch that starts when the process is gone already says so at once.
func TestWatchTooLate(t *testing.T) {
	s := rt.Start(t, nil)
	key := s.Mint(t, s.Admin, "edge")
	first := s.Enrol(t, key, "edge-1")
	s.Enrol(t, key, "edge-1")
	lost, stop := watchLoss(s, first)
	defer stop()
	if why := rt.Wait(t, "the loss", lost); why != "a new process took its id" {
		t.Errorf("lost because %q", why)
	}
}

// Who has selected a runner whose key is revoked before the watch begins is told as those are who watch it already.
func TestWatchAfterARevocation(t *testing.T) {
	s := rt.Start(t, grace(time.Hour))
	key := s.Mint(t, s.Admin, "edge")
	r := s.Enrol(t, key, "edge-1")
	_, err := s.Auth.RevokeKey(t.Context(), s.Admin, key.ID)
	rt.Must(t, err)
	lost, stop := watchLoss(s, r)
	defer stop()
	if why := rt.Wait(t, "the loss", lost); why != "its service-account key was revoked" {
		t.Errorf("lost because %q", why)
	}
}

// Work on a dialled runner ends with its revocation, whether its link does or not: it has that for a moment more, to hear of it. Who has
// selected it before is told too.
func TestARevokedRunnerIsLost(t *testing.T) {
	s := rt.Start(t, grace(time.Hour))
	runner, _, err := s.Roster.Create(t.Context(), s.Admin, roster.Spec{Name: "edge", Address: "db.internal:7443"})
	rt.Must(t, err)
	r := &rt.Runner{Ref: runner.Ref(), Session: schemas.NewID()}
	during, stop := watchLoss(s, r)
	defer stop()
	name := "another-name"
	_, err = s.Roster.Edit(t.Context(), s.Admin, runner.ID, roster.Change{Name: &name})
	rt.Must(t, err)
	select {
	case why := <-during:
		t.Fatalf("by another change: lost because %q", why)
	default:
	}
	_, err = s.Roster.Revoke(t.Context(), s.Admin, runner.ID)
	rt.Must(t, err)
	afterwards, stop := watchLoss(s, r)
	defer stop()
	for when, lost := range map[string]<-chan string{"during it": during, "afterwards": afterwards} {
		if why := rt.Wait(t, "the loss "+when, lost); why != "it was revoked" {
			t.Errorf("%s: lost because %q", when, why)
		}
	}
}

// When the heartbeats are lost (they are in memory), a runner is told to say hello again and keeps its session.
func TestBucketLost(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Enrol(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	was := r.Session
	js, err := natsjs.New(s.Conn(t, embedded.UserSec))
	rt.Must(t, err)
	rt.Must(t, js.DeleteStream(t.Context(), "KV_runbus_heartbeats"))
	again, err := jetstream.Open(t.Context(), s.Conn(t, embedded.UserSec), jetstream.Options{Log: s.Log})
	rt.Must(t, err)
	t.Cleanup(again.Close)

	r.Beat(t, nil)
	if order := r.Order(t); order.GetRehello() == nil {
		t.Fatalf("got %v", order)
	}
	if a := r.Hello(t, nil); a.GetSession() != was {
		t.Fatalf("the same process got another session: %v", a)
	}
	r.Beat(t, nil)
	table := jetstream.TableOf[registry.Record](again, jetstream.Heartbeats)
	row, err := table.Get(t.Context(), schemas.RunnerKey(r.Ref))
	rt.Must(t, err)
	if row.Value.Session != was {
		t.Errorf("record = %+v", row.Value)
	}
}

// A registry that can't be read is that, and never an empty one (SPEC D7, R1).
func TestUnreadable(t *testing.T) {
	s := rt.Start(t, nil)
	s.Enrol(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	s.LoseHeartbeats(t)
	s.Clock.Advance(16 * time.Second)
	want := schemas.ErrRegistryUnavailable(nil)
	if _, err := s.Registry.Snapshot(rt.Tenant); !errors.Is(err, want) {
		t.Errorf("Snapshot: %v", err)
	}
	if _, err := s.Registry.List(rt.Tenant); !errors.Is(err, want) || !strings.Contains(errors.Unwrap(err).Error(), "leader") {
		t.Errorf("List: %v", err)
	}
	if err := s.Registry.Readable(); !errors.Is(err, want) {
		t.Errorf("Readable: %v", err)
	}
}

// What is known of a runner outlives it, coarse.
func TestKnown(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Enrol(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	s.Clock.Advance(70 * time.Second)
	r.Beat(t, nil)
	known := jetstream.TableOf[registry.Known](s.Store, jetstream.Known)
	s.Await(t, "the batch was written", func() bool {
		row, err := known.Get(t.Context(), schemas.RunnerKey(r.Ref))
		rt.Must(t, err)
		return row.Value.LastSeen.Sub(row.Value.FirstSeen) >= time.Minute
	})
	s.Await(t, "the leader answered again", func() bool { return s.Registry.Readable() == nil })
	r.Goodbye(t, "")
	s.Await(t, "it left", func() bool { return s.Candidate(t, "edge-1").Offline == "not connected" })
	list := s.SelfHosted(t, rt.Tenant)
	if len(list) != 1 || list[0].Health.Connected || list[0].Health.LastSeen == nil || list[0].Claims.Version != "1.2.3" {
		t.Errorf("list = %+v", list)
	}
}
