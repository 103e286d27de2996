package registry_test

import (
	"reflect"
	"testing"
	"time"

	"github.com/org-runink/runbus/cp/registry"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/cp/roster"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// asListed compares what a name means with the list, which nobody keeps: an answer that is kept must be the one that would be found anew.
func asListed(t *testing.T, s *rt.Stack, after, name string) []registry.Candidate {
	t.Helper()
	listed := func() (list []registry.Candidate) {
		all, err := s.Registry.Snapshot(rt.Tenant)
		rt.Must(t, err)
		for _, c := range all {
			if c.Ref.Runner == name || c.Name == name {
				list = append(list, c)
			}
		}
		return list
	}
	for {
		before := listed()
		first, err := s.Registry.Named(rt.Tenant, name)
		rt.Must(t, err)
		again, err := s.Registry.Named(rt.Tenant, name)
		rt.Must(t, err)
		if !reflect.DeepEqual(before, listed()) {
			continue // it changed meanwhile
		}
		if !reflect.DeepEqual(first, before) || !reflect.DeepEqual(again, before) {
			t.Errorf("after %s, %s means %+v, then %+v, and listed is %+v", after, name, first, again, before)
		}
		return again
	}
}

func TestAnAnswerIsKeptWhileItHolds(t *testing.T) {
	t.Run("by the clock of a test", func(t *testing.T) { answerIsKept(t, rt.Start(t, nil)) })
	t.Run("in real time", func(t *testing.T) { answerIsKept(t, rt.StartInRealTime(t, nil)) })
}

func answerIsKept(t *testing.T, s *rt.Stack) {
	t.Helper()
	key := s.Mint(t, s.Admin, "edge")
	r := s.Enrol(t, key, "edge-1")
	fit := func(after string) {
		t.Helper()
		if list := asListed(t, s, after, "edge-1"); len(list) != 1 || list[0].Offline != "" {
			t.Fatalf("after %s, edge-1 means %+v", after, list)
		}
	}
	fit("its enrolment")
	s.Registry.Heard(r.Ref, r.Session)
	fit("it was heard")
	s.Registry.NobodyHeard(r.Ref, r.Session)
	fit("nobody listened")
	for _, draining := range []bool{true, false} {
		r.Beat(t, func(b *runbusv1.RunnerHeartbeat) { b.Draining = draining })
		s.Await(t, "draining begins or ends", func() bool { return s.Candidate(t, "edge-1").Draining == draining })
		asListed(t, s, "it began to drain, or stopped", "edge-1")
	}
	fit("it drains no more")
	other := s.Connect(t, key, "edge-2")
	other.Hello(t, func(h *runbusv1.RunnerHello) { h.Name = "edge-1" })
	s.Await(t, "another runner claims the name", func() bool { return s.Candidate(t, "edge-2").Name == "edge-1" })
	if list := asListed(t, s, "another claimed its name", "edge-1"); len(list) != 2 {
		t.Errorf("of two of the name, %+v are meant", list)
	}
	runner, _, err := s.Roster.Create(t.Context(), s.Admin, roster.Spec{Name: "edge-1", Address: "h:1"})
	rt.Must(t, err)
	if list, err := s.Registry.Named(rt.Tenant, "edge-1"); err != nil || len(list) != 1 || list[0].Ref.Runner != runner.ID {
		t.Errorf("after one was registered under the name, it means %+v, %v", list, err)
	}
	_, err = s.Roster.Revoke(t.Context(), s.Admin, "edge-1")
	rt.Must(t, err)
	rt.Must(t, s.Roster.Remove(t.Context(), s.Admin, "edge-1"))
	asListed(t, s, "that one was removed", "edge-1")
	r.Cut()
	s.Await(t, "the link is cut", func() bool { return !s.Candidate(t, "edge-1").Connected })
	asListed(t, s, "its link was cut", "edge-1")
}

// Time alone makes a heartbeat late.
func TestAnAnswerIsNotKeptWhenAHeartbeatIsLate(t *testing.T) {
	s := rt.Start(t, nil)
	s.Enrol(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	asListed(t, s, "its enrolment", "edge-1")
	s.Clock.Advance(46 * time.Second)
	s.Await(t, "the leader was asked anew", func() bool { return s.Registry.Readable() == nil })
	if list := asListed(t, s, "46 s without a heartbeat", "edge-1"); len(list) != 1 || list[0].Connected || list[0].Offline == "" {
		t.Errorf("a runner whose heartbeat is late: %+v", list)
	}
}

// The end of a key is told by its clock, not by the registry's.
func TestAnAnswerIsNotKeptWhenTheKeyEnds(t *testing.T) {
	s := rt.Start(t, func(d *registry.Deps) { d.Now = nil })
	for _, c := range []struct {
		id  string
		end func(rt.Credential) error
	}{
		{"revoked", func(c rt.Credential) error {
			_, err := s.Auth.RevokeKey(t.Context(), s.Admin, c.ID)
			return err
		}},
		{"expired", func(rt.Credential) error { s.Clock.Advance(366 * 24 * time.Hour); return nil }}, // the last: nobody is let in then
	} {
		id := c.id
		key := s.Mint(t, s.Admin, id)
		s.Enrol(t, key, id)
		asListed(t, s, "its enrolment", id)
		rt.Must(t, c.end(key))
		if list := asListed(t, s, "its key ended", id); len(list) != 1 || list[0].Offline == "" {
			t.Errorf("with a key that is %s: %+v", id, list)
		}
	}
}
