package chaos

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// cutLasts is how long a link is cut in the middle of a fetch or of a result. It is less than the grace.
const cutLasts = 10 * time.Second

// cuttings are the ways in which a link is cut.
var cuttings = []struct {
	name  string
	begin func(*proxy)
}{
	{"hard", (*proxy).refuse},
	{"silent", (*proxy).blacken},
}

// What the processes may have resident at most while they move a result of any size (SPEC D15).
const (
	planeMemory  = 200 << 20
	runnerMemory = 300 << 20
)

// A link that is cut for ten seconds, hard or silently, in the middle of a fetch: one execution, one outcome, the whole result.
// The source computes before its first row, or sends rows all the time: for a minute in the long run.
func TestCutInAFetch(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(drawSeed(t), 1))
	seconds, earliest, latest := 16, 1, 5
	if *longFlag {
		seconds, earliest, latest = 60, 15, 40
	}
	var links []stack.Link
	for _, link := range stack.Links {
		links = append(links, slices.Repeat([]stack.Link{link}, len(cuttings))...)
	}
	w := newWorld(t, sealed, links, few, nil)
	w.eavesdrop(w.runners[0])
	at := time.Duration(1000*earliest+r.IntN(1000*(latest-earliest))) * time.Millisecond
	for w.spare = mostAgain; ; w.spare-- {
		w.excused = false
		w.cutInAFetch(seconds, at)
		if !w.excused || t.Failed() {
			break
		}
		say("chaos: the cuts are done again\n")
		w.awaitAll()
	}
	w.watched()
	w.free()
}

// cutInAFetch cuts the links of all runners, which each run two fetches of so many seconds, at some time into them.
func (w *world) cutInAFetch(seconds int, at time.Duration) {
	w.t.Helper()
	var jobs []*job
	for _, m := range w.runners {
		m.made = m.proxy.made()
	}
	for _, m := range w.runners {
		jobs = append(jobs,
			&job{runner: m.id, rows: 100 * seconds, pause: 1000, timeout: 5 * time.Minute, mustStart: true, mustComplete: true},
			&job{runner: m.id, rows: 1000, first: 1000 * seconds, timeout: 5 * time.Minute, mustStart: true, mustComplete: true})
	}
	w.run(jobs, func() {
		w.underWay(jobs) // else it is refused, which proves nothing
		<-time.After(at) // the schedule's time
		for i, m := range w.runners {
			cuttings[i%len(cuttings)].begin(m.proxy)
		}
		<-time.After(cutLasts)
		for _, m := range w.runners {
			m.proxy.heal()
		}
	})
	for k, j := range jobs {
		m, c := w.runners[k/2], cuttings[k/2%len(cuttings)]
		w.remade(m, c.name)
		say("chaos: %s cut %s for %s, %s into a fetch of %d s: %s after %s, %d rows, executed %d times\n",
			m.link, c.name, cutLasts, at.Round(time.Millisecond), seconds, j.outcome(), j.took.Round(time.Millisecond), j.got, w.executed(j))
	}
}

// The same in the middle of a result: of a GiB in the long run. Memory stays flat.
func TestCutInALargeResult(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(drawSeed(t), 2))
	rows := 48 << 10
	if *longFlag {
		rows = 1 << 20
	}
	at := rows/5 + r.IntN(rows/2)
	stack.EachLink(t, func(t *testing.T, link stack.Link) {
		t.Parallel()
		for _, c := range cuttings {
			t.Run(c.name, func(t *testing.T) { cutInALargeResult(t, link, c.name, c.begin, rows, at) })
		}
	})
}

func cutInALargeResult(t *testing.T, link stack.Link, how string, begin func(*proxy), rows, at int) {
	w := newWorld(t, sealed, []stack.Link{link}, few, longGrace())
	m := w.runners[0]
	w.eavesdrop(m)
	told := make(chan struct{})
	j := &job{
		runner: m.id, rows: rows, large: true, timeout: 10 * time.Minute, mustStart: true, mustComplete: true,
		each: func(row int) {
			if row == at {
				close(told)
			}
		},
	}
	w.run([]*job{j}, func() {
		select {
		case <-told:
		case <-time.After(5 * time.Minute):
			t.Errorf("%d rows did not come", at)
		}
		begin(m.proxy)
		<-time.After(cutLasts)
		m.proxy.heal()
	})
	w.remade(m, how)
	if source := w.origin.sum(j.marker); source == "" || j.sum != source {
		w.broken("rows", "the checksum of what came is %q, of the source %q: %s", j.sum, source, j)
	}
	plane, runner := w.plane.PeakMemory(t), m.process.PeakMemory(t)
	say("chaos: %s cut %s for %s at row %d of %d rows of %d bytes: %s after %s, %d rows, executed %d times, sha256 %.16s…; peak resident memory: control plane %d MiB, runner %d MiB\n",
		link, how, cutLasts, at, rows, rowBytes, j.outcome(), j.took.Round(time.Millisecond), j.got, w.executed(j), j.sum, plane>>20, runner>>20)
	if plane > planeMemory || runner > runnerMemory {
		w.broken("memory", "the control plane had %d MiB resident, the runner %d", plane>>20, runner>>20)
	}
	w.watched()
	w.free()
}

// remade fails unless the runner gets a new link: else nothing was cut.
func (w *world) remade(m *member, how string) {
	w.t.Helper()
	if !eventually(stack.Patience, func() bool { return m.proxy.made() > m.made }) {
		w.t.Errorf("the link of %s that was cut (%s) was never made again", m.id, how)
	}
}
