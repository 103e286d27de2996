package auth

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"

	buslink "github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/internal/natsdial"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// dialledRunners is what cp/enrol and cp/roster would say of dialled runners.
type dialledRunners struct {
	mu     sync.Mutex
	tokens map[string]LinkIdentity // one-time
	server map[string]string       // of each token
	ended  map[string]bool         // leaves
	broken bool                    // the registry can't be read
	tell   []func()
}

func (d *dialledRunners) config() LinkConfig {
	return LinkConfig{
		InProcess: true,
		Token: func(token, serverID string, _ time.Time) (LinkIdentity, error) {
			d.mu.Lock()
			defer d.mu.Unlock()
			who, ok := d.tokens[token]
			if !ok || d.server[token] != serverID {
				return LinkIdentity{}, errors.New("no such token")
			}
			delete(d.tokens, token)
			return who, nil
		},
		Leaf: func(_ schemas.RunnerRef, fingerprint string) (time.Time, error) {
			d.mu.Lock()
			defer d.mu.Unlock()
			switch {
			case d.broken:
				return time.Time{}, schemas.Errorf(schemas.CodeUnavailable, "can't be read")
			case d.ended[fingerprint]:
				return time.Time{}, schemas.Errorf(schemas.CodeForbidden, "not the one on record")
			}
			return time.Now().Add(time.Hour), nil
		},
		OnEnded: func(fn func()) {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.tell = append(d.tell, fn)
		},
	}
}

// token is one for a link to that server.
func (d *dialledRunners) token(t *testing.T, serverID string, ref schemas.RunnerRef, leaf string) string {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	token := LinkTokenPrefix + schemas.NewID()
	if d.tokens == nil {
		d.tokens, d.server, d.ended = map[string]LinkIdentity{}, map[string]string{}, map[string]bool{}
	}
	d.tokens[token], d.server[token] = LinkIdentity{Ref: ref, Fingerprint: leaf}, serverID
	return token
}

// again is a function that makes a token that is good now as good as that once more, for the next try of who shows it.
func (d *dialledRunners) again(token string) func() {
	d.mu.Lock()
	defer d.mu.Unlock()
	who, good := d.tokens[token]
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if good {
			d.tokens[token] = who
		}
	}
}

// forget ends a leaf, and tells nobody.
func (d *dialledRunners) forget(leaf string) (tell []func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended[leaf] = true
	return d.tell
}

func (d *dialledRunners) end(leaf string) {
	for _, fn := range d.forget(leaf) {
		fn()
	}
}

// spliced is the dialer of a client whose link was dialled and spliced.
type spliced struct {
	t *testing.T
	e *env
}

func (s spliced) SkipTLSHandshake() bool { return true }

func (s spliced) Dial(string, string) (net.Conn, error) {
	l, err := new(net.ListenConfig).Listen(s.t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer func() { _ = l.Close() }()
	near, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, err
	}
	far, err := l.Accept()
	if err != nil {
		return nil, err
	}
	server, err := s.e.Dial()
	if err != nil {
		return nil, err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = buslink.Splice(context.Background(), far, server)
	}()
	s.t.Cleanup(func() { _ = near.Close(); <-ended })
	return near, nil
}

// linked connects as a dialled runner does: again when the link ended without a word, for what was said last on it may be lost.
func (e *env) linked(t *testing.T, ref schemas.RunnerRef, token string, o ...nats.Option) (*nats.Conn, error) {
	t.Helper()
	again := e.links.again(token)
	options := append([]nats.Option{
		nats.SetCustomDialer(spliced{t, e}), nats.SkipHostLookup(), nats.Timeout(patience), nats.NoReconnect(), nats.IgnoreDiscoveredServers(),
		nats.Name(schemas.ConnectName(ref.Runner, schemas.NewID())), nats.CustomInboxPrefix(schemas.InboxPrefix(ref)),
		nats.UserInfoHandler(func() (string, string) { again(); return LinkUser(ref), token }),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}),
	}, o...)
	for give := time.Now().Add(patience); ; {
		nc, err := natsdial.Connect(patience, "nats://link.invalid:4222", options...)
		if err == nil {
			t.Cleanup(nc.Close)
		}
		if !errors.Is(err, io.EOF) || time.Now().After(give) {
			return nc, err
		}
	}
}

