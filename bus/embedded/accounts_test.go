package embedded_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
)

const (
	heartbeats = "KV_runbus_heartbeats"
	auditLog   = "RUNBUS_AUDIT"
)

// store makes the two mirrored streams in SEC, one bucket that isn't, the consumers `ops` and the mirrors: with nothing but
// the permissions of the two users, through the exports and imports of the configuration.
type store struct {
	sec, mirror natsjs.JetStream
}

func newStore(ctx context.Context, t *testing.T, b *bustest.Bus) store {
	t.Helper()
	sec, err := natsjs.New(b.Conn(t, embedded.UserSec))
	if err != nil {
		t.Fatal(err)
	}
	mirror, err := natsjs.New(b.Conn(t, embedded.UserMirror))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sec.CreateStream(ctx, natsjs.StreamConfig{Name: "KV_runbus_identities", Subjects: []string{"$KV.runbus_identities.>"}, MaxMsgsPerSubject: 1}); err != nil {
		t.Fatal(err)
	}
	for name, subject := range map[string]string{heartbeats: "$KV.runbus_heartbeats.>", auditLog: "runbus.audit"} {
		st, err := sec.CreateStream(ctx, natsjs.StreamConfig{Name: name, Subjects: []string{subject}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := st.CreatePushConsumer(ctx, natsjs.ConsumerConfig{
			Durable: "ops", DeliverSubject: "runbus.mirror." + name, AckPolicy: natsjs.AckFlowControlPolicy, FlowControl: true,
			IdleHeartbeat: time.Second, MaxAckPending: 1000,
		}); err != nil {
			t.Fatal(err)
		}
		if _, err := mirror.CreateStream(ctx, natsjs.StreamConfig{Name: name, Mirror: &natsjs.StreamSource{
			Name: name, External: &natsjs.ExternalStream{APIPrefix: "runbus.sec"},
			Consumer: &natsjs.StreamConsumerSource{Name: "ops", DeliverSubject: "runbus.mirror." + name},
		}}); err != nil {
			t.Fatal(err)
		}
	}
	return store{sec: sec, mirror: mirror}
}

// put appends to a stream of SEC and returns the sequence.
func (s store) put(ctx context.Context, t *testing.T, subject, body string) uint64 {
	t.Helper()
	ack, err := s.sec.Publish(ctx, subject, []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	return ack.Sequence
}

func lastSeq(ctx context.Context, t *testing.T, js natsjs.JetStream, name string) uint64 {
	t.Helper()
	st, err := js.Stream(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	return st.CachedInfo().State.LastSeq
}

// follow reads a mirror as ops do, with an ordered consumer, into a channel.
func follow(ctx context.Context, t *testing.T, ops *nats.Conn, name string) <-chan natsjs.Msg {
	t.Helper()
	js, err := natsjs.New(ops)
	if err != nil {
		t.Fatal(err)
	}
	c, err := js.OrderedConsumer(ctx, name, natsjs.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan natsjs.Msg, 1024)
	cc, err := c.Consume(func(m natsjs.Msg) { got <- m })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Stop(); <-cc.Closed() })
	return got
}

func expectBody(t *testing.T, got <-chan natsjs.Msg, body string) {
	t.Helper()
	select {
	case m := <-got:
		if string(m.Data()) != body {
			t.Fatalf("the mirror has %q, want %q", m.Data(), body)
		}
	case <-time.After(3 * soon):
		t.Fatalf("the mirror did not get %q", body)
	}
}

// Ops read what SEC writes, through the mirrors, and reach nothing of SEC itself.
func TestOpsSeeMirrorsAndNothingElseOfSEC(t *testing.T) {
	b := bustest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 6*soon)
	defer cancel()
	s := newStore(ctx, t, b)
	s.put(ctx, t, "$KV.runbus_identities.x", "secret")
	ops := b.OpsConn(t)
	beats, audit := follow(ctx, t, ops, heartbeats), follow(ctx, t, ops, auditLog)
	s.put(ctx, t, "$KV.runbus_heartbeats.acme.r", "beat")
	s.put(ctx, t, "runbus.audit", "event")
	expectBody(t, beats, "beat")
	expectBody(t, audit, "event")

	js, err := natsjs.New(ops)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.Stream(ctx, "KV_runbus_identities"); !errors.Is(err, natsjs.ErrStreamNotFound) {
		t.Errorf("ops see a bucket of SEC: %v", err)
	}
	// What ops try is refused, and SEC is as it was.
	for _, subject := range []string{
		"$KV.runbus_identities.x", "$KV.runbus_heartbeats.acme.r", "runbus.audit", "runbus.sec.CONSUMER.RESET." + auditLog + ".ops",
		"$JS.API.CONSUMER.RESET." + auditLog + ".ops", "$JS.API.STREAM.PURGE." + auditLog, "$JS.API.STREAM.DELETE." + heartbeats, "runbus.mirror." + auditLog,
	} {
		if err := ops.Publish(subject, []byte("{}")); err != nil {
			t.Fatal(err)
		}
		if !denied(t, ops, "publish", subject) {
			t.Errorf("ops may publish %s", subject)
		}
	}
	s.unchanged(ctx, t, map[string]uint64{"KV_runbus_identities": 1, heartbeats: 1, auditLog: 1})
}

func (s store) unchanged(ctx context.Context, t *testing.T, want map[string]uint64) {
	t.Helper()
	for name, seq := range want {
		if got := lastSeq(ctx, t, s.sec, name); got != seq {
			t.Errorf("%s in SEC is at %d, want %d", name, got, seq)
		}
	}
}

// A consumer that ops make in OPS delivers in OPS alone, wherever it is told to: not to a runner, not into a bucket, not to
// an API that changes something. The mirrors go on.
func TestAConsumerOfOpsReachesNothing(t *testing.T) {
	b := bustest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 12*soon)
	defer cancel()
	s := newStore(ctx, t, b)
	ops := b.OpsConn(t)
	js, err := natsjs.New(ops)
	if err != nil {
		t.Fatal(err)
	}
	audit := follow(ctx, t, ops, auditLog)
	s.put(ctx, t, "$KV.runbus_identities.x", "identity")
	s.put(ctx, t, "$KV.runbus_heartbeats.acme.r", "not an event")
	s.put(ctx, t, "runbus.audit", `{"seq":1000}`) // what CONSUMER.RESET would understand
	expectBody(t, audit, `{"seq":1000}`)
	expectBody(t, follow(ctx, t, ops, heartbeats), "not an event")

	runner := b.RunnerConn(t, acme)
	work, err := runner.SubscribeSync(strings.TrimSuffix(schemas.WorkSubject(acme, "s"), "s") + "*")
	if err != nil {
		t.Fatal(err)
	}
	if err := runner.Flush(); err != nil {
		t.Fatal(err)
	}
	made := 0
	for i, deliver := range []string{
		schemas.WorkSubject(acme, "s"), schemas.ControlSubject(acme, "s"), "$KV.runbus_identities.x", "$KV.runbus_heartbeats.acme.r", "runbus.audit",
		"$JS.API.STREAM.DELETE." + auditLog, "$JS.API.STREAM.PURGE." + heartbeats, "$JS.API.STREAM.CREATE.X", "$JS.API.CONSUMER.DELETE." + auditLog + ".ops",
		"runbus.sec.CONSUMER.RESET." + auditLog + ".ops", "runbus.sec.STREAM.DELETE." + auditLog, "$JS.FC." + auditLog + ".ops.x", "runbus.mirror." + auditLog,
		"$SYS.REQ.SERVER.PING.KICK", "$SYS.REQ.USER.AUTH",
	} {
		for _, name := range []string{auditLog, heartbeats} {
			st, err := js.Stream(ctx, name)
			if err != nil {
				t.Fatalf("after %d consumers: %v", i, err)
			}
			if _, err := st.CreatePushConsumer(ctx, natsjs.ConsumerConfig{DeliverSubject: deliver, AckPolicy: natsjs.AckNonePolicy}); err == nil {
				made++ // some deliver subjects the server refuses
			}
		}
	}
	if made == 0 {
		t.Fatal("no consumer was made: the test shows nothing")
	}
	// The marker: another event passes SEC, the mirror and all those consumers, then a work of the real dispatcher.
	s.put(ctx, t, "runbus.audit", "marker")
	expectBody(t, audit, "marker")
	if err := b.Conn(t, embedded.UserDispatch).Publish(schemas.WorkSubject(acme, "s"), []byte("work")); err != nil {
		t.Fatal(err)
	}
	if m, err := work.NextMsg(soon); err != nil || string(m.Data) != "work" {
		t.Errorf("the runner got %v, %v, want the dispatcher's work and nothing before it", m, err)
	}
	s.unchanged(ctx, t, map[string]uint64{"KV_runbus_identities": 1, heartbeats: 1, auditLog: 2})
	if names := streams(ctx, t, s.mirror); names != 2 {
		t.Errorf("%d streams in OPS, want the two mirrors", names)
	}
	s.put(ctx, t, "runbus.audit", "afterwards")
	expectBody(t, audit, "afterwards")
	for seq := uint64(1); seq <= 3; seq++ {
		if source, view := body(ctx, t, s.sec, seq), body(ctx, t, js, seq); source != view {
			t.Errorf("event %d is %q in SEC and %q in the mirror", seq, source, view)
		}
	}
	if n := lastSeq(ctx, t, js, auditLog); n != 3 {
		t.Errorf("the mirror has %d events, want 3", n)
	}
}

