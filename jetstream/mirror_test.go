package jetstream

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
)

// awaitKV waits for one update of a watched bucket, as the stock client tells it.
func awaitKV(t testing.TB, w natsjs.KeyWatcher, what string, wanted func(natsjs.KeyValueEntry) bool) {
	t.Helper()
	late := time.After(patience)
	for {
		select {
		case e, ok := <-w.Updates():
			if !ok {
				t.Fatalf("the watch ended before %s", what)
			}
			if e != nil && wanted(e) {
				return
			}
		case <-late:
			t.Fatalf("ops never saw %s", what)
		}
	}
}

// awaitMirror waits for an entry of the mirror of heartbeats, which may be made again meanwhile.
func awaitMirror(t testing.TB, ops natsjs.JetStream, what string, wanted func(natsjs.KeyValueEntry) bool) {
	t.Helper()
	for ctx := ctxOf(t); ctx.Err() == nil; {
		kv, err := ops.KeyValue(ctx, string(Heartbeats))
		if err != nil {
			continue
		}
		w, err := kv.WatchAll(ctx)
		if err != nil {
			continue
		}
		for current, again := true, time.After(5*time.Second); current; {
			select {
			case e, ok := <-w.Updates():
				if current = ok; e != nil && wanted(e) {
					_ = w.Stop()
					return
				}
			case <-again: // a watch is not told that its stream is another one
				current = false
			}
		}
		_ = w.Stop()
	}
	t.Fatalf("ops never saw %s", what)
}

func watchMirror(t testing.TB, ops natsjs.JetStream) natsjs.KeyWatcher {
	t.Helper()
	ctx := ctxOf(t)
	kv, err := ops.KeyValue(ctx, string(Heartbeats))
	if err != nil {
		t.Fatalf("ops opens the bucket: %v", err)
	}
	w, err := kv.WatchAll(ctx)
	if err != nil {
		t.Fatalf("ops watches the bucket: %v", err)
	}
	t.Cleanup(func() { _ = w.Stop() })
	return w
}

// Operators see heartbeats expire with the stock client in their own account.
func TestMirrorsSeeExpiry(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, func(o *Options) { o.HeartbeatTTL = 5 * time.Second })
	if err := s.OpenMirrors(ctx, b.Conn(t, embedded.UserMirror)); err != nil {
		t.Fatal(err)
	}
	ops, err := natsjs.New(b.OpsConn(t))
	if err != nil {
		t.Fatal(err)
	}
	w := watchMirror(t, ops)
	table := TableOf[value](s, Heartbeats)
	for lived := false; !lived; { // a watch on a machine that stood still tells only that a key has gone
		rev, err := table.Create(ctx, "t.r", value{"alive", 1})
		if err != nil {
			t.Fatal(err)
		}
		awaitKV(t, w, "the key, and its expiry", func(e natsjs.KeyValueEntry) bool {
			put := e.Operation() == natsjs.KeyValuePut
			lived = lived || put && e.Revision() == rev
			return !put && e.Revision() > rev
		})
	}
	kv, err := ops.KeyValue(ctx, string(Heartbeats))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Get(ctx, "t.r"); err == nil {
		t.Fatal("ops reads an expired key")
	}
}

// Operators see heartbeats come and change, and the audit, with the stock client in their own account.
func TestMirrors(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, nil)
	if _, err := s.AppendAudit(ctx, []byte("one"), "", 0); err != nil {
		t.Fatal(err)
	}
	if err := s.OpenMirrors(ctx, b.Conn(t, embedded.UserMirror)); err != nil {
		t.Fatal(err)
	}
	if err := s.OpenMirrors(ctx, b.Conn(t, embedded.UserMirror)); err != nil {
		t.Fatalf("a second time: %v", err)
	}
	ops, err := natsjs.New(b.OpsConn(t))
	if err != nil {
		t.Fatal(err)
	}
	w := watchMirror(t, ops)
	table := TableOf[value](s, Heartbeats)
	rev, err := table.Create(ctx, "t.r", value{"alive", 1})
	if err != nil {
		t.Fatal(err)
	}
	awaitKV(t, w, "the key", func(e natsjs.KeyValueEntry) bool {
		return e.Key() == "t.r" && e.Operation() == natsjs.KeyValuePut && e.Revision() == rev
	})
	kv, err := ops.KeyValue(ctx, string(Heartbeats))
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if _, err := kv.Put(short, "t.r", nil); err == nil {
		t.Fatal("ops wrote a bucket")
	}
	st, err := ops.Stream(ctx, auditStream)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.AppendAudit(ctx, []byte("two"), "", 1); err != nil {
		t.Fatal(err)
	}
	consumer, err := ops.OrderedConsumer(ctx, auditStream, natsjs.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"one", "two"} {
		m, err := consumer.Next(natsjs.FetchMaxWait(patience))
		if err != nil || string(m.Data()) != want {
			t.Fatalf("the audit's mirror: %v, %v", m, err)
		}
	}
	short, cancel = context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := st.Purge(short); err == nil {
		t.Fatal("ops purged the audit's mirror")
	}
	// More than may be under way unacknowledged: flow control comes through from one account to the other.
	rev, err = table.Create(ctx, "t.busy", value{"busy", 0})
	for n := 1; n < 3*mirrorPending && err == nil; n++ {
		rev, err = table.Update(ctx, "t.busy", value{"busy", n}, rev)
	}
	if err != nil {
		t.Fatal(err)
	}
	awaitKV(t, w, "the last of many writes", func(e natsjs.KeyValueEntry) bool { return e.Revision() == rev })
}

