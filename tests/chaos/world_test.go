package chaos

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/stack"
)

// idleFor is how long a connection to the API is kept: less than the control plane's two minutes. A fetch that is sent on one just
// when it is closed there ends without an answer, as if the product had lost it.
const idleFor = 30 * time.Second

// few is what each runner of a world takes at once, if no more is asked for.
const few = 8

// The exit status of a runner whose id another process took, and of one that can't be started as it is configured.
const (
	exitReplaced = 10
	exitConfig   = 2
)

// wiring is what the proxies of a world can read.
type wiring int

const (
	readable wiring = iota // everything: a link is plaintext, or the proxy has the keys to end its TLS
	sealed                 // nothing: TLS from end to end, the proxies see bytes
	mixed                  // every second proxy ends TLS on both sides
)

// world is a control plane, a source and runners, each behind a proxy of its own. A watcher listens to all of the bus in OPS and
// another in RUN: they hide that nobody listens.
type world struct {
	t       testing.TB
	plane   *stack.Plane
	env     map[string]string
	wiring  wiring
	target  string // of the bus
	url     string // of the API
	token   string // of the admin
	slots   int    // of each runner
	origin  *origin
	runners []*member
	client  *http.Client
	seen    map[string]*atomic.Int64 // by the watchers
	conns   []*nats.Conn
	number  atomic.Int64
	ends    sync.Map // of jobs, by marker
	accepts sync.Map // …of those whose caller was told that they were accepted
	jobs    []*job   // judged
	faults  map[string]int
	spare   int  // times that its drill may be done again
	excused bool // by a standstill: what came of the drill shows nothing, and it is done again
}

// The watchers, by where they are. The copies of work in OPS are counted by themselves: they tell that an assignment was published.
const (
	inOPS    = "OPS"
	inRUN    = "RUN"
	byRunner = "RUN, by the runner's own credential"
	ofWork   = "OPS, of work"
)

// member is a runner of a world.
type member struct {
	name, id string // the same, but for a dialled one
	link     stack.Link
	token    string // of one that dials
	address  string // where one listens that is dialled
	proxy    *proxy
	made     int // links, when it took work for the first time
	process  *stack.Runner
	state    string // folder of its state
	ca       string // that it is to trust, if not the control plane's
}

// longGrace is the environment of control planes whose works are to survive cut links: a runner that returns late, since the machine is
// busy, has lost nothing. The long runs, TestCutInAFetch and TestDrills hold runners to the default (15 s).
func longGrace() map[string]string {
	if *longFlag {
		return nil
	}
	return map[string]string{"RUNNER_GRACE": "45s"}
}

// newWorld starts a control plane and a runner with so many slots for each of the links. more is the control plane's environment.
func newWorld(t testing.TB, wires wiring, links []stack.Link, slots int, more map[string]string) *world {
	t.Helper()
	env := map[string]string{"RUNBUS_DATA_DIR": filepath.Join(t.TempDir(), "data")}
	for _, listen := range []string{"RUNBUS_NATS", "RUNBUS_HTTP", "RUNBUS_WEBSOCKET"} {
		env[listen] = stack.FreeAddress(t, "127.0.0.1:0") // again when it is killed
	}
	maps.Copy(env, more)
	if wires == readable {
		env["RUNBUS_NATS_PLAINTEXT"] = "true"
	}
	w := &world{
		t: t, env: env, wiring: wires, slots: slots, origin: newOrigin(t), faults: map[string]int{}, seen: map[string]*atomic.Int64{},
		client: &http.Client{Transport: stack.Listen(t, &http.Transport{MaxIdleConnsPerHost: 512, IdleConnTimeout: idleFor})},
	}
	t.Cleanup(w.client.CloseIdleConnections)
	w.plane = stack.StartPlane(t, false, w.env)
	w.target = hostOf(w.plane.NATS)
	w.url, w.token = w.plane.HTTP, w.plane.Admin.Token
	ops := w.connect("ops")
	w.watch(inOPS, ops, "runbus.v1.>")
	w.watch(ofWork, ops, "runbus.v1.*.runner.*.work.*")
	w.watch(inRUN, w.connect("dispatch"), "runbus.v1.*.runner.*.result.>", "runbus.v1.*.runner.*.reply.>")
	for i, link := range links {
		m := &member{name: "r" + strconv.Itoa(i), link: link, state: filepath.Join(t.TempDir(), "state")}
		m.proxy = w.newProxy(m, wires == readable || wires == mixed && i%2 == 0)
		if link == stack.OverDials {
			made := w.plane.Admin.Create(t, m.name, m.proxy.addr())
			m.id = made.Runner.ID
			w.listen(m, map[string]string{"CORE_RUNNER_TICKET": made.Ticket})
		} else {
			m.id = m.name
			_, m.token = w.plane.Admin.MintKey(t, m.id)
			w.start(m)
		}
		m.made = m.proxy.made()
		w.runners = append(w.runners, m)
	}
	return w
}

