package audit

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

func TestMain(m *testing.M) { leak.Main(m) }

const subject = "runbus.audit"

func ctxOf(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func openStore(t testing.TB, b *bustest.Bus, nc *nats.Conn) *jetstream.Store {
	t.Helper()
	s, err := jetstream.Open(ctxOf(t), nc, jetstream.Options{Fresh: true, Log: b.Log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// run runs a log until the test ends, or until the returned function is called.
func run(t testing.TB, l *Log) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := l.Run(ctx); err != nil {
			t.Errorf("run: %v", err)
		}
	}()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return stop
}

func newLog(t testing.TB, b *bustest.Bus, s *jetstream.Store, writer string) *Log {
	t.Helper()
	l, err := New(ctxOf(t), s, writer, b.Log)
	if err != nil {
		t.Fatal(err)
	}
	l.flushIn = 3 * time.Minute // on whatever machine
	return l
}

// record records an event and returns it. One that is refused because a machine stood still for as long as Record waits, or because other
// writers were first for so long, may stand in the log or not: the next one is another.
func record(ctx context.Context, t *testing.T, l *Log, subject string) *runbusv1.AuditEvent {
	const mostAgain = 3
	for again := 0; ; again++ {
		e := event("acme", subject)
		err := l.Record(ctx, e)
		if err == nil {
			return e
		}
		if again == mostAgain || schemas.CodeOf(err) != schemas.CodeUnavailable {
			t.Errorf("record %s: %v", subject, err)
			return e
		}
		t.Logf("record %s again: %v", subject, err)
	}
}

func event(tenant, what string) *runbusv1.AuditEvent {
	e := Event("person:ada", "key.mint", what, "ok", "why", "<test & more>")
	e.Tenant = tenant
	return e
}

// ids counts how often each event stands in the stream.
func ids(t testing.TB, s *jetstream.Store) map[string]int {
	t.Helper()
	found := map[string]int{}
	if err := s.ReadAudit(ctxOf(t), 1, func(_ uint64, body []byte) error {
		batch, err := decodeBatch(body)
		if err != nil {
			return err
		}
		for _, e := range batch.GetEvents() {
			found[e.GetId()]++
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return found
}

func TestGroupCommit(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := openStore(t, b, b.Conn(t, embedded.UserSec))
	l := newLog(t, b, s, "one")
	run(t, l)
	const n = 1000
	var all sync.WaitGroup
	events := make([]*runbusv1.AuditEvent, n)
	for i := range events {
		all.Go(func() {
			events[i] = record(ctx, t, l, fmt.Sprintf("key:%d", i))
		})
	}
	all.Wait()
	found := ids(t, s)
	for i, e := range events {
		if found[e.GetId()] != 1 {
			t.Fatalf("event %d is there %d times", i, found[e.GetId()])
		}
		if e.GetAt() == nil {
			t.Fatalf("event %d has no time", i)
		}
	}
	batches, err := l.Verify(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d events in %d batches", n, batches)
	if batches > n/5 {
		t.Fatalf("%d events took %d batches: no group commit", n, batches)
	}
}

func TestTwoWritersOneChain(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := openStore(t, b, b.Conn(t, embedded.UserSec))
	logs := []*Log{newLog(t, b, s, "one"), newLog(t, b, s, "two"), newLog(t, b, s, "three")}
	var all sync.WaitGroup
	recorded := make(chan string, len(logs)*4*25)
	for _, l := range logs {
		run(t, l)
		for g := range 4 {
			all.Go(func() {
				for i := range 25 {
					recorded <- record(ctx, t, l, fmt.Sprintf("%s-%d-%d", l.writer, g, i)).GetId()
				}
			})
		}
	}
	all.Wait()
	close(recorded)
	found := ids(t, s)
	for id := range recorded {
		if found[id] != 1 {
			t.Fatalf("event %s, which was recorded, is there %d times", id, found[id])
		}
	}
	for id, n := range found {
		if n != 1 {
			t.Fatalf("event %s is there %d times", id, n)
		}
	}
	for _, l := range logs {
		if _, err := l.Verify(ctx); err != nil {
			t.Fatalf("%s: %v", l.writer, err)
		}
	}
}

// An event is found by its id and time however many came after it, and one that is not there is not, without reading all.
func TestAnEventIsFoundAgain(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := openStore(t, b, b.Conn(t, embedded.UserSec))
	l := newLog(t, b, s, "one")
	run(t, l)
	has := func(id string, at time.Time, want bool) {
		t.Helper()
		if got, err := l.Has(ctx, id, at); err != nil || got != want {
			t.Errorf("the log has %s: %v, %v", id, got, err)
		}
	}
	has(schemas.NewULID(time.Now()), time.Now(), false)
	first := event("acme", "key:first")
	if err := l.Record(ctx, first); err != nil {
		t.Fatal(err)
	}
	for i := range listWindow + 5 { // each a batch of its own
		if err := l.Record(ctx, event("other", fmt.Sprintf("key:%d", i))); err != nil {
			t.Fatal(err)
		}
	}
	has(first.GetId(), first.GetAt().AsTime(), true)
	has(schemas.NewULID(time.Now()), time.Now(), false)
	has(first.GetId(), time.Now().Add(time.Hour), false) // nothing of that time is there: the search ends at once
}

func TestListIsOfOneTenant(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := openStore(t, b, b.Conn(t, embedded.UserSec))
	l := newLog(t, b, s, "one")
	run(t, l)
	for i := range 3 * listWindow { // one batch each, several windows
		tenant := [...]string{"acme", "other", ""}[i%3]
		if err := l.Record(ctx, event(tenant, strconv.Itoa(i))); err != nil {
			t.Fatal(err)
		}
	}
	for _, limit := range []int{1, 5, 40, 0} {
		events, err := l.List(ctx, "acme", limit)
		if err != nil {
			t.Fatal(err)
		}
		want := limit
		if limit == 0 {
			want = listWindow
		}
		if len(events) != want {
			t.Fatalf("limit %d: %d events", limit, len(events))
		}
		for i, e := range events {
			if n := 3*listWindow - 3*(len(events)-i); e.GetTenant() != "acme" || e.GetSubject() != strconv.Itoa(n) {
				t.Fatalf("limit %d: event %d is %v, not number %d", limit, i, e, n)
			}
		}
	}
	if _, err := l.List(ctx, "", 1); schemas.CodeOf(err) != schemas.CodeInvalid {
		t.Fatalf("list of no tenant: %v", err)
	}
}

func TestRefusals(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := openStore(t, b, b.Conn(t, embedded.UserSec))
	l := newLog(t, b, s, "one")
	stop := run(t, l)
	big := Event("operator", "tenant.create", "tenant:x", "ok", "blob", strings.Repeat("x", maxEventBytes))
	if err := l.Record(ctx, big); schemas.CodeOf(err) != schemas.CodeLimit {
		t.Fatalf("an event that is too large: %v", err)
	}
	if err := l.Record(ctx, Event("", "a", "b", "ok")); schemas.CodeOf(err) != schemas.CodeInvalid {
		t.Fatalf("an event without actor: %v", err)
	}
	if err := l.Record(ctx, Event("operator", "a", "b\xff", "ok")); schemas.CodeOf(err) != schemas.CodeInvalid {
		t.Fatalf("an event that is not text: %v", err)
	}
	for i := range 6 { // as large as they may be, and with what JSON escapes
		if err := l.Record(ctx, Event("operator", "a", "b", "ok", "blob", strings.Repeat("<", maxEventBytes-1000), "n", strconv.Itoa(i))); err != nil {
			t.Fatalf("a large event: %v", err)
		}
	}
	gone, cancel := context.WithCancel(ctx)
	cancel()
	if err := l.Record(gone, event("acme", "x")); schemas.CodeOf(err) != schemas.CodeUnavailable {
		t.Fatalf("record of a caller that has gone: %v", err)
	}
	stop()
	if err := l.Record(ctx, event("acme", "x")); schemas.CodeOf(err) != schemas.CodeUnavailable {
		t.Fatalf("record after the end: %v", err)
	}
	if _, err := New(ctx, s, "", b.Log); err == nil {
		t.Fatal("a writer without a name")
	}
}

// Notes beyond what may wait are dropped, counted, and the count is recorded. What is pending at the end is written.
func TestOverflow(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := openStore(t, b, b.Conn(t, embedded.UserSec))
	l := newLog(t, b, s, "one")
	const over = 7
	for i := range maxNotes + over {
		l.Note(event("acme", strconv.Itoa(i)))
	}
	l.Note(Event("", "", "", "")) // can't be encoded: dropped too
	run(t, l)()                   // ended at once, and yet it writes all
	told, notes := "", 0
	if err := s.ReadAudit(ctx, 1, func(_ uint64, body []byte) error {
		if text, err := Text(body); err != nil || len(text) > maxBatchBytes {
			t.Errorf("a batch has %d bytes: %v", len(text), err)
		}
		batch, err := decodeBatch(body)
		for _, e := range batch.GetEvents() {
			if e.GetAction() == ActionOverflow {
				told = e.GetDetails()["dropped"]
			} else {
				notes++
			}
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if told != strconv.Itoa(over+1) || notes != maxNotes {
		t.Fatalf("dropped %s, written %d", told, notes)
	}
	if _, err := l.Verify(ctx); err != nil {
		t.Fatal(err)
	}
}

// While JetStream is away Record says so within its context, and what it refused is not recorded later.
func TestUnavailable(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	nc := overTCP(t, b, nats.ReconnectBufSize(-1))
	s := openStore(t, b, nc)
	l := newLog(t, b, s, "one")
	run(t, l)
	if err := l.Record(ctx, event("acme", "before")); err != nil {
		t.Fatal(err)
	}
	cut := nc.StatusChanged(nats.RECONNECTING)
	b.Shutdown()
	<-cut // from here on nothing can have been sent
	over := errors.New("the caller's time is over")
	short, cancel := context.WithTimeoutCause(ctx, 500*time.Millisecond, over)
	defer cancel()
	refused := event("acme", "during")
	if err := l.Record(short, refused); schemas.CodeOf(err) != schemas.CodeUnavailable || !errors.Is(err, over) { // and not its own 10 s
		t.Fatalf("record without JetStream: %v", err)
	}
	noted := event("acme", "noted")
	l.Note(noted)
	for { // the write may have failed after Record gave up
		if _, err := l.Failing(); err != nil {
			break
		}
		try, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		_ = l.Record(try, event("acme", "meanwhile"))
		cancel()
		if ctx.Err() != nil {
			t.Fatal("a write failed and the log does not say so")
		}
	}
	b.Restart(t)
	after := event("acme", "after")
	for {
		err := l.Record(ctx, after)
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("record after the restart: %v", err)
		}
	}
	if d, err := l.Failing(); d != 0 || err != nil {
		t.Fatalf("after a write that succeeded the log says that it fails: %v for %v", err, d)
	}
	found := ids(t, s)
	if found[refused.GetId()] != 0 || found[noted.GetId()] != 1 || found[after.GetId()] == 0 {
		t.Fatalf("refused %d, noted %d, after %d times", found[refused.GetId()], found[noted.GetId()], found[after.GetId()])
	}
	if _, err := l.Verify(ctx); err != nil {
		t.Fatal(err)
	}
}

// Whoever holds the control plane's own credential can put a message behind the chain or replace the stream. Verify tells.
func TestVerifyFindsTampering(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	nc := b.Conn(t, embedded.UserSec)
	s := openStore(t, b, nc)
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	l := newLog(t, b, s, "one")
	stop := run(t, l)
	for i := range 5 {
		if err := l.Record(ctx, event("acme", strconv.Itoa(i))); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	var good [][]byte
	if err := s.ReadAudit(ctx, 1, func(_ uint64, body []byte) error {
		good = append(good, body)
		return nil
	}); err != nil || len(good) != 5 {
		t.Fatalf("%d batches, %v", len(good), err)
	}
	st, err := js.Stream(ctx, "RUNBUS_AUDIT")
	if err != nil {
		t.Fatal(err)
	}
	config := st.CachedInfo().Config
	replace := func(bodies [][]byte) {
		t.Helper()
		// A stream deleted twice within milliseconds can come back with what it had: nats-server removes its folder in the
		// background, and a second removal of that name fails meanwhile.
		for old := uint64(1); old > 0; {
			if err := js.DeleteStream(ctx, config.Name); err != nil {
				t.Fatal(err)
			}
			st, err := js.CreateStream(ctx, config)
			if err != nil {
				t.Fatal(err)
			}
			old = st.CachedInfo().State.LastSeq
		}
		for _, body := range bodies {
			if _, err := js.Publish(ctx, subject, body); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range tamperings(good) {
		replace(c.bodies)
		_, err := l.Verify(ctx)
		var broken *BrokenError
		if !errors.As(err, &broken) || broken.Number != c.at {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	// The whole history written anew, with a chain that holds: only who knew the old end notices.
	c := chain{}
	var forged [][]byte
	for range good {
		body, err := c.append(nil, "one", nil)
		if err != nil {
			t.Fatal(err)
		}
		forged = append(forged, body)
		c = after(c.number+1, body)
	}
	replace(forged)
	var broken *BrokenError
	if _, err := l.Verify(ctx); !errors.As(err, &broken) || broken.Number != 5 {
		t.Errorf("a forged history: %v", err)
	}
	replace(good)
	if n, err := l.Verify(ctx); err != nil || n != 5 {
		t.Fatalf("the true history: %d, %v", n, err)
	}
	// A log that finds its history cut off refuses to go on from there.
	replace(good[:3])
	again := newLog(t, b, s, "one")
	again.setEnd(after(5, good[4]), false)
	run(t, again)
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if err := again.Record(short, event("acme", "x")); schemas.CodeOf(err) != schemas.CodeUnavailable {
		t.Fatalf("record onto a history that was cut off: %v", err)
	}
	replace(append(good[:4:4], []byte("{")))
	if _, err := New(ctx, s, "one", b.Log); !errors.As(err, &broken) {
		t.Fatalf("open onto a damaged end: %v", err)
	}
}
