package jetstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
)

// heard is a log that tells when a text passes.
type heard struct {
	slog.Handler
	text string
	ch   chan struct{}
}

func listen(text string) *heard {
	return &heard{Handler: slog.NewTextHandler(&bytes.Buffer{}, nil), text: text, ch: make(chan struct{}, 1000)}
}

func (h *heard) WithAttrs([]slog.Attr) slog.Handler { return h }

func (h *heard) Handle(_ context.Context, r slog.Record) error {
	if r.Message == h.text {
		select {
		case h.ch <- struct{}{}:
		default:
		}
	}
	return nil
}

func (h *heard) await(t testing.TB) {
	t.Helper()
	select {
	case <-h.ch:
	case <-time.After(patience):
		t.Fatalf("never logged: %s", h.text)
	}
}

func TestViewFollows(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, nil)
	table := TableOf[value](s, Identities)
	first, err := table.Create(ctx, "first", value{"first", 1})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.js.Publish(ctx, Identities.prefix()+"broken", []byte("{")); err != nil {
		t.Fatal(err)
	}
	seen := newChanges[value](t)
	before := time.Now()
	view, err := table.Follow(ctx, seen.on)
	if err != nil {
		t.Fatal(err)
	}
	if r := <-seen.changed; r.Key != "first" || r.Revision != first {
		t.Fatalf("the initial row: %+v", r)
	}
	if rows := view.Rows(); len(rows) != 1 {
		t.Fatalf("rows: %+v", rows)
	}
	if c := view.Confirmed(); c.Before(before) || c.After(time.Now()) {
		t.Fatalf("confirmed at %v", c)
	}
	if _, err := table.Get(ctx, "broken"); err == nil || errors.Is(err, ErrNotFound) {
		t.Fatalf("get of a broken value: %v", err)
	}
	if _, err := table.List(ctx); err == nil {
		t.Fatal("a list with a broken value is no error")
	}

	next, err := table.Update(ctx, "first", value{"first", 2}, first)
	if err != nil {
		t.Fatal(err)
	}
	seen.await("the update", func(r Row[value]) bool { return r.Revision == next && r.Value.N == 2 })
	if row, ok := view.Get("first"); !ok || row.Value.N != 2 {
		t.Fatalf("the view after an update: %+v", row)
	}
	if err := table.Delete(ctx, "first", next); err != nil {
		t.Fatal(err)
	}
	seen.await("the delete", func(r Row[value]) bool { return r.Deleted && r.Key == "first" })
	if _, ok := view.Get("first"); ok {
		t.Fatal("the view has a deleted row")
	}
	if _, err := table.Create(ctx, "first", value{"again", 1}); err != nil {
		t.Fatal(err)
	}
	seen.await("the second create", func(r Row[value]) bool { return r.Value.Name == "again" })
	if _, err := s.js.Publish(ctx, Identities.prefix()+"first", []byte("[]")); err != nil {
		t.Fatal(err)
	}
	seen.await("what was broken", func(r Row[value]) bool { return r.Deleted && r.Key == "first" })
	view.Close()
	view.Close()
}

// Writers run while a view starts: in the end it has what the leader has, whatever came when.
func TestViewMissesNothing(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, func(o *Options) { o.RescanEvery = time.Hour })
	table := TableOf[value](s, Heartbeats)
	const keys, writes = 20, 60
	var writers sync.WaitGroup
	for k := range keys {
		writers.Go(func() {
			key := fmt.Sprintf("k%d", k)
			rev, err := table.Create(ctx, key, value{key, 0})
			for n := 1; n < writes && err == nil; n++ {
				if n%10 == 0 {
					if err = table.Delete(ctx, key, rev); err == nil {
						rev, err = table.Create(ctx, key, value{key, n})
					}
					continue
				}
				rev, err = table.Update(ctx, key, value{key, n}, rev)
			}
			if err != nil {
				t.Errorf("%s: %v", key, err)
			}
		})
	}
	var all []*changes[value]
	var views []*View[value]
	for range 5 {
		c := newChanges[value](t)
		v, err := table.Follow(ctx, c.on)
		if err != nil {
			t.Fatal(err)
		}
		all, views = append(all, c), append(views, v)
	}
	writers.Wait()
	for i, c := range all {
		last := map[string]Row[value]{}
		done := map[string]bool{}
		c.await("the last write of each key", func(r Row[value]) bool {
			if r.Revision < last[r.Key].Revision {
				t.Errorf("%s goes back from %d to %d", r.Key, last[r.Key].Revision, r.Revision)
			}
			last[r.Key] = r
			done[r.Key] = r.Value.N == writes-1
			n := 0
			for _, d := range done {
				if d {
					n++
				}
			}
			return n == keys
		})
		rows, err := table.List(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if got := views[i].Rows(); fmt.Sprint(got) != fmt.Sprint(rows) {
			t.Fatalf("view %d has\n%v\nthe leader\n%v", i, got, rows)
		}
	}
}

