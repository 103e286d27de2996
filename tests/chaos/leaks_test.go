package chaos

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/tests/stack"
)

// spareGoroutines is the band in which the goroutines of a process and its open files may differ: timers, idle HTTP connections and
// their like come and go. A leak grows with the dispatches and the links.
const spareGoroutines = 12

// kept is what the server and the processes hold, as operators see it: VARZ, CONNZ and JSZ by the ops-sys credential, /metrics, /proc.
type kept struct {
	Connections   int // of all accounts
	Subscriptions int // of those connections
	Streams       int
	Consumers     int
	Goroutines    int // of the control plane
	PlaneFiles    int
	RunnerFiles   int
	planeMemory   int64 // resident
	runnerMemory  int64
}

func (k kept) String() string {
	return fmt.Sprintf("connections %d, subscriptions %d, streams %d, consumers %d; control plane: goroutines %d, files %d, %d MiB resident; runner: files %d, %d MiB resident",
		k.Connections, k.Subscriptions, k.Streams, k.Consumers, k.Goroutines, k.PlaneFiles, k.planeMemory>>20, k.RunnerFiles, k.runnerMemory>>20)
}

// noMore reports whether no more is kept than before.
func (k kept) noMore(before kept) bool {
	return k.Connections <= before.Connections && k.Subscriptions <= before.Subscriptions && k.Streams <= before.Streams && k.Consumers <= before.Consumers &&
		k.Goroutines <= before.Goroutines+spareGoroutines && k.PlaneFiles <= before.PlaneFiles+spareGoroutines && k.RunnerFiles <= before.RunnerFiles+spareGoroutines
}

// opsSys connects with the credential of ops for the system account.
func (w *world) opsSys() *nats.Conn {
	w.t.Helper()
	pair, err := nkeys.FromSeed([]byte(stack.ReadToken(w.t, w.plane.OpsSysSeed)))
	if err != nil {
		w.t.Fatal("the seed of ops-sys can't be read")
	}
	public, err := pair.PublicKey()
	if err != nil {
		w.t.Fatal(err)
	}
	nc, err := stack.Connect("nats://"+w.target, nats.Nkey(public, pair.Sign), nats.Name("chaos-ops-sys"), w.tls(), nats.MaxReconnects(-1))
	if err != nil {
		w.t.Fatalf("connect as ops-sys: %v", err)
	}
	w.t.Cleanup(nc.Close)
	return nc
}