// A mirror that can't be right any more is made again: its source restarted, whether it counts below or above the mirror.
func TestMirrorIsMadeAgain(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, nil)
	if err := s.OpenMirrors(ctx, b.Conn(t, embedded.UserMirror)); err != nil {
		t.Fatal(err)
	}
	ops, err := natsjs.New(b.OpsConn(t))
	if err != nil {
		t.Fatal(err)
	}
	table := TableOf[value](s, Heartbeats)
	for _, key := range []string{"a", "b", "c"} {
		if _, err := table.Create(ctx, key, value{key, 1}); err != nil {
			t.Fatal(err)
		}
		awaitMirror(t, ops, key, func(e natsjs.KeyValueEntry) bool { return e.Key() == key })
	}
	for _, writes := range []int{1, 10} { // below, then above what the mirror has
		if err := s.js.DeleteStream(ctx, Heartbeats.stream()); err != nil {
			t.Fatal(err)
		}
		if err := s.ensureAgain(ctx, Heartbeats.stream()); err != nil {
			t.Fatal(err)
		}
		rev, err := table.Create(ctx, "x", value{"x", 0})
		for n := 1; n < writes && err == nil; n++ {
			rev, err = table.Update(ctx, "x", value{"x", n}, rev)
		}
		if err != nil {
			t.Fatal(err)
		}
		s.inspect(ctx)
		awaitMirror(t, ops, "the new source", func(e natsjs.KeyValueEntry) bool { return e.Key() == "x" && e.Revision() == rev })
		kv, err := ops.KeyValue(ctx, string(Heartbeats))
		if err != nil {
			t.Fatal(err)
		}
		keys, err := kv.Keys(ctx)
		if err != nil || len(keys) != 1 {
			t.Fatalf("keys in the mirror: %v, %v", keys, err)
		}
	}
	// One whose consumer was taken away from under it.
	if err := s.js.DeleteConsumer(ctx, Heartbeats.stream(), mirrorConsumer); err != nil {
		t.Fatal(err)
	}
	s.inspect(ctx)
	if _, err := table.Create(ctx, "y", value{"y", 1}); err != nil {
		t.Fatal(err)
	}
	awaitMirror(t, ops, "a key after the consumer was made again", func(e natsjs.KeyValueEntry) bool { return e.Key() == "y" })
}

// After a restart of the server both mirrors are right again by themselves.
func TestMirrorsAfterRestart(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := openOn(t, b, overTCP(t, b, embedded.UserSec), nil)
	if err := s.OpenMirrors(ctx, overTCP(t, b, embedded.UserMirror)); err != nil {
		t.Fatal(err)
	}
	table := TableOf[value](s, Heartbeats)
	seen := newChanges[value](t)
	if _, err := table.Follow(ctx, seen.on); err != nil {
		t.Fatal(err)
	}
	if _, err := table.Create(ctx, "a", value{"before", 1}); err != nil {
		t.Fatal(err)
	}
	seen.await("a", func(r Row[value]) bool { return r.Key == "a" })
	b.Restart(t)
	seen.await("the end of a", func(r Row[value]) bool { return r.Deleted })
	if _, err := table.Create(ctx, "b", value{"after", 1}); err != nil {
		t.Fatal(err)
	}
	s.inspect(ctx)
	ops, err := natsjs.New(b.OpsConn(t))
	if err != nil {
		t.Fatal(err)
	}
	awaitMirror(t, ops, "b", func(e natsjs.KeyValueEntry) bool { return e.Key() == "b" })
}

// What a mirror had not written when the power failed comes again.
func TestMirrorGetsAgainWhatItLost(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := openOn(t, b, overTCP(t, b, embedded.UserSec), nil)
	if err := s.OpenMirrors(ctx, overTCP(t, b, embedded.UserMirror)); err != nil {
		t.Fatal(err)
	}
	has := func(want uint64) {
		t.Helper()
		ops, err := natsjs.New(b.OpsConn(t))
		if err != nil {
			t.Fatal(err)
		}
		for seq := uint64(1); seq <= want; { // it may be made again at any time, and then fills up anew
			if ctx.Err() != nil {
				t.Fatalf("the mirror has not got %d: %v", seq, err)
			}
			var mirror natsjs.Stream
			if mirror, err = ops.Stream(ctx, auditStream); err != nil {
				continue
			}
			var m *natsjs.RawStreamMsg
			if m, err = mirror.GetMsg(ctx, seq); err != nil {
				seq = 1
				continue
			}
			if string(m.Data) != strconv.FormatUint(seq, 10) {
				t.Fatalf("message %d of the mirror is %q", seq, m.Data)
			}
			seq++
		}
	}
	for seq := range uint64(3) {
		if _, err := s.AppendAudit(ctx, []byte(strconv.FormatUint(seq+1, 10)), "", seq); err != nil {
			t.Fatal(err)
		}
	}
	has(3)
	blocks, err := filepath.Glob(filepath.Join(b.Dir, "store", "jetstream", "OPS", "streams", auditStream, "msgs", "*.blk"))
	if err != nil || len(blocks) == 0 {
		t.Fatalf("the mirror has no blocks: %v", err)
	}
	for _, block := range blocks {
		if err := os.Remove(block); err != nil {
			t.Fatal(err)
		}
	}
	b.Restart(t)
	s.inspect(ctx)
	if _, err := s.AppendAudit(ctx, []byte("4"), "", 3); err != nil {
		t.Fatal(err)
	}
	has(4)
}