// A dialled runner is let in by the token of its link, once, as itself, and lands where an outbound one does.
func TestALinkTokenLetsItsRunnerIn(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	ref := schemas.RunnerRef{Tenant: "acme", Runner: schemas.NewRunnerID()}
	token := e.links.token(t, e.ID(), ref, "leaf-1")
	nc, err := e.linked(t, ref, token)
	must(t, err)
	account, c := e.place(t, nc)
	if account != "RUN" || c.User != ref.String() {
		t.Errorf("the runner is in %s as %q", account, c.User)
	}
	tags := map[string]bool{}
	for _, tag := range c.Tags {
		tags[tag] = true
	}
	if !tags["leaf:leaf-1"] || len(tags) != 2 {
		t.Errorf("tagged %v", c.Tags)
	}
	other := schemas.RunnerRef{Tenant: "acme", Runner: schemas.NewRunnerID()}
	rival := schemas.RunnerRef{Tenant: "rival", Runner: ref.Runner}
	outbound := schemas.RunnerRef{Tenant: "acme", Runner: "edge"}
	e.links.forget("replaced")
	for name, try := range map[string]struct {
		ref   schemas.RunnerRef
		token string
	}{
		"a token that was used":        {ref, token},
		"no such token":                {ref, LinkTokenPrefix + "x"},
		"a token of another server":    {ref, e.links.token(t, "OTHER", ref, "leaf-1")},
		"another runner's token":       {other, e.links.token(t, e.ID(), ref, "leaf-1")},
		"another tenant's token":       {rival, e.links.token(t, e.ID(), ref, "leaf-1")},
		"an outbound runner's id":      {outbound, e.links.token(t, e.ID(), outbound, "leaf-1")},
		"a token of a leaf that ended": {ref, e.links.token(t, e.ID(), ref, "replaced")},
	} {
		if _, err := e.linked(t, try.ref, try.token); !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("%s: %v", name, err)
		}
	}
	e.links.mu.Lock()
	e.links.broken = true
	e.links.mu.Unlock()
	if _, err := e.linked(t, ref, e.links.token(t, e.ID(), ref, "leaf-1")); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("while the registry can't be read: %v", err)
	}
	if err := nc.FlushTimeout(patience); err != nil {
		t.Errorf("the link in use: %v", err)
	}
}

// Who comes by a port is not let in by a link token, even the right one in time; and it stays good for its runner.
func TestALinkTokenIsWorthNothingOnAPort(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	ref := schemas.RunnerRef{Tenant: "acme", Runner: schemas.NewRunnerID()}
	token := e.links.token(t, e.ID(), ref, "leaf-1")
	if _, err := e.runner(t, ref, nats.UserInfo(LinkUser(ref), token)); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("on the port: %v", err)
	}
	if _, err := e.linked(t, ref, token); err != nil {
		t.Errorf("its runner, afterwards: %v", err)
	}
}

// The managed runner of this host is let in by the link that was handed to it, as its tenant's, and by nothing else (SPEC R2, E4).
func TestALinkOfTheManagedRunner(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	console := schemas.RunnerRef{Tenant: "acme", Runner: schemas.ConsoleRunner}
	rival := schemas.RunnerRef{Tenant: "rival", Runner: schemas.ConsoleRunner}
	nc, err := e.linked(t, console, e.links.token(t, e.ID(), console, "key-1"))
	must(t, err)
	if account, c := e.place(t, nc); account != "RUN" || c.User != "acme/console" {
		t.Errorf("it is in %s as %q", account, c.User)
	}
	e.links.forget("dead")
	dialled := schemas.RunnerRef{Tenant: "acme", Runner: schemas.NewRunnerID()}
	for name, try := range map[string]struct {
		ref   schemas.RunnerRef
		token string
	}{
		"that of another tenant":          {rival, e.links.token(t, e.ID(), console, "key-1")},
		"a process that is gone":          {console, e.links.token(t, e.ID(), console, "dead")},
		"a dialled runner's":              {console, e.links.token(t, e.ID(), dialled, "leaf-1")},
		"its own, as a dialled runner":    {dialled, e.links.token(t, e.ID(), console, "key-1")},
		"one that was made for no server": {console, e.links.token(t, "", console, "key-1")},
	} {
		if _, err := e.linked(t, try.ref, try.token); !errors.Is(err, nats.ErrAuthorization) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := e.runner(t, console, nats.UserInfo(LinkUser(console), e.links.token(t, e.ID(), console, "key-1"))); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("on a port: %v", err)
	}
}