func TestViewSeesExpiry(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, func(o *Options) { o.HeartbeatTTL = 5 * time.Second })
	table := TableOf[value](s, Heartbeats)
	seen := newChanges[value](t)
	view, err := table.Follow(ctx, seen.on)
	if err != nil {
		t.Fatal(err)
	}
	var rev uint64
	for refreshed := false; !refreshed; {
		if rev, err = table.Create(ctx, "t.r", value{"alive", 1}); err != nil {
			t.Fatal(err)
		}
		// A refresh keeps the expiry: the key goes all the same, after it.
		next, err := table.Update(ctx, "t.r", value{"alive", 2}, rev)
		if refreshed = err == nil; refreshed {
			rev = next
		} else if !errors.Is(err, ErrLost) { // it may have expired before, on a machine that stood still
			t.Fatal(err)
		}
		seen.await("the expiry", func(r Row[value]) bool { return r.Key == "t.r" && r.Deleted })
	}
	if _, ok := view.Get("t.r"); ok {
		t.Fatal("the view has an expired row")
	}
	if _, err := table.Get(ctx, "t.r"); !errors.Is(err, ErrNotFound) {
		t.Fatalf("get of an expired key: %v", err)
	}
	if _, err := table.Update(ctx, "t.r", value{"zombie", 3}, rev); !errors.Is(err, ErrLost) {
		t.Fatalf("update of an expired key: %v", err)
	}
	if _, err := table.Create(ctx, "t.r", value{"back", 4}); err != nil {
		t.Fatalf("create after expiry: %v", err)
	}
	seen.await("the new one", func(r Row[value]) bool { return r.Value.Name == "back" })
}

// A watch that died without a word is replaced, and what happened meanwhile is not lost.
func TestViewOutlivesItsWatch(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, func(o *Options) { o.RescanEvery, o.ConfirmEvery = time.Hour, 20*time.Millisecond })
	table := TableOf[value](s, Known)
	seen := newChanges[value](t)
	view, err := table.Follow(ctx, seen.on)
	if err != nil {
		t.Fatal(err)
	}
	names := s.stream(Known.stream()).ConsumerNames(ctx)
	for name := range names.Name() {
		if err := s.js.DeleteConsumer(ctx, Known.stream(), name); err != nil {
			t.Fatal(err)
		}
	}
	if names.Err() != nil {
		t.Fatal(names.Err())
	}
	before := view.Confirmed()
	written := time.Now()
	if _, err := table.Create(ctx, "k", value{"unwatched", 1}); err != nil {
		t.Fatal(err)
	}
	seen.await("what no watch delivered", func(r Row[value]) bool { return r.Key == "k" })
	if view.Confirmed().Before(before) {
		t.Fatal("confirmed goes back")
	}
	if c := view.Confirmed(); c.After(written) {
		if _, ok := view.Get("k"); !ok {
			t.Fatalf("confirmed at %v without the row of %v", c, written)
		}
	}
}

