package auth

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// ends gives an option and a channel that tells that the connection was closed.
func ends() (nats.Option, <-chan struct{}) {
	c := make(chan struct{})
	return nats.ClosedHandler(func(*nats.Conn) { close(c) }), c
}

func TestARevocationCutsLiveConnections(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	admin, _ := e.tenant(t, "acme")
	key, secret := e.key(t, admin, "edge")
	other, otherSecret := e.key(t, admin, "other")
	var cut []<-chan struct{}
	for i := range 3 {
		o, end := ends()
		_, err := e.runner(t, schemas.RunnerRef{Tenant: "acme", Runner: fmt.Sprintf("edge-%d", i)}, proof(key, secret), o)
		must(t, err)
		cut = append(cut, end)
	}
	bystander, err := e.runner(t, schemas.RunnerRef{Tenant: "acme", Runner: "other"}, proof(other, otherSecret))
	must(t, err)

	// Revoked at another replica, which served no connection and has no callout.
	there := e.newAuth(t)
	start := time.Now()
	_, err = there.RevokeKey(t.Context(), admin, key.ID)
	must(t, err)
	for _, end := range cut {
		wait(t, "the end of a connection of the revoked key", end)
	}
	t.Logf("3 connections were cut %v after the call to revoke began", time.Since(start))

	ref := schemas.RunnerRef{Tenant: "acme", Runner: "edge-0"}
	nc, err := e.runner(t, ref, proof(key, secret))
	must(t, err)
	if account, _ := e.place(t, nc); account != "JAIL" {
		t.Errorf("the revoked key landed in %s", account)
	}
	why := ask(t, nc, ref, &runbusv1.RunnerHello{RunnerId: ref.Runner}, secret)
	if why.GetMessage() != `the service-account key "sa-edge" was revoked` {
		t.Errorf("told %q", why.GetMessage())
	}
	if err := bystander.FlushTimeout(patience); err != nil {
		t.Errorf("the connection of another key: %v", err)
	}
}

// newTestCallout is a callout that is not served, to look at its parts.
func newTestCallout(t *testing.T, e *env) *callout {
	return &callout{
		a: e.auth, log: e.Log, links: newLinks(), notes: newNotes(e.clock.Now),
		c: CalloutConfig{Sys: e.Conn(t, embedded.UserSys), Jail: bus.NewConn(e.Conn(t, embedded.UserJail)), Bound: e.boundTo, Log: e.Log},
	}
}

// scanned scans until a scan is done: the server may answer one too late, and one that would cut what has just gone fails as well.
func scanned(t *testing.T, k *kicker) {
	t.Helper()
	for give := time.Now().Add(patience); ; <-time.After(10 * time.Millisecond) {
		err := k.scan(t.Context())
		if err == nil {
			return
		}
		if time.Now().After(give) {
			t.Fatal(err)
		}
		t.Log(err)
	}
}

// A scan that failed is not left to the next regular one, half a minute later.
func TestAFailedScanIsMadeAgainSoon(t *testing.T) {
	e := newEnv(t)
	k := newKicker(newTestCallout(t, e))
	defer k.late.timer.Stop()
	defer k.retry.Stop()
	var said warnings
	k.s.log = slog.New(&said)
	servers := k.s.c.Sys
	k.s.c.Sys = new(nats.Conn) // is not connected
	var pauses []time.Duration
	for range 7 {
		k.look(t.Context())
		pauses = append(pauses, k.pause)
	}
	if want := []time.Duration{rescanLate, 2 * rescanLate, 4 * rescanLate, 8 * rescanLate, rescanEvery, rescanEvery, rescanEvery}; !slices.Equal(pauses, want) || said != 1 {
		t.Errorf("scans that fail are made again after %v, and %d of them warned of", pauses, said)
	}
	if !k.retry.Stop() {
		t.Error("no scan is due after one that failed")
	}
	k.retry.Reset(time.Hour)
	k.s.c.Sys = servers
	for give := time.Now().Add(patience); k.pause > 0; { // a look that the server answers too late fails as well
		if k.look(t.Context()); time.Now().After(give) {
			t.Fatal("another scan is due after one that did not fail")
		}
	}
	if k.retry.Stop() {
		t.Error("another scan is due after one that did not fail")
	}
}

// warnings counts what is logged as one.
type warnings int

func (w *warnings) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelWarn }

