package chaos

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

var (
	seedFlag = flag.Uint64("seed", 0, "seed of the schedule of faults; 0: RUNBUS_SEED, or one of the clock")
	longFlag = flag.Bool("long", os.Getenv("RUNBUS_LONG") != "", "run what takes many minutes too")
)

// say prints what a run shows, whether it fails or not.
func say(format string, args ...any) { _, _ = fmt.Fprintf(os.Stdout, format, args...) }

// drawSeed is the seed of this run, printed so that it can be run again.
func drawSeed(t testing.TB) uint64 {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		if text := os.Getenv("RUNBUS_SEED"); text != "" {
			n, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				t.Fatalf("RUNBUS_SEED is %q, not a number", text)
			}
			seed = n
		}
	}
	if seed == 0 {
		seed = uint64(time.Now().UnixNano()) % 1_000_000_000
	}
	say("chaos: seed %d; again: go test ./tests/chaos -run '^%s$' -seed %d\n", seed, t.Name(), seed)
	return seed
}

// fault is one of a schedule: what is done to whom, when it begins and for how long it stays.
type fault struct {
	kind      string
	runner    int
	at, holds time.Duration
}

// Kinds of faults. Those of a link and stops are survived by what runs, the others are not.
const (
	faultDelay   = "delay"
	faultSlow    = "throttle"
	faultTwice   = "duplicate"
	faultCut     = "cut"
	faultShut    = "cut for a while"
	faultSilent  = "silent"
	faultDark    = "swallowed"
	faultOneUp   = "one-way up"
	faultOneDown = "one-way down"
	faultStop    = "stop"
	faultKill    = "kill"
	faultReplace = "replace"
	faultPlane   = "kill the control plane"
	faultFreeze  = "stop the control plane"
)

var (
	mild  = []string{faultDelay, faultSlow, faultTwice, faultTwice, faultCut, faultCut, faultShut, faultSilent, faultDark, faultOneUp, faultOneDown, faultStop}
	harsh = []string{faultKill, faultReplace}
)

// wave is some jobs and the faults in the meantime.
type wave struct {
	jobs   []*job
	faults []fault
}

// plan draws a wave: each for its runners. cuts is how many hard cuts each runner gets besides.
func plan(r *rand.Rand, runners, jobs, cuts int, plane string) wave {
	var v wave
	between := func(low, high int) time.Duration { return time.Duration(low+r.IntN(high-low)) * time.Millisecond }
	fatal := make([]bool, runners)
	for i := range runners {
		if r.IntN(4) == 0 {
			v.faults = append(v.faults, fault{kind: harsh[r.IntN(len(harsh))], runner: i, at: between(100, 1500)})
			fatal[i] = true
			continue
		}
		for range 1 + r.IntN(3) {
			v.faults = append(v.faults, fault{kind: mild[r.IntN(len(mild))], runner: i, at: between(0, 2000), holds: between(100, 2500)})
		}
		for range cuts {
			v.faults = append(v.faults, fault{kind: faultCut, runner: i, at: between(0, 2500)})
		}
	}
	if plane != "" {
		v.faults = append(v.faults, fault{kind: plane, at: between(300, 1500), holds: between(300, 2500)})
	}
	slices.SortStableFunc(v.faults, func(a, b fault) int { return cmp.Compare(a.at, b.at) })
	for k := range jobs {
		i := k % runners
		j := &job{
			runner: "r" + strconv.Itoa(i), rows: r.IntN(3000), pause: r.IntN(150), last: r.IntN(600), timeout: 60 * time.Second,
			bereft: plane == faultPlane, patience: 15 * time.Second,
		}
		switch r.IntN(8) {
		case 0:
			j.cancelAt = between(1, 2000)
		case 1:
			j.hangUpAt = between(1, 2000)
		case 2:
			j.timeout = between(100, 2000)
		case 3:
			j.most = 1 + r.IntN(500)
		}
		j.mustComplete = !fatal[i] && plane != faultPlane && j.cancelAt == 0 && j.hangUpAt == 0 && j.timeout == 60*time.Second
		v.jobs = append(v.jobs, j)
	}
	return v
}

// inflict carries the faults of a wave out, and heals the world afterwards.
func (w *world) inflict(faults []fault) {
	w.t.Helper()
	began := time.Now()
	var heals []*time.Timer
	later := func(f fault, heal func()) { heals = append(heals, time.AfterFunc(f.holds, heal)) }
	var stopped []*member
	goOn := func() {
		for _, m := range stopped {
			m.process.Signal(w.t, syscall.SIGCONT)
		}
		stopped = nil
	}
	for _, f := range faults {
		<-time.After(time.Until(began.Add(f.at))) // the schedule's time
		m := w.runners[f.runner]
		if f.kind == faultTwice && m.proxy.sealed {
			f.kind = faultSlow // no message can be told from another
		}
		w.faults[f.kind]++
		switch f.kind {
		case faultDelay:
			m.proxy.slow(f.holds/25, 0)
			later(f, m.proxy.heal)
		case faultSlow:
			m.proxy.slow(0, 40<<10)
			later(f, m.proxy.heal)
		case faultTwice:
			m.proxy.repeat(400)
		case faultCut:
			m.proxy.cut(false)
		case faultShut:
			m.proxy.cut(true)
			later(f, m.proxy.heal)
		case faultSilent:
			m.proxy.hold(up, down)
			later(f, m.proxy.heal)
		case faultDark:
			m.proxy.blacken()
			later(f, m.proxy.heal)
		case faultOneUp:
			m.proxy.hold(down)
			later(f, m.proxy.heal)
		case faultOneDown:
			m.proxy.hold(up)
			later(f, m.proxy.heal)
		case faultStop:
			m.process.Signal(w.t, syscall.SIGSTOP)
			stopped = append(stopped, m)
		case faultKill:
			goOn() // a start may take longer than the grace
			w.kill(m)
			w.start(m)
		case faultReplace:
			goOn()
			w.replace(m)
		case faultFreeze:
			w.plane.Signal(w.t, syscall.SIGSTOP)
			<-time.After(f.holds)
			w.plane.Signal(w.t, syscall.SIGCONT)
		case faultPlane:
			goOn()
			for _, m := range w.runners {
				m.proxy.heal()
			}
			w.restart()
		}
	}
	<-time.After(500 * time.Millisecond) // the schedule's time: the last stop lasts at least so long
	goOn()
	for _, timer := range heals {
		timer.Stop()
	}
	for _, m := range w.runners {
		m.proxy.heal()
	}
}

