package ops_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/ops"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

func TestMain(m *testing.M) { leak.Main(m) }

const soon = time.Minute

var acme = schemas.RunnerRef{Tenant: "acme", Runner: "r1"}

func serve(t *testing.T, b *bustest.Bus, replica string, change func(c *ops.ServiceConfig)) *ops.Service {
	t.Helper()
	c := ops.ServiceConfig{
		Conn: b.Conn(t, embedded.UserMicro), Replica: replica, Version: "v1.2.3", Log: b.Log,
		RunnersConnected: func() int { return 3 }, DispatchesRunning: func() int { return 2 },
	}
	if change != nil {
		change(&c)
	}
	s, err := ops.Serve(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Errorf("stop the micro service: %v", err)
		}
	})
	return s
}

// ask sends one request and collects the answers of n services.
func ask(t *testing.T, nc *nats.Conn, subject string, n int) [][]byte {
	t.Helper()
	inbox := nc.NewInbox()
	sub, err := nc.SubscribeSync(inbox)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := nc.PublishRequest(subject, inbox, nil); err != nil {
		t.Fatal(err)
	}
	var answers [][]byte
	for range n {
		m, err := sub.NextMsg(soon)
		if err != nil {
			t.Fatalf("%s: answer %d of %d: %v", subject, len(answers)+1, n, err)
		}
		answers = append(answers, m.Data)
	}
	return answers
}

// What `nats micro ls`, `info` and `stats` ask is answered by every replica to the ops user.
func TestMicroAnswersOps(t *testing.T) {
	b := bustest.Start(t)
	serve(t, b, "replica1", nil)
	serve(t, b, "replica2", nil)
	nc := b.OpsConn(t)
	var replicas []string
	for _, body := range ask(t, nc, "$SRV.INFO.runbus", 2) {
		var info micro.Info
		if err := json.Unmarshal(body, &info); err != nil {
			t.Fatal(err)
		}
		if info.Name != "runbus" || info.Version != "1.2.3" || len(info.Endpoints) != 1 || info.Endpoints[0].Subject != "runbus.ops.status" {
			t.Errorf("info %+v", info)
		}
		replicas = append(replicas, info.Metadata["replica"])
		if answers := ask(t, nc, "$SRV.PING.runbus."+info.ID, 1); len(answers) != 1 {
			t.Errorf("ping of one: %d answers", len(answers))
		}
	}
	slices.Sort(replicas)
	if !slices.Equal(replicas, []string{"replica1", "replica2"}) {
		t.Errorf("replicas %v", replicas)
	}
	ask(t, nc, "$SRV.PING", 2)
	ask(t, nc, ops.StatusSubject, 2)
	counted := map[string]micro.Stats{}
	for give := time.Now().Add(soon); len(counted) < 2; { // a request is counted after its answer
		for _, body := range ask(t, nc, "$SRV.STATS.runbus", 2) {
			var stats micro.Stats
			if err := json.Unmarshal(body, &stats); err != nil {
				t.Fatal(err)
			}
			if stats.Endpoints[0].NumRequests > 0 || time.Now().After(give) {
				counted[stats.ID] = stats
			}
		}
	}
	for _, stats := range counted {
		var data ops.Status
		if err := json.Unmarshal(stats.Endpoints[0].Data, &data); err != nil {
			t.Fatal(err)
		}
		if stats.Endpoints[0].NumRequests != 1 || data.RunnersConnected != 3 || data.DispatchesRunning != 2 {
			t.Errorf("stats %+v, data %+v", stats.Endpoints[0], data)
		}
	}
}

