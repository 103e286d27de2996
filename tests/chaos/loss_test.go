package chaos

import (
	"math/rand/v2"
	"testing"
	"time"
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
	w := newWorld(t, sealed, len(cuttings), few, nil)
	w.eavesdrop(w.runners[0])
	var jobs []*job
	for i := range cuttings {
		jobs = append(jobs,
			&job{runner: w.runners[i].id, rows: 100 * seconds, pause: 1000, timeout: 5 * time.Minute, mustStart: true, mustComplete: true},
			&job{runner: w.runners[i].id, rows: 1000, first: 1000 * seconds, timeout: 5 * time.Minute, mustStart: true, mustComplete: true})
	}
	at := time.Duration(1000*earliest+r.IntN(1000*(latest-earliest))) * time.Millisecond
	w.run(jobs, func() {
		<-time.After(at) // the schedule's time
		for i, c := range cuttings {
			c.begin(w.runners[i].proxy)
		}
		<-time.After(cutLasts)
		for _, m := range w.runners {
			m.proxy.heal()
		}
	})
	for k, j := range jobs {
		c := cuttings[k/2]
		w.remade(w.runners[k/2], c.name)
		say("chaos: cut %s for %s, %s into a fetch of %d s: %s after %s, %d rows, executed %d times\n",
			c.name, cutLasts, at.Round(time.Millisecond), seconds, j.outcome(), j.took.Round(time.Millisecond), j.got, w.origin.executed(j.marker))
	}
	w.watched()
	w.free()
}

// The same in the middle of a result: of a GiB in the long run. Memory stays flat.
func TestCutInALargeResult(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(drawSeed(t), 2))
	rows := 48 << 10
	if *longFlag {
		rows = 1 << 20
	}
	for _, c := range cuttings {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, sealed, 1, few, nil)
			m := w.runners[0]
			w.eavesdrop(m)
			j := &job{
				runner: m.id, rows: rows, large: true, timeout: 10 * time.Minute, mustStart: true, mustComplete: true,
				tellAt: rows/5 + r.IntN(rows/2), told: make(chan struct{}),
			}
			w.run([]*job{j}, func() {
				select {
				case <-j.told:
				case <-time.After(5 * time.Minute):
					t.Errorf("%d rows did not come", j.tellAt)
				}
				c.begin(m.proxy)
				<-time.After(cutLasts)
				m.proxy.heal()
			})
			w.remade(m, c.name)
			if source := w.origin.sum(j.marker); source == "" || j.sum != source {
				w.broken("rows", "the checksum of what came is %q, of the source %q: %s", j.sum, source, j)
			}
			plane, runner := w.plane.PeakMemory(t), m.process.PeakMemory(t)
			say("chaos: cut %s for %s at row %d of %d rows of %d bytes: %s after %s, %d rows, executed %d times, sha256 %.16s…; peak resident memory: control plane %d MiB, runner %d MiB\n",
				c.name, cutLasts, j.tellAt, rows, rowBytes, j.outcome(), j.took.Round(time.Millisecond), j.got, w.origin.executed(j.marker), j.sum, plane>>20, runner>>20)
			if plane > planeMemory || runner > runnerMemory {
				w.broken("memory", "the control plane had %d MiB resident, the runner %d", plane>>20, runner>>20)
			}
			w.watched()
			w.free()
		})
	}
}

// remade fails unless the runner has a new link: else nothing was cut.
func (w *world) remade(m *member, how string) {
	w.t.Helper()
	if n := m.proxy.made(); n < 2 {
		w.t.Errorf("the link of %s that was cut (%s) was never made again", m.id, how)
	}
}