func body(ctx context.Context, t *testing.T, js natsjs.JetStream, seq uint64) string {
	t.Helper()
	st, err := js.Stream(ctx, auditLog)
	if err != nil {
		t.Fatal(err)
	}
	m, err := st.GetMsg(ctx, seq)
	if err != nil {
		t.Fatal(err)
	}
	return string(m.Data)
}

func streams(ctx context.Context, t *testing.T, js natsjs.JetStream) int {
	t.Helper()
	info, err := js.AccountInfo(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return info.Streams
}

// Of RUN, ops see what DESIGN lists, but no chunk of a result; and a watcher in OPS hides no 503.
func TestOpsSeeRunWithoutData(t *testing.T) {
	b := bustest.Start(t)
	ops := b.OpsConn(t)
	view, err := ops.SubscribeSync("runbus.v1.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := ops.Flush(); err != nil {
		t.Fatal(err)
	}
	runner := b.RunnerConn(t, acme)
	sent := []string{
		schemas.HelloSubject(acme), schemas.HeartbeatSubject(acme), schemas.ResultDataSubject(acme, "c", "d"), schemas.ResultCtlSubject(acme, "c", "d"),
		schemas.ReplySubject(acme, "c", "i"), schemas.GoodbyeSubject(acme),
	}
	for _, subject := range sent {
		if err := runner.Publish(subject, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	for _, subject := range sent {
		if subject == schemas.ResultDataSubject(acme, "c", "d") {
			continue
		}
		if m, err := view.NextMsg(soon); err != nil || m.Subject != subject {
			t.Fatalf("ops got %v, %v, want %s", m, err, subject)
		}
	}
	dispatch := b.Conn(t, embedded.UserDispatch)
	for _, subject := range []string{schemas.WorkSubject(acme, "gone"), schemas.ControlSubject(acme, "gone")} {
		if _, err := dispatch.Request(subject, nil, soon); !errors.Is(err, nats.ErrNoResponders) {
			t.Errorf("%s: %v, want no responders", subject, err)
		}
	}
	// A copy in OPS is seen there, and reaches no runner.
	work, err := runner.SubscribeSync(schemas.WorkSubject(acme, "s"))
	if err != nil {
		t.Fatal(err)
	}
	if err := runner.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := b.Conn(t, embedded.UserMicro).Publish(schemas.WorkSubject(acme, "s"), []byte("copy")); err != nil {
		t.Fatal(err)
	}
	if m, err := view.NextMsg(soon); err != nil || string(m.Data) != "copy" {
		t.Fatalf("ops got %v, %v", m, err)
	}
	if err := dispatch.Publish(schemas.WorkSubject(acme, "s"), []byte("work")); err != nil {
		t.Fatal(err)
	}
	if m, err := work.NextMsg(soon); err != nil || string(m.Data) != "work" {
		t.Errorf("the runner got %v, %v", m, err)
	}
}

// What is published in one account is not seen in another, but for the imports above.
func TestAccountsAreApart(t *testing.T) {
	b := bustest.Start(t)
	for _, from := range []embedded.User{embedded.UserSec, embedded.UserSys} {
		for to, subject := range map[embedded.User]string{
			embedded.UserServe: schemas.HeartbeatSubject(acme), embedded.UserJail: schemas.HelloSubject(acme),
			embedded.UserAuth: "$SYS.REQ.USER.AUTH", embedded.UserMicro: "$SRV.PING", embedded.UserDispatch: schemas.ReplySubject(acme, "c", "i"),
		} {
			if from == embedded.UserSys && to == embedded.UserAuth {
				continue // the server itself sends it from SYS; that no user can, the matrix shows
			}
			listener := b.Conn(t, to)
			sub, err := listener.SubscribeSync(subject)
			if err != nil {
				t.Fatal(err)
			}
			if err := listener.Flush(); err != nil {
				t.Fatal(err)
			}
			if _, err := b.Conn(t, from).Request(subject, nil, soon); !errors.Is(err, nats.ErrNoResponders) {
				t.Errorf("%s to %s on %s: %v, want no responders", from, to, subject, err)
			}
			if n, _, err := sub.Pending(); err != nil || n != 0 {
				t.Errorf("%s to %s: %d messages, %v", from, to, n, err)
			}
		}
	}
}
