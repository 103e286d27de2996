package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/internal/natsdial"
)

func TestMain(m *testing.M) { leak.Main(m) }

type value struct {
	Name string `json:"name"`
	N    int    `json:"n"`
}

// open opens a fresh store, until the test ends.
func open(t testing.TB, b *bustest.Bus, change func(*Options)) *Store {
	t.Helper()
	return openOn(t, b, b.Conn(t, embedded.UserSec), change)
}

func openOn(t testing.TB, b *bustest.Bus, nc *nats.Conn, change func(*Options)) *Store {
	t.Helper()
	o := Options{Fresh: true, Log: b.Log, HeartbeatTTL: time.Hour} // no key expires but where a test is about that
	if change != nil {
		change(&o)
	}
	s, err := Open(ctxOf(t), nc, o)
	if err != nil {
		t.Fatalf("open the store: %v", err)
	}
	t.Cleanup(s.Close)
	return s
}

// patience bounds every wait of a test: it is only used up by one that fails.
const patience = 3 * time.Minute

// ctxOf bounds a step that must not hang.
func ctxOf(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// overTCP is a connection of a configured user that survives a restart of the server.
func overTCP(t testing.TB, b *bustest.Bus, u embedded.User, o ...nats.Option) *nats.Conn {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(b.Dir, "keys.json"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Seeds map[string]string `json:"seeds"`
	}
	if err := json.Unmarshal(raw, &file); err != nil {
		t.Fatal(err)
	}
	key, err := nkeys.FromSeed([]byte(file.Seeds[string(u)]))
	if err != nil {
		t.Fatal(err)
	}
	public, err := key.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	nc, err := natsdial.Connect(patience, b.URL(), append([]nats.Option{
		nats.RootCAs(b.CAFile), nats.Nkey(public, key.Sign), nats.MaxReconnects(-1), nats.ReconnectWait(20 * time.Millisecond),
		nats.IgnoreDiscoveredServers(), nats.IgnoreAuthErrorAbort(), nats.Timeout(patience),
	}, o...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// changes collects what a view reports, and fails the test if it ever does so twice at once.
type changes[T any] struct {
	t       testing.TB
	inside  atomic.Int32
	changed chan Row[T]
}

func newChanges[T any](t testing.TB) *changes[T] {
	return &changes[T]{t: t, changed: make(chan Row[T], 10_000)}
}

func (c *changes[T]) on(r Row[T]) {
	if c.inside.Add(1) != 1 {
		c.t.Error("onChange is called concurrently")
	}
	c.changed <- r
	c.inside.Add(-1)
}

// await returns the first change that is wanted.
func (c *changes[T]) await(what string, wanted func(Row[T]) bool) Row[T] {
	c.t.Helper()
	late := time.After(patience)
	for {
		select {
		case r := <-c.changed:
			if wanted(r) {
				return r
			}
		case <-late:
			c.t.Fatalf("no change came: %s", what)
		}
	}
}

func TestTable(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, nil)
	for _, bucket := range []Bucket{Identities, Heartbeats} {
		t.Run(string(bucket), func(t *testing.T) {
			table := TableOf[value](s, bucket)
			if _, err := table.Get(ctx, "a.b"); !errors.Is(err, ErrNotFound) {
				t.Fatalf("get of nothing: %v", err)
			}
			rev, err := table.Create(ctx, "a.b", value{"x", 1})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := table.Create(ctx, "a.b", value{"y", 1}); !errors.Is(err, ErrLost) {
				t.Fatalf("create over a value: %v", err)
			}
			row, err := table.Get(ctx, "a.b")
			if err != nil || row.Value != (value{"x", 1}) || row.Revision != rev {
				t.Fatalf("get: %+v, %v", row, err)
			}
			next, err := table.Update(ctx, "a.b", value{"x", 2}, rev)
			if err != nil || next <= rev {
				t.Fatalf("update: %d, %v", next, err)
			}
			if _, err := table.Update(ctx, "a.b", value{"x", 3}, rev); !errors.Is(err, ErrLost) {
				t.Fatalf("update at an old revision: %v", err)
			}
			if err := table.Delete(ctx, "a.b", rev); !errors.Is(err, ErrLost) {
				t.Fatalf("delete at an old revision: %v", err)
			}
			if err := table.Delete(ctx, "a.b", next); err != nil {
				t.Fatal(err)
			}
			if _, err := table.Get(ctx, "a.b"); !errors.Is(err, ErrNotFound) {
				t.Fatalf("get of a deleted key: %v", err)
			}
			if rows, err := table.List(ctx); err != nil || len(rows) != 0 {
				t.Fatalf("list after the delete: %v, %v", rows, err)
			}
			if _, err := table.Update(ctx, "a.b", value{"x", 4}, next); !errors.Is(err, ErrLost) {
				t.Fatalf("update of a deleted key: %v", err)
			}
			if _, err := table.Create(ctx, "a.b", value{"z", 1}); err != nil {
				t.Fatalf("create after delete: %v", err)
			}
			if _, err := table.Create(ctx, "a.a", value{"w", 1}); err != nil {
				t.Fatal(err)
			}
			rows, err := table.List(ctx)
			if err != nil || len(rows) != 2 || rows[0].Value.Name != "w" || rows[1].Value.Name != "z" {
				t.Fatalf("list: %+v, %v", rows, err)
			}
			for _, bad := range []string{"", ".a", "a.", "a..b", "*", ">", "a b", "ä", "a\n"} {
				if _, err := table.Create(ctx, bad, value{}); err == nil {
					t.Errorf("key %q is accepted", bad)
				}
			}
		})
	}
}

// Twenty writers, many rounds: each round has one winner, by every kind of write.
func TestOneWinner(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, nil)
	table := TableOf[value](s, Heartbeats)
	const writers, rounds = 20, 25
	race := func(write func(i int) error) (winners int) {
		var won atomic.Int32
		var all sync.WaitGroup
		for i := range writers {
			all.Go(func() {
				switch err := write(i); {
				case err == nil:
					won.Add(1)
				case !errors.Is(err, ErrLost):
					t.Errorf("writer %d: %v", i, err)
				}
			})
		}
		all.Wait()
		return int(won.Load())
	}
	for round := range rounds {
		if n := race(func(i int) error {
			_, err := table.Create(ctx, "k", value{strconv.Itoa(i), round})
			return err
		}); n != 1 {
			t.Fatalf("round %d: %d creators won", round, n)
		}
		row, err := table.Get(ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		if n := race(func(i int) error {
			_, err := table.Update(ctx, "k", value{strconv.Itoa(i), round}, row.Revision)
			return err
		}); n != 1 {
			t.Fatalf("round %d: %d updaters won", round, n)
		}
		if row, err = table.Get(ctx, "k"); err != nil {
			t.Fatal(err)
		}
		// Deleters against updaters, at one revision.
		if n := race(func(i int) error {
			if i%2 == 0 {
				return table.Delete(ctx, "k", row.Revision)
			}
			_, err := table.Update(ctx, "k", value{strconv.Itoa(i), -round}, row.Revision)
			return err
		}); n != 1 {
			t.Fatalf("round %d: %d deleters and updaters won", round, n)
		}
		if row, err := table.Get(ctx, "k"); err == nil {
			if err := table.Delete(ctx, "k", row.Revision); err != nil {
				t.Fatal(err)
			}
		} else if !errors.Is(err, ErrNotFound) {
			t.Fatal(err)
		}
	}
}

func TestSecurityBucketsAreMadeOnceOnly(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	nc := b.Conn(t, embedded.UserSec)
	if _, err := Open(ctx, nc, Options{Log: b.Log}); !errors.Is(err, ErrMissing) {
		t.Fatalf("open of an old folder without its buckets: %v", err)
	}
	s := openOn(t, b, nc, nil)
	if err := s.Check(ctx); err != nil {
		t.Fatalf("check: %v", err)
	}
	again := openOn(t, b, nc, func(o *Options) { o.Fresh = false })
	view, err := TableOf[value](again, Identities).Follow(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := TableOf[value](s, Identities).Create(ctx, "key", value{"kept", 1}); err != nil {
		t.Fatal(err)
	}
	if err := s.js.DeleteStream(ctx, Identities.stream()); err != nil {
		t.Fatal(err)
	}
	if err := s.Check(ctx); !errors.Is(err, ErrMissing) {
		t.Fatalf("check without a security bucket: %v", err)
	}
	again.inspect(ctx)
	if _, err := s.js.Stream(ctx, Identities.stream()); !errors.Is(err, natsjs.ErrStreamNotFound) {
		t.Fatalf("the keeper made an empty security bucket: %v", err)
	}
	if _, err := Open(ctx, nc, Options{Log: b.Log}); !errors.Is(err, ErrMissing) {
		t.Fatalf("open without a security bucket: %v", err)
	}
	if _, err := TableOf[value](s, Identities).Create(ctx, "key", value{}); !errors.Is(err, ErrUnavailable) {
		t.Fatalf("write to a missing bucket: %v", err)
	}
	view.Close()
}

// A data folder of an earlier format gets the security buckets that came after it, once; what it must have had is an alarm.
func TestEarlierFormat(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	nc := b.Conn(t, embedded.UserSec)
	s := open(t, b, nil)
	if err := s.js.DeleteStream(ctx, Roster.stream()); err != nil { // as it was in format 1
		t.Fatal(err)
	}
	if _, err := Open(ctx, nc, Options{Log: b.Log}); !errors.Is(err, ErrMissing) {
		t.Fatalf("the present format without the registry: %v", err)
	}
	old := open(t, b, func(o *Options) { o.Fresh, o.Format = false, 1 })
	if _, err := TableOf[value](old, Roster).Create(ctx, "key", value{}); err != nil {
		t.Fatalf("the registry of a folder of format 1: %v", err)
	}
	open(t, b, func(o *Options) { o.Fresh = false })
	if err := s.js.DeleteStream(ctx, Known.stream()); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(ctx, nc, Options{Format: 1, Log: b.Log}); !errors.Is(err, ErrMissing) {
		t.Fatalf("format 1 without what it had: %v", err)
	}
}

func TestDrift(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, nil)
	name := Identities.stream()
	have := s.defs[name].config
	have.AllowDirect = true
	have.RePublish = &natsjs.RePublish{Source: ">", Destination: "elsewhere.>"}
	if _, err := s.js.UpdateStream(ctx, have); err != nil {
		t.Fatal(err)
	}
	fixed := open(t, b, func(o *Options) { o.Fresh = false })
	st, err := fixed.js.Stream(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	if c := st.CachedInfo().Config; c.AllowDirect || c.RePublish != nil {
		t.Fatalf("what could be corrected was not: %+v", c)
	}
	if err := s.js.DeleteStream(ctx, name); err != nil {
		t.Fatal(err)
	}
	wrong := s.defs[name].config
	wrong.Storage = natsjs.MemoryStorage
	if _, err := s.js.CreateStream(ctx, wrong); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(ctx, b.Conn(t, embedded.UserSec), Options{Fresh: true, Log: b.Log}); !errors.Is(err, ErrDrift) {
		t.Fatalf("open over a bucket in memory: %v", err)
	}
}

// The audit stream can't be rewritten over the API, and none of ours can lose a message by it.
func TestHistoryStands(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, nil)
	seq, err := s.AppendAudit(ctx, []byte("one"), "", 0)
	if err != nil || seq != 1 {
		t.Fatalf("append: %d, %v", seq, err)
	}
	if _, err := s.AppendAudit(ctx, []byte("other"), "", 0); !errors.Is(err, ErrLost) {
		t.Fatalf("append behind an old end: %v", err)
	}
	if seq, err := s.AppendAudit(ctx, []byte("one"), "", 0); err != nil || seq != 1 {
		t.Fatalf("the same append again: %d, %v", seq, err)
	}
	if _, err := s.AppendAudit(ctx, []byte("ahead"), "", 7); !errors.Is(err, ErrLost) {
		t.Fatalf("append behind nothing: %v", err)
	}
	if seq, err := s.AppendAudit(ctx, []byte("two"), "", 1); err != nil || seq != 2 {
		t.Fatalf("append: %d, %v", seq, err)
	}
	st := s.stream(auditStream)
	if err := st.Purge(ctx); err == nil {
		t.Error("the audit stream can be purged")
	}
	if err := st.SecureDeleteMsg(ctx, 1); err == nil {
		t.Error("an audit message can be deleted")
	}
	rollup := nats.NewMsg(auditSubject)
	rollup.Header.Set(natsjs.MsgRollup, natsjs.MsgRollupSubject)
	if _, err := s.js.PublishMsg(ctx, rollup); err == nil {
		t.Error("the audit stream can be rolled up")
	}
	var bodies []string
	if err := s.ReadAudit(ctx, 0, func(seq uint64, body []byte) error {
		bodies = append(bodies, fmt.Sprintf("%d:%s", seq, body))
		return nil
	}); err != nil || fmt.Sprint(bodies) != "[1:one 2:two]" {
		t.Fatalf("read: %v, %v", bodies, err)
	}
	if seq, body, err := s.LastAudit(ctx); err != nil || seq != 2 || string(body) != "two" {
		t.Fatalf("last: %d, %s, %v", seq, body, err)
	}
	if err := s.stream(Identities.stream()).DeleteMsg(ctx, 1); err == nil {
		t.Error("a message of a bucket can be deleted")
	}
}

// A write whose acknowledgement is lost is established by what stands at the leader.
func TestEstablish(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := open(t, b, nil)
	table := TableOf[value](s, Known)
	rev, err := table.Create(ctx, "k", value{"x", 1})
	if err != nil {
		t.Fatal(err)
	}
	read := func(ctx context.Context) (*natsjs.RawStreamMsg, error) {
		m, err := s.stream(Known.stream()).GetLastMsgForSubject(ctx, Known.prefix()+"k")
		if err != nil {
			return nil, readError("read", err)
		}
		return m, nil
	}
	standing, err := read(ctx)
	if err != nil {
		t.Fatal(err)
	}
	id := standing.Header.Get(headerWrite)
	establish := func(w write, id string) (seq uint64, err error) {
		for seq, err = s.establish(ctx, w, id); errors.Is(err, errUnread) && ctx.Err() == nil; { // a machine that stood still asks again
			seq, err = s.establish(ctx, w, id)
		}
		return seq, err
	}
	if seq, err := establish(write{standing: read}, id); err != nil || seq != rev {
		t.Fatalf("mine: %d, %v", seq, err)
	}
	if _, err := establish(write{standing: read}, "another"); !errors.Is(err, ErrLost) {
		t.Fatalf("not mine: %v", err)
	}
	if _, err := establish(write{standing: read, expected: rev}, "another"); !errors.Is(err, errNotYet) {
		t.Fatalf("not there yet: %v", err)
	}
	gone, cancel := context.WithCancel(ctx)
	cancel()
	unreadable := func(context.Context) (*natsjs.RawStreamMsg, error) { return nil, ErrUnavailable }
	if _, err := s.establish(gone, write{standing: unreadable}, id); !errors.Is(err, ErrUnknown) {
		t.Fatalf("unreadable: %v", err)
	}
}

func FuzzDecodeRow(f *testing.F) {
	f.Add([]byte(`{"name":"x","n":1}`), "", "")
	f.Add([]byte(`null`), "DEL", "")
	f.Add([]byte(`{"n":"x"}`), "PURGE", "MaxAge")
	f.Add([]byte(nil), "", "MaxAge")
	f.Fuzz(func(t *testing.T, body []byte, op, marker string) {
		h := nats.Header{headerOperation: {op}, headerMarker: {marker}}
		e := Known.entry(Known.prefix()+"k", h, body, 7)
		if e.key != "k" || e.deleted != (op == operationDelete || op == operationPurge || marker != "") {
			t.Fatalf("entry: %+v", e)
		}
		row, err := decodeRow[value](e)
		if err == nil && !json.Valid(body) {
			t.Fatalf("decoded %q", body)
		}
		if err == nil && (row.Key != "k" || row.Revision != 7 || row.Deleted) {
			t.Fatalf("row: %+v", row)
		}
	})
}
