package embedded_test

import (
	"runtime"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
)

// Who watches counts from the moment on at which its subscription stands, and as long as it does. The connections of the control plane in
// OPS, and the mirrors there, are no watchers; nobody else is looked for when there is nobody else.
func TestWatched(t *testing.T) {
	b := bustest.Start(t)
	work := schemas.WorkSubject(acme, "s")
	if b.Watchers() || b.Watched(work) {
		t.Error("somebody watches before anybody is there")
	}
	newStore(t.Context(), t, b)
	micro := b.Conn(t, embedded.UserMicro)
	_, err := micro.SubscribeSync("runbus.ops.*")
	if err == nil {
		err = micro.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
	if b.Watchers() || b.Watched(work) {
		t.Error("the control plane's own connections are watchers")
	}
	ops := b.OpsConn(t)
	if !b.Watchers() || b.Watched(work) {
		t.Error("ops watch without a subscription")
	}
	for _, subject := range []string{"runbus.v1.>", "runbus.v1.*.runner.*.work.*", work} {
		view, err := ops.SubscribeSync(subject)
		if err == nil {
			err = ops.Flush()
		}
		if err != nil {
			t.Fatal(err)
		}
		if !b.Watched(work) {
			t.Errorf("%s is not watched", subject)
		}
		if err = view.Unsubscribe(); err == nil {
			err = ops.Flush()
		}
		if err != nil {
			t.Fatal(err)
		}
		if b.Watched(work) {
			t.Errorf("%s is watched after its end", subject)
		}
	}
	again, err := ops.SubscribeSync("runbus.v1.>")
	if err == nil {
		err = ops.Flush()
	}
	if err != nil || !b.Watched(work) {
		t.Fatalf("%s is not watched, %v", again.Subject, err)
	}
	micro.Close() // one less of the control plane's does not hide a watcher
	if !b.Watched(work) {
		t.Error("ops are not seen when a connection of the control plane has gone")
	}
	ops.Close()
	for give := time.Now().Add(soon); b.Watchers(); runtime.Gosched() {
		if time.Now().After(give) {
			t.Fatal("ops are still there")
		}
	}
	if b.Watched(work) {
		t.Error("somebody watches who has gone")
	}
}

func BenchmarkWatched(b *testing.B) {
	bus := bustest.Start(b)
	bus.Conn(b, embedded.UserMicro)
	bus.Conn(b, embedded.UserMirror)
	work := schemas.WorkSubject(acme, "s")
	for b.Loop() {
		if bus.Watched(work) {
			b.Fatal("nobody watches")
		}
	}
}