func TestStatus(t *testing.T) {
	b := bustest.Start(t)
	begin := time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)
	var now atomic.Int64 // seconds after begin
	var runners atomic.Int64
	serve(t, b, "replica1", func(c *ops.ServiceConfig) {
		c.Now = func() time.Time { return begin.Add(time.Duration(now.Load()) * time.Second) }
		c.RunnersConnected = func() int { return int(runners.Load()) }
	})
	now.Store(90)
	runners.Store(7)
	var got ops.Status
	if err := json.Unmarshal(ask(t, b.OpsConn(t), "runbus.ops.status", 1)[0], &got); err != nil {
		t.Fatal(err)
	}
	if want := (ops.Status{Replica: "replica1", Version: "v1.2.3", StartedAt: begin, UptimeSeconds: 90, RunnersConnected: 7, DispatchesRunning: 2}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// A status asked for with a reply subject that is no inbox is not answered there.
func TestStatusIsAnsweredToInboxesOnly(t *testing.T) {
	b := bustest.Start(t)
	serve(t, b, "replica1", nil)
	nc := b.OpsConn(t)
	view, err := nc.SubscribeSync("runbus.v1.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.PublishRequest(ops.StatusSubject, schemas.WorkSubject(acme, "s"), nil); err != nil {
		t.Fatal(err)
	}
	ask(t, nc, ops.StatusSubject, 1) // the endpoint answers one after the other
	copies := ops.NewCopies(b.Conn(t, embedded.UserMicro), b.Log)
	copies.Publish(schemas.WorkSubject(acme, "marker"), &runbusv1.RunnerWorkAssignment{})
	copies.Close()
	if m, err := view.NextMsg(soon); err != nil || m.Subject != schemas.WorkSubject(acme, "marker") {
		t.Errorf("got %v, %v, want the marker alone", m, err)
	}
}

func TestServeIsRefused(t *testing.T) {
	b := bustest.Start(t)
	nc := b.Conn(t, embedded.UserMicro)
	count := func() int { return 0 }
	for name, c := range map[string]ops.ServiceConfig{
		"no connection": {Replica: "r", RunnersConnected: count, DispatchesRunning: count},
		"no replica":    {Conn: nc, RunnersConnected: count, DispatchesRunning: count},
		"no counters":   {Conn: nc, Replica: "r"},
		"a bad version": {Conn: nc, Replica: "r", Version: "(devel)", RunnersConnected: count, DispatchesRunning: count},
	} {
		if s, err := ops.Serve(c); err == nil {
			_ = s.Stop()
			t.Errorf("%s: served", name)
		}
	}
	nc.Close()
	if _, err := ops.Serve(ops.ServiceConfig{Conn: nc, Replica: "r", RunnersConnected: count, DispatchesRunning: count}); err == nil {
		t.Error("served on a closed connection")
	}
}

// Ops see work and control as they were sent, and no runner gets a copy.
func TestCopiesAreSeenByOpsAlone(t *testing.T) {
	b := bustest.Start(t)
	nc := b.OpsConn(t)
	view, err := nc.SubscribeSync("runbus.v1.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	runner := b.RunnerConn(t, acme)
	work, err := runner.SubscribeSync(schemas.WorkSubject(acme, "s"))
	if err != nil {
		t.Fatal(err)
	}
	if err := runner.Flush(); err != nil {
		t.Fatal(err)
	}
	copies := ops.NewCopies(b.Conn(t, embedded.UserMicro), b.Log)
	defer copies.Close()
	sent := map[string]proto.Message{
		schemas.WorkSubject(acme, "s"):    &runbusv1.RunnerWorkAssignment{DispatchId: "d1"},
		schemas.ControlSubject(acme, "s"): &runbusv1.RunnerControl{Id: "c1"},
	}
	for subject, m := range sent {
		copies.Publish(subject, m)
		got, err := view.NextMsg(soon)
		if err != nil {
			t.Fatal(err)
		}
		body, err := bus.DecodeAny(bus.TypeOf(got), got.Data)
		if err != nil {
			t.Fatal(err)
		}
		if got.Subject != subject || got.Reply != "" || got.Header.Get("Content-Type") != bus.ContentType || !proto.Equal(body, m) {
			t.Errorf("ops got %s %v (reply %q) %v, want %s %v", got.Subject, got.Header, got.Reply, body, subject, m)
		}
	}
	if err := b.Conn(t, embedded.UserDispatch).Publish(schemas.WorkSubject(acme, "s"), []byte("work")); err != nil {
		t.Fatal(err)
	}
	if m, err := work.NextMsg(soon); err != nil || string(m.Data) != "work" {
		t.Errorf("the runner got %v, %v, want the work alone", m, err)
	}
	if n := copies.Dropped(); n != 0 {
		t.Errorf("%d dropped", n)
	}
}

// The micro user may copy work and control, and nothing else of the bus.
func TestCopiesOfOtherSubjectsAreRefused(t *testing.T) {
	b := bustest.Start(t)
	nc := b.Conn(t, embedded.UserMicro)
	copies := ops.NewCopies(nc, b.Log)
	copies.Publish(schemas.CreditSubject(acme, "d"), &runbusv1.RunnerWorkCredit{})
	copies.Close()
	if err := nc.FlushTimeout(soon); err != nil {
		t.Fatal(err)
	}
	if err := nc.LastError(); err == nil || !strings.Contains(err.Error(), schemas.CreditSubject(acme, "d")) {
		t.Errorf("got %v, want a violation", err)
	}
}

// A connection that takes nothing blocks no dispatch: copies are dropped and counted, and one line in a power of two says so.
func TestCopiesNeverBlock(t *testing.T) {
	b := bustest.Start(t)
	nc := b.Conn(t, embedded.UserMicro)
	hook := &counter{}
	gate := make(chan struct{})
	copies := ops.NewCopiesTo(func(m *nats.Msg) error { <-gate; return nc.PublishMsg(m) }, slog.New(hook))
	small := &runbusv1.RunnerWorkAssignment{DispatchId: "d"}
	for range 1 + ops.CopiesQueued + 100 { // one is in the writer's hand or still queued
		copies.Publish(schemas.WorkSubject(acme, "s"), small)
	}
	if n := copies.Dropped(); n < 100 || n > 101 {
		t.Errorf("%d dropped, want 100 or 101", n)
	}
	if n := hook.lines.Load(); n != 7 { // 1, 2, 4, 8, 16, 32, 64
		t.Errorf("%d log lines, want 7", n)
	}
	close(gate)
	copies.Close()
	before := copies.Dropped()

	blocked := make(chan struct{})
	copies2 := ops.NewCopiesTo(func(*nats.Msg) error { <-blocked; return errors.New("gone") }, slog.New(hook))
	big := &runbusv1.RunnerWorkAssignment{DispatchId: strings.Repeat("d", 1<<19)}
	for range 100 {
		copies2.Publish(schemas.WorkSubject(acme, "s"), big)
	}
	dropped := copies2.Dropped()
	if kept := 100 - dropped; kept > ops.CopiesQueuedBytes>>19 || kept < 16 {
		t.Errorf("%d copies of 512 KiB are queued", kept)
	}
	close(blocked)
	copies2.Close()
	if n := copies2.Dropped(); n != 100 {
		t.Errorf("%d counted after the connection failed, want 100", n)
	}
	copies2.Close()
	if n := copies.Dropped(); n != before {
		t.Errorf("%d dropped later", n-before)
	}
}

// counter counts log lines.
type counter struct{ lines atomic.Int64 }

func (c *counter) Enabled(context.Context, slog.Level) bool { return true }
func (c *counter) WithAttrs([]slog.Attr) slog.Handler       { return c }
func (c *counter) WithGroup(string) slog.Handler            { return c }
func (c *counter) Handle(context.Context, slog.Record) error {
	c.lines.Add(1)
	return nil
}