// monitored asks the server as `nats server report` does.
func monitored(t testing.TB, ops *nats.Conn, what, query string, into any) {
	t.Helper()
	answer, err := ops.Request("$SYS.REQ.SERVER."+ops.ConnectedServerId()+"."+what, []byte(query), stack.Patience)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	body := struct {
		Data any `json:"data"`
	}{into}
	if err := json.Unmarshal(answer.Data, &body); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// look is what is kept now. m is the runner that counts.
func (w *world) look(ops *nats.Conn, m *member) (k kept) {
	w.t.Helper()
	held := w.holdings()
	k.Goroutines, k.PlaneFiles, k.RunnerFiles = held.goroutines, held.planeFiles, files(m.process.PID)
	var connz struct {
		Connections []struct {
			Subscriptions int `json:"subscriptions"`
		} `json:"connections"`
	}
	monitored(w.t, ops, "CONNZ", `{"limit":4096}`, &connz)
	k.Connections = len(connz.Connections)
	for _, c := range connz.Connections {
		k.Subscriptions += c.Subscriptions
	}
	var jsz struct{ Streams, Consumers int }
	monitored(w.t, ops, "JSZ", `{}`, &jsz)
	k.Streams, k.Consumers = jsz.Streams, jsz.Consumers
	k.planeMemory, k.runnerMemory = resident(w.t, w.plane.Process.PID), resident(w.t, m.process.PID)
	return k
}

// steady is what several looks in a row count the same: a subscription that is made anew now and then is missing for a moment, and one that is
// missed here would be taken for a leak for ever, as one that is there for a moment would hide one.
func (w *world) steady(ops *nats.Conn, m *member) (k kept) {
	w.t.Helper()
	same := 0
	k = w.look(ops, m)
	if !eventually(stack.Patience, func() bool {
		<-time.After(200 * time.Millisecond)
		one := w.look(ops, m)
		if k.Connections != one.Connections || k.Subscriptions != one.Subscriptions || k.Streams != one.Streams || k.Consumers != one.Consumers {
			same, k = 0, one
			return false
		}
		k.Goroutines, k.PlaneFiles, k.RunnerFiles = min(k.Goroutines, one.Goroutines), min(k.PlaneFiles, one.PlaneFiles), min(k.RunnerFiles, one.RunnerFiles)
		same++
		return same == looksAlike
	}) {
		w.t.Fatalf("what is kept never stays the same: %s", k)
	}
	return k
}

// looksAlike is how many looks in a row must count the same as the one before.
const looksAlike = 7

var vmRSS = regexp.MustCompile(`(?m)^VmRSS:\s+(\d+) kB`)

// resident is the memory that a process has resident, in bytes.
func resident(t testing.TB, pid int) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	m := vmRSS.FindSubmatch(b)
	if m == nil {
		t.Fatalf("process %d has no VmRSS", pid)
	}
	kb, err := strconv.ParseInt(string(m[1]), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return kb << 10
}

var (
	goroutineLine = regexp.MustCompile(`(?m)^goroutine [1-9]\d* (?:gp=\S+ m=\S+ (?:mp=\S+ )?)?\[`)
	createdLine   = regexp.MustCompile(`(?m)^created by (\S+)`)
)

// dump waits for the end of a process that has got SIGQUIT and counts the goroutines in what it prints, by who started them.
func dump(t testing.TB, p *stack.Process) (n int, by map[string]int) {
	t.Helper()
	p.Exit(t)
	text := p.Stderr.String()
	if _, behind, ok := strings.Cut(text, "SIGQUIT: quit"); ok {
		text = behind
	} else {
		t.Fatal("SIGQUIT printed no goroutines")
	}
	by = map[string]int{}
	for _, m := range createdLine.FindAllStringSubmatch(text, -1) {
		by[m[1]]++
	}
	return len(goroutineLine.FindAllString(text, -1)), by
}

// cutRound runs some jobs and cuts the link of their runner once, at a time that is drawn, then waits until it is back.
func (w *world) cutRound(r *rand.Rand, m *member, n int) {
	w.t.Helper()
	jobs := make([]*job, n)
	for i := range jobs {
		jobs[i] = &job{runner: m.id, rows: r.IntN(800), pause: r.IntN(60), last: r.IntN(300), timeout: 60 * time.Second, patience: 15 * time.Second, mustComplete: true}
	}
	before := m.proxy.made()
	w.run(jobs, func() {
		<-time.After(time.Duration(r.IntN(400)) * time.Millisecond) // the schedule's time
		m.proxy.cut(false)
	})
	if !eventually(stack.Patience, func() bool { return m.proxy.made() > before }) {
		w.broken("leak", "the link was not made again")
	}
	w.plane.Admin.AwaitRunner(w.t, m.id, true)
}

// One control plane and one runner process keep nothing of the dispatches that they have done, nor of the links that were cut: 10,000
// and 1,000 over each kind of link in the long run. The goroutines of the runner are compared with those of a process that has done little.
func TestNothingLeaks(t *testing.T) {
	t.Parallel()
	seed := drawSeed(t)
	stack.EachLink(t, func(t *testing.T, link stack.Link) {
		t.Parallel()
		nothingLeaks(t, link, seed)
	})
}

func nothingLeaks(t *testing.T, link stack.Link, seed uint64) {
	rounds, perRound := 15, 10
	if *longFlag {
		rounds = 1000
	}
	w := newWorld(t, sealed, []stack.Link{link, link}, perRound, longGrace())
	m, control := w.runners[0], w.runners[1]
	w.eavesdrop(m)
	ops := w.opsSys()
	r := rand.New(rand.NewPCG(seed, 4))
	began := time.Now()
	for _, one := range w.runners {
		w.cutRound(r, one, perRound)
	}
	w.idle(20 * time.Second)
	w.freed(20 * time.Second)
	w.baseline()
	before := w.steady(ops, m)
	done, links := len(w.jobs), m.proxy.made()
	var half kept
	for n := range rounds {
		w.cutRound(r, m, perRound)
		if t.Failed() {
			t.Fatalf("round %d", n)
		}
		if n%50 == 49 {
			say("chaos: leaks, %s: %s: %d dispatches, %d reconnects: %s\n", link, time.Since(began).Round(time.Second), len(w.jobs)-done, m.proxy.made()-links, w.look(ops, m))
		}
		if n == rounds/2 {
			half = w.look(ops, m)
		}
	}
	dispatches, reconnects := len(w.jobs)-done, m.proxy.made()-links
	w.idle(20 * time.Second)
	w.freed(20 * time.Second)
	var after kept
	if !eventually(stack.Patience, func() bool { after = w.look(ops, m); return after.noMore(before) }) {
		w.broken("leak", "kept before: %s\nkept after: %s", before, after)
	}
	w.watched()
	for _, one := range w.runners { // both at once: goroutines that wait for more work end after some seconds
		one.process.Signal(t, syscall.SIGQUIT)
	}
	many, manyBy := dump(t, m.process.Process)
	few, fewBy := dump(t, control.process.Process)
	if many > few+spareGoroutines {
		w.broken("leak", "the runner has %d goroutines, one that did little %d: %s", many, few, more(manyBy, fewBy))
	}
	say("chaos: leaks, %s: %s: %d dispatches, %d reconnects\n  before  %s\n  halfway %s\n  after   %s\n  goroutines of the runner %d, of one that did little %d (band %d)\n",
		link, time.Since(began).Round(time.Second), dispatches, reconnects, before, half, after, many, few, spareGoroutines)
	if reconnects < rounds {
		t.Errorf("only %d reconnects in %d rounds", reconnects, rounds)
	}
}

// more lists what a has more of than b.
func more(a, b map[string]int) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(a)) {
		if a[k] > b[k] {
			out = append(out, fmt.Sprintf("%s %d, not %d", k, a[k], b[k]))
		}
	}
	return strings.Join(out, "; ")
}
