package registry_test

import (
	"bytes"
	"context"
	"errors"
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/registry"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
)

// The record that each heartbeat writes, and operators see, has no sealing key; the key of the session is had all the same, and that of
// another session is not.
func TestSealingKeyIsApart(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Enrol(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	row, err := jetstream.TableOf[registry.Record](s.Store, jetstream.Heartbeats).Get(t.Context(), schemas.RunnerKey(r.Ref))
	rt.Must(t, err)
	if row.Value.Session != r.Session || len(row.Value.SealingKey) > 0 {
		t.Errorf("record = %+v", row.Value)
	}
	for range 2 { // the second time from memory
		key, err := s.Registry.SealingKey(t.Context(), r.Ref, r.Session)
		if err != nil || !bytes.Equal(key, r.Key.Public()) {
			t.Errorf("key = %x, %v", key, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Registry.SealingKey(ctx, r.Ref, schemas.NewID()); schemas.CodeOf(err) != schemas.CodeUnavailable {
		t.Errorf("the key of a session that is none: %v", err)
	}
}

// had is what SealingKey returned.
type had struct {
	key []byte
	err error
}

// lose takes the key of r out of the store, and has it looked for, as askFor does.
func lose(t *testing.T, s *rt.Stack, r *rt.Runner) <-chan had {
	t.Helper()
	js, err := natsjs.New(s.Conn(t, embedded.UserSec))
	rt.Must(t, err)
	bucket, err := js.KeyValue(t.Context(), string(jetstream.SealingKeys))
	rt.Must(t, err)
	rt.Must(t, bucket.Purge(t.Context(), schemas.RunnerKey(r.Ref)))
	return askFor(t, s, r)
}

// askFor has the key of r, which is missing, looked for until r is asked for it.
func askFor(t *testing.T, s *rt.Stack, r *rt.Runner) <-chan had {
	t.Helper()
	got, session := make(chan had, 1), r.Session
	go func() {
		key, err := s.Registry.SealingKey(t.Context(), r.Ref, session)
		got <- had{key, err}
	}()
	if order := r.Order(t); order.GetRehello() == nil {
		t.Fatalf("got %v", order)
	}
	return got
}

// A key that is gone is had from its runner, which says hello once more and keeps its session.
func TestSealingKeyIsAskedFor(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Enrol(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	was := r.Session
	got := lose(t, s, r)
	if a := r.Hello(t, nil); a.GetSession() != was {
		t.Fatalf("the same process got another session: %v", a)
	}
	if h := rt.Wait(t, "the key", got); h.err != nil || !bytes.Equal(h.key, r.Key.Public()) {
		t.Errorf("key = %x, %v", h.key, h.err)
	}
}

// A hello whose key can't be stored enrols all the same: the key is asked for when it is needed, and stored then.
func TestHelloWithoutRoomForTheKey(t *testing.T) {
	s := rt.Start(t, nil)
	js, err := natsjs.New(s.Conn(t, embedded.UserSec))
	rt.Must(t, err)
	stream, err := js.Stream(t.Context(), "KV_"+string(jetstream.SealingKeys))
	rt.Must(t, err)
	config := stream.CachedInfo().Config
	refusing := config
	refusing.MaxMsgSize = 1
	_, err = js.UpdateStream(t.Context(), refusing)
	rt.Must(t, err)
	r := s.Enrol(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	was := r.Session
	_, err = js.UpdateStream(t.Context(), config)
	rt.Must(t, err)
	got := askFor(t, s, r)
	if a := r.Hello(t, nil); a.GetSession() != was {
		t.Fatalf("the same process got another session: %v", a)
	}
	if h := rt.Wait(t, "the key", got); h.err != nil || !bytes.Equal(h.key, r.Key.Public()) {
		t.Errorf("key = %x, %v", h.key, h.err)
	}
}

// Nobody waits for the key of a session that is over: its process took leave, or another has the id.
func TestSealingKeyOfASessionThatEnds(t *testing.T) {
	s := rt.Start(t, nil)
	cred := s.Mint(t, s.Admin, "edge")
	r := s.Enrol(t, cred, "edge-1")
	got := lose(t, s, r)
	r.Goodbye(t, "update")
	if h := rt.Wait(t, "the end of the wait", got); schemas.CodeOf(h.err) != schemas.CodeUnavailable {
		t.Errorf("after a goodbye: %x, %v", h.key, h.err)
	}
	r = s.Enrol(t, cred, "edge-1")
	got = lose(t, s, r)
	s.Enrol(t, cred, "edge-1")
	if h := rt.Wait(t, "the end of the wait", got); schemas.CodeOf(h.err) != schemas.CodeUnavailable {
		t.Errorf("after another process: %x, %v", h.key, h.err)
	}
}

// A record of the last version holds the key itself.
func TestSealingKeyOfAnOlderRecord(t *testing.T) {
	s := rt.Start(t, nil)
	r := s.Enrol(t, s.Mint(t, s.Admin, "edge"), "edge-1")
	table := jetstream.TableOf[registry.Record](s.Store, jetstream.Heartbeats)
	for {
		row, err := table.Get(t.Context(), schemas.RunnerKey(r.Ref))
		rt.Must(t, err)
		row.Value.Session, row.Value.SealingKey = schemas.NewID(), []byte("older")
		_, err = table.Update(t.Context(), row.Key, row.Value, row.Revision)
		if err == nil {
			s.Await(t, "the record is seen", func() bool { return s.Candidate(t, "edge-1").Session == row.Value.Session })
			if key, err := s.Registry.SealingKey(t.Context(), r.Ref, row.Value.Session); err != nil || string(key) != "older" {
				t.Errorf("key = %q, %v", key, err)
			}
			return
		}
		if !errors.Is(err, jetstream.ErrLost) {
			t.Fatal(err)
		}
	}
}