// storm runs waves until enough is done, and holds the whole against the invariants. It returns a summary.
func (w *world) storm(seed uint64, perWave, cuts int, enough func(done, cuts int, began time.Time) bool) string {
	w.t.Helper()
	began := time.Now()
	before := w.baseline()
	r := rand.New(rand.NewPCG(seed, 3))
	for n := 0; ; n++ {
		plane := ""
		switch {
		case n%8 == 2:
			plane = faultPlane
		case n%4 == 1:
			plane = faultFreeze
		}
		v := plan(r, len(w.runners), perWave, cuts, plane)
		w.run(v.jobs, func() { w.inflict(v.faults) })
		w.idle(stack.Patience)
		w.awaitAll()
		if w.t.Failed() {
			w.t.Logf("seed %d, wave %d: %+v", seed, n, v.faults)
			break
		}
		_, c := w.sums()
		say("chaos: wave %d, %s: %d dispatches, %d cuts\n", n, time.Since(began).Round(time.Second), len(w.jobs), c)
		if enough(len(w.jobs), c, began) {
			break
		}
	}
	w.free()
	after := w.settled(&before)
	w.watched()
	return w.summary(seed, time.Since(began), before, after)
}

func (w *world) sums() (repeated, cuts int) {
	for _, m := range w.runners {
		r, c := m.proxy.counts()
		repeated, cuts = repeated+r, cuts+c
	}
	return repeated, cuts
}

func (w *world) summary(seed uint64, took time.Duration, before, after holdings) string {
	outcomes := map[string]int{}
	rows, executed := 0, 0
	for _, j := range w.jobs {
		outcomes[cmp.Or(j.outcome(), "caller gone")]++
		rows += j.got
		for attempt := range j.attempt + 1 {
			executed += w.origin.executed(j.marker, attempt)
		}
	}
	list := func(m map[string]int) string {
		var b strings.Builder
		for _, k := range slices.Sorted(maps.Keys(m)) {
			fmt.Fprintf(&b, " %s %d,", k, m[k])
		}
		return strings.TrimSuffix(b.String(), ",")
	}
	repeated, cuts := w.sums()
	return fmt.Sprintf(`chaos: seed %d, %s: %d dispatches, %d executions, %d rows
  outcomes:%s
  faults:%s; %d cuts of links, %d messages twice
  watchers saw %d messages in OPS, %d in RUN, %d with a runner's credential; links:%s
  held before %+v
  held after  %+v`, seed, took.Round(time.Second), len(w.jobs), executed, rows, list(outcomes), list(w.faults), cuts, repeated,
		w.seen[inOPS].Load(), w.seen[inRUN].Load(), w.seen[byRunner].Load(), w.links(), before, after)
}

// links says which runner has which link, and which proxies read messages.
func (w *world) links() string {
	var b strings.Builder
	for _, m := range w.runners {
		fmt.Fprintf(&b, " %s %s", m.name, m.link)
		if !m.proxy.sealed {
			b.WriteString(" (read)")
		}
		b.WriteByte(',')
	}
	return strings.TrimSuffix(b.String(), ",")
}

// drawLinks draws the links of n runners, at least three: each kind is among them, and the first dials.
func drawLinks(seed uint64, n int) []stack.Link {
	r := rand.New(rand.NewPCG(seed, 5))
	links := slices.Clone(stack.Links)
	for len(links) < n {
		links = append(links, stack.Links[r.IntN(len(stack.Links))])
	}
	r.Shuffle(n, func(i, j int) { links[i], links[j] = links[j], links[i] })
	i := slices.IndexFunc(links, func(l stack.Link) bool { return l != stack.OverDials })
	links[0], links[i] = links[i], links[0]
	return links
}

// Under a seeded mix of faults every dispatch keeps its promises: at most one execution, one outcome, every row once, and
// nothing is left behind. All links are TLS; the seed decides which runner has which kind.
func TestSeededMinute(t *testing.T) {
	seed := drawSeed(t)
	w := newWorld(t, mixed, drawLinks(seed, 3), few, longGrace())
	w.eavesdrop(w.runners[0])
	text := w.storm(seed, 3*few, 0, func(_, _ int, began time.Time) bool { return time.Since(began) > 15*time.Second })
	say("%s\n", text)
}

// The same for 10,000 dispatches and 1,000 reconnects.
func TestTenThousandDispatches(t *testing.T) {
	if !*longFlag {
		t.Log("many minutes: run it by scripts/chaos")
		return
	}
	seed := drawSeed(t)
	w := newWorld(t, mixed, drawLinks(seed, 4), 80, nil)
	w.eavesdrop(w.runners[0])
	text := w.storm(seed, 4*80, 9, func(done, cuts int, _ time.Time) bool { return done >= 10_000 && cuts >= 1000 })
	say("%s\n", text)
}