// hostOf is host:port of a URL.
func hostOf(url string) string {
	_, host, _ := strings.Cut(url, "://")
	return host
}

// newProxy is the proxy of a runner, which reads what goes through it, if it should.
func (w *world) newProxy(m *member, reads bool) *proxy {
	w.t.Helper()
	p := &proxy{target: w.target, sealed: !reads}
	var between *inspection
	if reads && w.wiring != readable && m.link != stack.OverDials {
		between = newInspection(w.t, w.plane.CA)
		m.ca = between.ca
	}
	switch m.link {
	case stack.OverDials:
		m.address = stack.FreeAddress(w.t, "127.0.0.1:0")
		p.target, p.dialled = m.address, true
		if reads {
			p.shake, p.reader = impersonation{w.plane.DataDir, m.state}.shake, func(way) reader { return readPreface() }
		}
	case stack.OverWSS:
		p.target = hostOf(w.plane.WebSocket)
		p.reader = func(w way) reader { return readWebSocket(w == up) }
		if between != nil {
			p.shake = between.shakeHTTPS
		}
	default:
		if between != nil {
			p.shake = between.shakeTLS
		}
	}
	return startProxy(w.t, p)
}

// tls is how clients of the harness itself speak to the bus.
func (w *world) tls() nats.Option {
	return func(o *nats.Options) error {
		if w.wiring != readable {
			o.Secure, o.TLSConfig = true, &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: caPool(w.t, w.plane.CA)}
		}
		return nil
	}
}

// connect connects as one of the control plane's own users, or as ops, with the seed in its data folder.
func (w *world) connect(user string) *nats.Conn {
	w.t.Helper()
	text, err := os.ReadFile(filepath.Join(w.plane.DataDir, "bus-keys.json"))
	if err != nil {
		w.t.Fatal(err)
	}
	var keys struct{ Seeds map[string]string }
	if err := json.Unmarshal(text, &keys); err != nil {
		w.t.Fatal("bus-keys.json can't be read")
	}
	pair, err := nkeys.FromSeed([]byte(keys.Seeds[user]))
	if err != nil {
		w.t.Fatalf("no seed of %q", user)
	}
	public, err := pair.PublicKey()
	if err != nil {
		w.t.Fatal(err)
	}
	nc, err := stack.Connect("nats://"+w.target, nats.Nkey(public, pair.Sign), nats.Name("chaos-"+user), nats.MaxReconnects(-1),
		w.tls(), nats.ReconnectWait(100*time.Millisecond), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		w.t.Fatalf("connect as %s: %v", user, err)
	}
	w.t.Cleanup(nc.Close)
	w.conns = append(w.conns, nc)
	return nc
}

// watch subscribes subjects and counts what comes.
func (w *world) watch(where string, nc *nats.Conn, subjects ...string) {
	w.t.Helper()
	seen := w.seen[where]
	if seen == nil {
		seen = new(atomic.Int64)
		w.seen[where] = seen
	}
	for _, subject := range subjects {
		if _, err := nc.Subscribe(subject, func(*nats.Msg) { seen.Add(1) }); err != nil {
			w.t.Fatal(err)
		}
	}
	if err := nc.FlushTimeout(stack.Patience); err != nil {
		w.t.Fatal(err)
	}
}

// watched fails unless every watcher sees something.
func (w *world) watched() {
	w.t.Helper()
	for where, seen := range w.seen {
		if !eventually(stack.Patience, func() bool { return seen.Load() > 0 }) { // it is told on a connection of its own
			w.t.Errorf("the watcher in %s saw nothing", where)
		}
	}
}

// eavesdrop listens, with the runner's own credential, to the work and the orders of all its sessions: whatever is published there
// has a subscriber, though no runner may be left. Nobody else may subscribe them. A dialled runner has no credential but its one link.
func (w *world) eavesdrop(m *member) {
	w.t.Helper()
	if m.link == stack.OverDials {
		return
	}
	token, err := schemas.ParseServiceToken(m.token)
	if err != nil {
		w.t.Fatal(err)
	}
	public, err := token.Key.PublicKey()
	if err != nil {
		w.t.Fatal(err)
	}
	ref := schemas.RunnerRef{Tenant: token.Tenant, Runner: m.id}
	nc, err := stack.Connect("nats://"+w.target, nats.Nkey(public, token.Key.Sign), nats.Name(schemas.ConnectName(m.id, schemas.NewID())),
		w.tls(), nats.CustomInboxPrefix(schemas.InboxPrefix(ref)), nats.MaxReconnects(-1), nats.ReconnectWait(100*time.Millisecond), nats.IgnoreAuthErrorAbort(),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		w.t.Fatalf("connect as runner %s: %v", m.id, err)
	}
	w.t.Cleanup(nc.Close)
	w.watch(byRunner, nc, schemas.WorkSubject(ref, "*"), schemas.ControlSubject(ref, "*"))
}