// The rescan alone finds what changed, deletions too.
func TestRescan(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, func(o *Options) { o.RescanEvery, o.ConfirmEvery = time.Hour, time.Hour })
	table := TableOf[value](s, Heartbeats)
	seen := newChanges[value](t)
	v := &View[value]{onChange: seen.on, rows: map[string]viewed[value]{}}
	f := &follower{s: s, bucket: Heartbeats, log: b.Log, load: v.load, apply: func(e entry) { v.apply(e, false) }, knows: v.knows, confirm: v.confirm}
	v.follower = f
	rescan := func() {
		t.Helper()
		found, err := f.scan(ctx)
		if err != nil {
			t.Fatal(err)
		}
		f.take(found)
	}
	rev, err := table.Create(ctx, "a", value{"a", 1})
	if err != nil {
		t.Fatal(err)
	}
	rescan()
	seen.await("the create", func(r Row[value]) bool { return r.Key == "a" && !r.Deleted })
	if err := table.Delete(ctx, "a", rev); err != nil {
		t.Fatal(err)
	}
	rescan()
	seen.await("the delete", func(r Row[value]) bool { return r.Key == "a" && r.Deleted })
	v.apply(entry{key: "a", value: []byte(`{"name":"late"}`), seq: rev}, false)
	if _, ok := v.Get("a"); ok {
		t.Fatal("a late message brought a deleted row back")
	}
	if _, err := table.Create(ctx, "b", value{"b", 1}); err != nil {
		t.Fatal(err)
	}
	rescan()
	seen.await("b", func(r Row[value]) bool { return r.Key == "b" })
	// The bucket is made again and counts from 1: what the new one lacks is gone, what it has counts though it is lower.
	if err := s.js.DeleteStream(ctx, Heartbeats.stream()); err != nil {
		t.Fatal(err)
	}
	var asked error
	for asked == nil && ctx.Err() == nil { // no answer in time is none
		asked = f.ask(ctx)
	}
	if err := asked; !errors.Is(err, errRecreated) {
		t.Fatalf("ask after the bucket has gone: %v", err)
	}
	if err := s.ensureAgain(ctx, Heartbeats.stream()); err != nil {
		t.Fatal(err)
	}
	if _, err := table.Create(ctx, "a", value{"new", 1}); err != nil {
		t.Fatal(err)
	}
	rescan()
	seen.await("the end of b", func(r Row[value]) bool { return r.Key == "b" && r.Deleted })
	if row, ok := v.Get("a"); !ok || row.Value.Name != "new" || row.Revision != 1 {
		t.Fatalf("after the bucket was made again: %+v", row)
	}
}

// Between two scans the keys alone are compared: what is missing is read, what has gone without a marker goes, and what is known is
// not read again.
func TestCompare(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, func(o *Options) { o.RescanEvery, o.ConfirmEvery = time.Hour, time.Hour })
	table := TableOf[value](s, Known)
	seen := newChanges[value](t)
	view, err := table.Follow(ctx, seen.on)
	if err != nil {
		t.Fatal(err)
	}
	var revisions []uint64
	for _, key := range []string{"a", "b", "c"} {
		rev, err := table.Create(ctx, key, value{key, 1})
		if err != nil {
			t.Fatal(err)
		}
		revisions = append(revisions, rev)
		seen.await("the create of "+key, func(r Row[value]) bool { return r.Key == key })
	}
	view.Close() // from here on only the comparison tells it anything
	view.mu.Lock()
	delete(view.rows, "a") // as if the watch had lost it
	known := view.rows["b"]
	known.value.N = 7
	view.rows["b"] = known
	view.rows["gone"] = viewed[value]{revision: revisions[0], value: &value{}}
	view.rows["young"] = viewed[value]{revision: revisions[2] + 100, value: &value{}}
	view.mu.Unlock()
	found, err := view.follower.compare(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if len(found.keys) != 3 || len(found.entries) != 1 || found.entries[0].key != "a" {
		t.Fatalf("keys %v, read %d", found.keys, len(found.entries))
	}
	seen.await("what was lost", func(r Row[value]) bool { return r.Key == "a" && !r.Deleted })
	seen.await("the end of what has gone", func(r Row[value]) bool { return r.Key == "gone" && r.Deleted })
	if row, ok := view.Get("b"); !ok || row.Value.N != 7 {
		t.Fatalf("a known key was read again: %+v", row)
	}
	if _, ok := view.Get("young"); !ok {
		t.Fatal("a row that is newer than the comparison has gone")
	}
	if err := s.js.DeleteStream(ctx, Known.stream()); err != nil {
		t.Fatal(err)
	}
	if _, err := view.follower.compare(ctx); !errors.Is(err, errRecreated) {
		t.Fatalf("compare after the bucket has gone: %v", err)
	}
}