func (w *warnings) Handle(context.Context, slog.Record) error {
	*w++
	return nil
}

func (w *warnings) WithAttrs([]slog.Attr) slog.Handler { return w }

func (w *warnings) WithGroup(string) slog.Handler { return w }

func TestAScanFindsWhatSlippedThrough(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	admin, _ := e.tenant(t, "acme")
	good, goodSecret := e.key(t, admin, "good")
	key, secret := e.key(t, admin, "edge")
	oGood, endGood := ends()
	_, err := e.runner(t, schemas.RunnerRef{Tenant: "acme", Runner: "good"}, proof(good, goodSecret), oGood)
	must(t, err)
	o, end := ends()
	_, err = e.runner(t, schemas.RunnerRef{Tenant: "acme", Runner: "edge"}, proof(key, secret), o)
	must(t, err)

	// This one let nobody in itself, so it finds connections by its scan alone.
	k := newKicker(newTestCallout(t, e))
	scanned(t, k)
	select {
	case <-end:
		t.Fatal("a live key was cut")
	default:
	}
	// Revoked in the view alone: no revocation is told to the callout that serves.
	row, err := e.auth.keys.Get(t.Context(), keyNameKey("acme", "edge"))
	must(t, err)
	now := time.Now()
	row.Value.Keys[0].RevokedAt = &now
	e.auth.dir.mu.Lock()
	e.auth.dir.public[key.PublicKey] = row.Value.Keys[0]
	e.auth.dir.mu.Unlock()
	scanned(t, k)
	wait(t, "the end of the connection", end)
	select {
	case <-endGood:
		t.Error("a live key was cut")
	default:
	}
}

func TestRememberedLinksAreCutOnWhateverServer(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	admin, _ := e.tenant(t, "acme")
	key, secret := e.key(t, admin, "edge")
	o, end := ends()
	nc, err := e.runner(t, schemas.RunnerRef{Tenant: "acme", Runner: "edge"}, proof(key, secret), o)
	must(t, err)
	id, err := nc.GetClientID()
	must(t, err)
	s := newTestCallout(t, e)
	s.report(&jwt.AuthorizationRequestClaims{AuthorizationRequest: jwt.AuthorizationRequest{
		Server: jwt.ServerID{ID: e.ID()}, ClientInformation: jwt.ClientInformation{ID: id},
	}}, verdict{place: placeRun, key: key.PublicKey})
	if n := len(s.links.byKey[key.PublicKey]); n != 1 {
		t.Fatalf("%d connections are remembered", n)
	}
	newKicker(s).cutLinks(t.Context(), key) // the key is live: a scan would not cut it
	wait(t, "the end of the connection", end)
}

func TestAConnectionEndsWithItsKey(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	admin, _ := e.tenant(t, "acme")
	for spare := 8 * time.Second; ; spare *= 3 { // that it may take to mint it and to connect
		name := "edge-" + spare.String()
		e.clock.set(-KeyLife + spare)
		key, secret := e.key(t, admin, name)
		e.clock.set(0)
		o, end := ends()
		nc, err := e.runner(t, schemas.RunnerRef{Tenant: "acme", Runner: name}, proof(key, secret), o)
		account := ""
		if err == nil { // else the key ended between the answer and its use
			var there bool
			if account, _, there = e.find(t, nc); there && account == "RUN" {
				wait(t, "the end of the connection of the expired key", end)
				return
			}
			nc.Close()
		}
		if spare > patience {
			t.Fatalf("landed in %q: %v", account, err)
		}
	}
}

func TestTheKickerNeverBlocks(t *testing.T) {
	k := newKicker(&callout{})
	for range 10_000 {
		k.revoked(Key{})
	}
	if len(k.keys) != cap(k.keys) || len(k.rescan) != 1 {
		t.Errorf("%d keys and %d scans are due", len(k.keys), len(k.rescan))
	}
	k.stop()
	<-k.rescan
	k.revoked(Key{})
	if len(k.rescan) != 0 {
		t.Error("a stopped kicker takes revocations")
	}
}

func TestLinksAreBounded(t *testing.T) {
	l := newLinks()
	for i := range 1000 {
		l.add("k", link{server: "s", client: uint64(i)})
	}
	got := l.take("k")
	if len(got) != 64 || got[63].client != 999 || len(l.take("k")) != 0 {
		t.Errorf("%d links", len(got))
	}
}