// start starts a process of the runner and waits until it takes work.
func (w *world) start(m *member) {
	w.t.Helper()
	if m.link == stack.OverDials {
		w.listen(m, nil)
		return
	}
	m.state = filepath.Join(w.t.TempDir(), "state") // two processes under one id have one each
	addr := map[stack.Link]string{stack.OverTLS: "tls", stack.OverWSS: "wss"}[m.link]
	env := map[string]string{"RUNNER_ENROLL_TOKEN": m.token}
	if w.wiring == readable {
		addr = map[stack.Link]string{stack.OverTLS: "nats", stack.OverWSS: "ws"}[m.link]
		env["RUNNER_ENROLL_TLS"] = "false"
	}
	env["RUNNER_ENROLL_ADDR"] = addr + "://" + m.proxy.addr()
	if m.ca != "" {
		env["RUNNER_ENROLL_CA"] = m.ca
	}
	maps.Copy(env, w.ofRunner(m))
	m.process = w.plane.StartRunner(w.t, m.id, env)
}

// listen starts the process of a dialled runner, on its folder and port.
func (w *world) listen(m *member, more map[string]string) {
	w.t.Helper()
	env := w.ofRunner(m)
	env["CORE_RUNNER_LISTEN"] = m.address
	maps.Copy(env, more)
	m.process = w.plane.StartListening(w.t, m.id, m.name, env)
}

// ofRunner is the environment of every runner.
func (w *world) ofRunner(m *member) map[string]string {
	return map[string]string{"RUNNER_CONCURRENCY": strconv.Itoa(w.slots), "CORE_RUNNER_STATE_DIR": m.state}
}

// kill ends the runner's process the hard way.
func (w *world) kill(m *member) {
	w.t.Helper()
	m.process.Signal(w.t, syscall.SIGKILL)
	m.process.Exit(w.t)
}

// replace starts another process under the runner's id; the one before is to end by itself, with the status that says so. The other
// process of a dialled runner, on its one folder, does not come up.
func (w *world) replace(m *member) {
	w.t.Helper()
	if m.link == stack.OverDials {
		env := w.ofRunner(m)
		env["CORE_RUNNER_LISTEN"] = "127.0.0.1:0"
		second := stack.Start(w.t, "second process of "+m.name, w.plane.Bin.CoreRunner, env, "serve")
		if code := second.Exit(w.t); code != exitConfig || !second.Stderr.Has("in use by another runner") {
			w.broken("replaced", "a second process on the folder of %s ended with status %d: %s", m.id, code, second.Stderr)
		}
		return
	}
	before := m.process
	w.start(m)
	if !w.inTime("a replaced process ends", time.Now(), 45*time.Second, func() bool { return hasEnded(before.Process) }) {
		w.broken("replaced", "a replaced process of %s still runs", m.id)
		return
	}
	if code := before.Exit(w.t); code != exitReplaced {
		w.broken("replaced", "a replaced process of %s ended with status %d", m.id, code)
	}
}

// restart kills the control plane and starts it again on its folder and addresses; all runners come back.
func (w *world) restart() {
	w.t.Helper()
	w.plane.Signal(w.t, syscall.SIGKILL)
	w.revive()
}

// revive starts a control plane that was killed again.
func (w *world) revive() {
	w.t.Helper()
	w.plane.Exit(w.t)
	w.plane = stack.StartPlane(w.t, false, w.env)
	w.awaitAll()
}

// awaitAll waits until every runner takes work.
func (w *world) awaitAll() {
	w.t.Helper()
	for _, m := range w.runners {
		w.plane.Admin.AwaitRunner(w.t, m.id, true)
	}
}

// broken fails the test, naming the invariant.
func (w *world) broken(invariant, format string, args ...any) {
	w.t.Helper()
	w.t.Errorf("BROKEN %s: %s", invariant, fmt.Sprintf(format, args...))
}

// brokenLine finds the invariants in what a run printed.
var brokenLine = regexp.MustCompile(`BROKEN ([a-z-]+): (.*)`)

// hasEnded reports whether a process has.
func hasEnded(p *stack.Process) bool {
	select {
	case <-p.Exited():
		return true
	default:
		return false
	}
}

// eventually asks until ok, at most for d: what is asked for is a state and not an event.
func eventually(d time.Duration, ok func() bool) bool {
	give := time.Now().Add(d)
	for !ok() {
		if time.Now().After(give) {
			return false
		}
		<-time.After(25 * time.Millisecond)
	}
	return true
}