// The server itself lets nobody else in with what the callout said of a link.
func TestALinkIsPlacedWithinTheProcessOnly(t *testing.T) {
	for inProcess, want := range map[bool]int{true: 1, false: 3} {
		v := verdict{place: placeRun, subjects: Subjects{Publish: []string{"a"}, Subscribe: []string{"b"}}, inProcess: inProcess}
		u, err := v.claims("U")
		must(t, err)
		if len(u.AllowedConnectionTypes) != want || !u.AllowedConnectionTypes.Contains(jwt.ConnectionTypeInProcess) {
			t.Errorf("in process %v: %v", inProcess, u.AllowedConnectionTypes)
		}
	}
}

// An id belongs to one kind: a key that takes the id of a dialled runner is told why not.
func TestAKeyCannotTakeADialledID(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	admin, _ := e.tenant(t, "acme")
	key, secret := e.key(t, admin, "edge")
	ref := schemas.RunnerRef{Tenant: "acme", Runner: schemas.NewRunnerID()}
	nc, err := e.runner(t, ref, proof(key, secret))
	must(t, err)
	if account, _ := e.place(t, nc); account != "JAIL" {
		t.Errorf("it landed in %s", account)
	}
	why := ask(t, nc, ref, &runbusv1.RunnerHello{RunnerId: ref.Runner}, secret)
	if why.GetMessage() != schemas.ErrDialledID(ref.Runner).Message {
		t.Errorf("told %q", why.GetMessage())
	}
}

// The connections of a leaf that has ended are cut, by whatever replica hears of it, and by no other leaf's end.
func TestTheEndOfALeafCutsItsConnection(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	connect := func(leaf string) (*nats.Conn, <-chan struct{}) {
		ref := schemas.RunnerRef{Tenant: "acme", Runner: schemas.NewRunnerID()}
		o, end := ends()
		nc, err := e.linked(t, ref, e.links.token(t, e.ID(), ref, leaf), o)
		must(t, err)
		return nc, end
	}
	_, end := connect("leaf-1")
	bystander, _ := connect("leaf-2")
	e.links.end("leaf-1")
	wait(t, "the end of the connection", end)
	if err := bystander.FlushTimeout(patience); err != nil {
		t.Errorf("the connection of another leaf: %v", err)
	}
}

// A scan may come at any time, and between a revocation and the goodbye too: a runner that is not told would wait for ever for a link. So
// whoever has the link has time for that, from when a scan first sees that the leaf has ended, and not while this process stands still.
func TestAScanLeavesTimeForAGoodbye(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	ref := schemas.RunnerRef{Tenant: "acme", Runner: schemas.NewRunnerID()}
	o, end := ends()
	nc, err := e.linked(t, ref, e.links.token(t, e.ID(), ref, "leaf-1"), o)
	must(t, err)
	other := newTestCallout(t, e) // sees an end that the callout that serves does not
	var leaves dialledRunners
	leaves.token(t, e.ID(), ref, "leaf-1")
	other.c.Link = leaves.config()
	k := newKicker(other)
	scanned(t, k)
	if k.late.due || len(k.leafEnds) != 0 {
		t.Errorf("of a live leaf: %v, %v", k.late.due, k.leafEnds)
	}
	k.late.ask() // a scan comes soon for something else: too soon
	leaves.forget("leaf-1")
	const soon, late = time.Hour, -time.Minute // from when a round was to come, whatever this test itself is held up
	for _, at := range []time.Duration{0, 0, soon, late, late} {
		if at != 0 {
			k.late.at = time.Now().Add(at)
			k.late.came()
		}
		scanned(t, k)
		if err := nc.FlushTimeout(patience); err != nil {
			t.Fatalf("a runner that may be about to be told: %v", err)
		}
		if !k.late.due {
			t.Error("no scan comes later")
		}
	}
	k.late.at = time.Now().Add(soon)
	k.late.came()
	scanned(t, k)
	wait(t, "the end of the connection", end)
	for len(k.leafEnds) > 0 && t.Context().Err() == nil { // what is kept ends with the connection, a little later than its client hears of it
		if err := k.scan(t.Context()); err != nil {
			t.Log(err)
		}
	}
}

// A runner has a new leaf each day: what is remembered of connections must not grow with them.
func TestLeavesAreNotRemembered(t *testing.T) {
	s := &callout{log: slog.New(slog.DiscardHandler), links: newLinks()}
	req := &jwt.AuthorizationRequestClaims{}
	for _, key := range []string{leafTag + "one", leafTag + "two", "UKEY"} {
		s.report(req, verdict{place: placeRun, key: key})
	}
	if len(s.links.byKey) != 1 || len(s.links.take("UKEY")) != 1 {
		t.Errorf("remembered %v", s.links.byKey)
	}
}