// A restart of the server empties the memory bucket and its view, keeps the file buckets, and needs nobody's help.
func TestRestart(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	nc := overTCP(t, b, embedded.UserSec)
	s := openOn(t, b, nc, func(o *Options) { o.ConfirmEvery = 50 * time.Millisecond })
	live, kept := TableOf[value](s, Heartbeats), TableOf[value](s, Identities)
	liveSeen, keptSeen := newChanges[value](t), newChanges[value](t)
	liveView, err := live.Follow(ctx, liveSeen.on)
	if err != nil {
		t.Fatal(err)
	}
	keptView, err := kept.Follow(ctx, keptSeen.on)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 10 {
		if _, err := live.Create(ctx, fmt.Sprintf("k%d", i), value{"before", i}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := kept.Create(ctx, "key", value{"kept", 1}); err != nil {
		t.Fatal(err)
	}
	liveSeen.await("the last of ten", func(r Row[value]) bool { return r.Key == "k9" })
	keptSeen.await("the key", func(r Row[value]) bool { return r.Key == "key" })

	b.Restart(t)
	gone := 0
	liveSeen.await("the end of all ten", func(r Row[value]) bool {
		if r.Deleted {
			gone++
		}
		return gone == 10
	})
	if rows := liveView.Rows(); len(rows) != 0 {
		t.Fatalf("the view after the restart: %+v", rows)
	}
	if _, err := live.Create(ctx, "k0", value{"after", 0}); err != nil {
		t.Fatal(err)
	}
	liveSeen.await("the new one", func(r Row[value]) bool { return r.Value.Name == "after" })
	if row, ok := keptView.Get("key"); !ok || row.Value.Name != "kept" {
		t.Fatalf("the file bucket's view after the restart: %+v", row)
	}
	row, err := kept.Get(ctx, "key")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kept.Update(ctx, "key", value{"kept", 2}, row.Revision); err != nil {
		t.Fatal(err)
	}
	keptSeen.await("a change after the restart", func(r Row[value]) bool { return r.Value.N == 2 })
}

// Only an answer of the leader moves Confirmed.
func TestConfirmed(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	silent := listen("following again")
	unsure := listen("the leader does not confirm")
	nc := overTCP(t, b, embedded.UserSec, nats.ReconnectBufSize(-1))
	both := slog.NewMultiHandler(silent, unsure)
	s := openOn(t, b, nc, func(o *Options) { o.ConfirmEvery, o.Log = 10*time.Millisecond, slog.New(both) })
	view, err := TableOf[value](s, Known).Follow(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	start := view.Confirmed()
	for deadline := time.Now().Add(patience); !view.Confirmed().After(start); {
		if time.Now().After(deadline) {
			t.Fatal("an idle view is never confirmed")
		}
		if err := nc.FlushWithContext(ctx); err != nil {
			t.Fatal(err)
		}
	}
	b.Shutdown()
	unsure.await(t)
	down := time.Now()
	silent.await(t)
	if c := view.Confirmed(); c.After(down) {
		t.Fatalf("confirmed at %v while the server was down since %v", c, down)
	}
}

// More bytes than a consumer has under way unacknowledged: the watch answers its flow control and isn't cut off.
func TestViewAnswersFlowControl(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	again := listen("following again")
	s := open(t, b, func(o *Options) { o.RescanEvery, o.Log = time.Hour, slog.New(again) })
	table := TableOf[value](s, Heartbeats)
	seen := newChanges[value](t)
	if _, err := table.Follow(ctx, seen.on); err != nil {
		t.Fatal(err)
	}
	large := strings.Repeat("x", 500<<10)
	for _, key := range []string{"a", "b", "c", "d"} { // a watch may also be made again because the machine stood still, but not each time
		rev, err := table.Create(ctx, key, value{large, 0})
		for n := 1; n <= 100 && err == nil; n++ {
			rev, err = table.Update(ctx, key, value{large, n}, rev)
		}
		if err != nil {
			t.Fatal(err)
		}
		seen.await("the last large value", func(r Row[value]) bool { return r.Key == key && r.Value.N == 100 })
		if len(again.ch) == 0 {
			return
		}
		for len(again.ch) > 0 {
			<-again.ch
		}
	}
	t.Fatal("the watch had to be made again")
}
