package embedded_test

import (
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/internal/natsdial"
	"github.com/org-runink/runbus/schemas"
)

// hurried has the server wait for clients as long as it does by default.
func hurried(c *embedded.Config) { c.AuthTimeout = 0 }

// What the running server says its limits are.
func TestLimitsOfTheRunningServer(t *testing.T) {
	b := bustest.Start(t, hurried)
	m, err := b.Conn(t, embedded.UserSys).Request("$SYS.REQ.SERVER."+b.ID()+".VARZ", nil, soon)
	if err != nil {
		t.Fatal(err)
	}
	var answer struct {
		Data struct {
			MaxPayload    int           `json:"max_payload"`
			MaxControl    int           `json:"max_control_line"`
			MaxPending    int           `json:"max_pending"`
			MaxSubs       int           `json:"max_subscriptions"`
			PingInterval  time.Duration `json:"ping_interval"`
			PingMax       int           `json:"ping_max"`
			WriteDeadline time.Duration `json:"write_deadline"`
			AuthTimeout   float64       `json:"auth_timeout"`
			HTTPPort      int           `json:"http_port"`
			HTTPSPort     int           `json:"https_port"`
			TLSRequired   bool          `json:"tls_required"`
			JetStream     struct {
				Config struct {
					SyncAlways bool  `json:"sync_always"`
					Memory     int64 `json:"max_memory"`
					Storage    int64 `json:"max_storage"`
				} `json:"config"`
			} `json:"jetstream"`
		} `json:"data"`
	}
	if err := json.Unmarshal(m.Data, &answer); err != nil {
		t.Fatal(err)
	}
	d := answer.Data
	for what, ok := range map[string]bool{
		"max_payload": d.MaxPayload == embedded.MaxPayload, "max_control_line": d.MaxControl == embedded.MaxControlLine,
		"max_pending": d.MaxPending == embedded.MaxPending, "max_subscriptions": d.MaxSubs == embedded.MaxSubscriptions,
		"pings":          d.PingInterval == 6*time.Second && d.PingMax == 2,
		"write_deadline": d.WriteDeadline == 10*time.Second, "auth_timeout": d.AuthTimeout == 1.8,
		"monitoring off": d.HTTPPort == 0 && d.HTTPSPort == 0, "tls": d.TLSRequired,
		"jetstream": d.JetStream.Config.SyncAlways && d.JetStream.Config.Memory == embedded.MaxMemoryStore && d.JetStream.Config.Storage == embedded.MaxFileStore,
	} {
		if !ok {
			t.Errorf("%s is not as it should be: %+v", what, d)
		}
	}
}

func TestMaxPayload(t *testing.T) {
	b := bustest.Start(t)
	listener, sec := b.Conn(t, embedded.UserSec), b.Conn(t, embedded.UserSec)
	sub, err := listener.SubscribeSync("x")
	if err != nil {
		t.Fatal(err)
	}
	if err := listener.FlushTimeout(soon); err != nil {
		t.Fatal(err)
	}
	if err := sec.Publish("x", make([]byte, embedded.MaxPayload)); err != nil {
		t.Fatal(err)
	}
	if m, err := sub.NextMsg(soon); err != nil || len(m.Data) != embedded.MaxPayload {
		t.Errorf("the largest payload did not pass: %v", err)
	}
	w := dialOps(t, b)
	w.send("PUB runbus.ops.x %d\r\n", embedded.MaxPayload+1)
	w.expect("-ERR 'Maximum Payload Violation'")
}

func TestMaxControlLine(t *testing.T) {
	b := bustest.Start(t)
	w := dialOps(t, b)
	w.send("SUB runbus.v1.%s 1\r\nPING\r\n", strings.Repeat("x", embedded.MaxControlLine-32))
	w.expect("PONG")
	w.send("SUB runbus.v1.%s 2\r\n", strings.Repeat("x", embedded.MaxControlLine))
	w.expect("-ERR 'maximum control line exceeded'")
}

