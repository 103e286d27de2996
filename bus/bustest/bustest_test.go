package bustest_test

import (
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/schemas"
)

func TestMain(m *testing.M) { leak.Main(m) }

// Every connection a test may ask for is made, and a message passes from a runner to the replica and to ops.
func TestEverybodyConnects(t *testing.T) {
	b := bustest.Start(t)
	for _, u := range embedded.Users() {
		if err := b.Conn(t, u).FlushTimeout(time.Minute); err != nil {
			t.Errorf("%s: %v", u, err)
		}
	}
	ref := schemas.RunnerRef{Tenant: "acme", Runner: "a.b"}
	replica := b.Conn(t, embedded.UserServe)
	serve, err := replica.SubscribeSync(schemas.AllHeartbeats)
	if err != nil {
		t.Fatal(err)
	}
	if err := replica.FlushTimeout(time.Minute); err != nil {
		t.Fatal(err)
	}
	ops := b.OpsConn(t)
	view, err := ops.SubscribeSync("runbus.v1.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := ops.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := b.OpsSysConn(t).Flush(); err != nil {
		t.Fatal(err)
	}
	runner := b.RunnerConn(t, ref)
	if err := runner.Publish(schemas.HeartbeatSubject(ref), []byte("beat")); err != nil {
		t.Fatal(err)
	}
	if m, err := serve.NextMsg(time.Minute); err != nil || string(m.Data) != "beat" {
		t.Errorf("the replica got %v, %v", m, err)
	}
	if m, err := view.NextMsg(time.Minute); err != nil || m.Subject != schemas.HeartbeatSubject(ref) {
		t.Errorf("ops got %v, %v", m, err)
	}
}