func TestMaxSubscriptions(t *testing.T) {
	b := bustest.Start(t)
	w := dialOps(t, b)
	for i := range embedded.MaxSubscriptions {
		w.send("SUB runbus.v1.t%d %d\r\n", i, i)
	}
	w.send("PING\r\n")
	w.expect("PONG")
	w.send("SUB runbus.v1.more more\r\n")
	w.expect("-ERR 'maximum subscriptions exceeded'")
}

// Who shakes hands and then says nothing is cut, after 1.8 s and not before.
func TestAuthTimeout(t *testing.T) {
	b := bustest.Start(t, hurried)
	for give := time.Now().Add(3 * soon); ; {
		begin := time.Now()
		w, err := tryWire(t, b)
		if err != nil { // on a machine that stands still a handshake takes longer than that, too
			if time.Now().After(give) {
				t.Fatal(err)
			}
			continue
		}
		w.expect("-ERR 'Authentication Timeout'")
		if took := time.Since(begin); took < 1800*time.Millisecond {
			t.Errorf("after %s", took)
		}
		return
	}
}

// A client that doesn't read is cut when more than max_pending waits for it; nobody else is held up.
func TestMaxPending(t *testing.T) {
	hook := newLogHook()
	b := bustest.Start(t, func(c *embedded.Config) { c.Log = slog.New(hook) })
	ref := schemas.RunnerRef{Tenant: "acme", Runner: "r"}
	w := dialOps(t, b)
	w.send("SUB runbus.v1.> 1\r\nPING\r\n")
	w.expect("PONG")
	serve := b.Conn(t, embedded.UserServe)
	quick, err := serve.SubscribeSync(schemas.AllHeartbeats)
	if err != nil {
		t.Fatal(err)
	}
	if err := quick.SetPendingLimits(-1, -1); err != nil {
		t.Fatal(err)
	}
	if err := serve.FlushTimeout(soon); err != nil {
		t.Fatal(err)
	}
	runner := b.RunnerConn(t, ref)
	body := make([]byte, embedded.MaxPayload)
	const sent = embedded.MaxPending/embedded.MaxPayload + 32
	for i := range sent { // one by one: whoever reads has nothing waiting, on however slow a machine
		if err := runner.Publish(schemas.HeartbeatSubject(ref), body); err != nil {
			t.Fatal(err)
		}
		if _, err := quick.NextMsg(soon); err != nil {
			t.Fatalf("the other subscriber lacks message %d: %v", i, err)
		}
	}
	if r := hook.expect(t, "Slow Consumer Detected"); r.Level != slog.LevelWarn {
		t.Errorf("a slow consumer is logged as %s", r.Level)
	}
}

// A wrong key, a signature over something else, and no credential at all are refused in the same words.
func TestRefusedCredentials(t *testing.T) {
	b := bustest.Start(t)
	b.OpsConn(t)
	pair, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	stranger, err := pair.Seed()
	if err != nil {
		t.Fatal(err)
	}
	for name, o := range map[string]nats.Option{
		"nothing":         nats.Name("x"),
		"an unknown key":  seedOption(t, stranger),
		"a password":      nats.UserInfo("ops", "x"),
		"a token":         nats.Token("x"),
		"a bad signature": nats.Nkey(b.Keys.OpsPublic(), func([]byte) ([]byte, error) { return make([]byte, 64), nil }),
		"a configured user's key with a bad signature": nats.Nkey(b.Keys.Public(embedded.UserSec), func([]byte) ([]byte, error) { return make([]byte, 64), nil }),
	} {
		nc, err := natsdial.Connect(soon, b.URL(), nats.Timeout(soon), nats.RootCAs(b.CAFile), o)
		if err == nil {
			nc.Close()
			t.Errorf("%s: let in", name)
			continue
		}
		if !strings.Contains(err.Error(), "Authorization Violation") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
