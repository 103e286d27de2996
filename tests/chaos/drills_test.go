package chaos

import (
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// drills are small schedules with one kind of fault each, and the outcomes that it must have. Every invariant that a storm checks
// is checked here too.
var drills = []struct {
	name string
	run  func(t *testing.T, w *world)
}{
	{"quiet", func(_ *testing.T, w *world) { w.quiet() }},
	{"duplicates", func(t *testing.T, w *world) {
		m := w.runners[0]
		for range 5 {
			m.proxy.repeat(2000)
			// Some are over when their assignment comes for the third time.
			short := job{runner: m.id, rows: 20, timeout: 60 * time.Second, mustStart: true, mustComplete: true}
			long := short
			long.rows, long.pause = 2500, 15
			w.run(append(several(3, short), several(3, long)...), nil)
		}
		m.proxy.heal()
		if n, _ := m.proxy.counts(); n < 50 {
			t.Errorf("only %d messages came twice", n)
		}
	}},
	{"cuts", func(_ *testing.T, w *world) {
		// What is sent while the link is held is lost with it: frames, and the result of those that end in the meantime.
		jobs := several(8, job{runner: "r0", rows: 2000, pause: 80, timeout: 60 * time.Second, mustStart: true, mustComplete: true})
		for i, j := range jobs {
			j.last = 170 * i
		}
		m := w.runners[0]
		w.run(jobs, func() {
			w.underWay(jobs)
			<-time.After(time.Second) // the schedule's time: the first results come when the link is held for the first time
			for range 5 {
				<-time.After(200 * time.Millisecond)
				m.proxy.hold(up)
				<-time.After(700 * time.Millisecond)
				m.proxy.cut(false)
				m.proxy.heal()
			}
		})
	}},
	{"cancel", func(_ *testing.T, w *world) {
		jobs := several(4, job{runner: "r0", rows: 200, last: 600_000, timeout: 10 * time.Minute, cancelAt: 500 * time.Millisecond, mustStart: true, want: []string{"cancelled"}})
		jobs = append(jobs, several(4, job{runner: "r0", rows: 200, last: 600_000, timeout: 10 * time.Minute, hangUpAt: time.Second})...)
		w.run(jobs, nil)
		w.idleSince(toldToStop(jobs), overtime)
		w.over() // whose caller has gone is not told of the end, before which its slot is free
		w.quiet()
	}},
	{"deadline", func(_ *testing.T, w *world) {
		jobs := several(4, job{runner: "r0", rows: 200, last: 600_000, timeout: 5 * time.Second, mustStart: true, want: []string{"deadline"}})
		w.run(jobs, nil)
		w.idleSince(toldToStop(jobs), overtime)
		w.quiet()
	}},
	{"row limit", func(_ *testing.T, w *world) {
		for _, most := range []int{1, 99, 100, 101, 999, 1000} {
			w.run(several(1, job{runner: "r0", rows: 1000, most: most, timeout: 60 * time.Second, mustStart: true, mustComplete: true}), nil)
		}
	}},
	{"killed", func(_ *testing.T, w *world) {
		jobs := several(6, job{runner: "r0", rows: 200, last: 40_000, timeout: 90 * time.Second, mustStart: true, want: []string{"runner_lost"}})
		w.run(jobs, func() {
			w.underWay(jobs)
			w.kill(w.runners[0])
			w.start(w.runners[0])
		})
		w.idle(overtime)
		w.quiet()
	}},
	{"replaced", func(_ *testing.T, w *world) {
		one := job{runner: "r0", rows: 200, last: 90_000, timeout: 120 * time.Second, mustStart: true, want: []string{"runner_lost"}}
		if w.runners[0].link == stack.OverDials { // nothing comes of the second process
			one.last, one.want, one.mustComplete = 10_000, nil, true
		}
		jobs := several(4, one)
		w.run(jobs, func() {
			w.underWay(jobs)
			w.replace(w.runners[0])
		})
		w.quiet()
	}},
	{"stopped", func(_ *testing.T, w *world) {
		// A process that stands still accepts nothing; when it goes on, what was meant for it is too late.
		m := w.runners[0]
		m.process.Signal(w.t, syscall.SIGSTOP)
		jobs := several(4, job{runner: m.id, rows: 200, timeout: 60 * time.Second, want: []string{"outcome_unknown"}})
		w.run(jobs, nil)
		m.process.Signal(w.t, syscall.SIGCONT)
		w.quiet()
	}},
	{"too late", func(_ *testing.T, w *world) {
		// An assignment comes after its time, and no cancel with it: the control plane stood still too. It is not run.
		for give := time.Now().Add(stack.Patience); !w.late(w.runners[0]); {
			if time.Now().After(give) {
				w.t.Fatal("the control plane was never stopped before it gave its dispatches up")
			}
		}
		w.quiet()
	}},
	{"dead", func(_ *testing.T, w *world) {
		// Nobody is there, and watchers hide it.
		m := w.runners[0]
		w.kill(m)
		w.plane.Admin.AwaitRunner(w.t, m.id, false)
		began := time.Now()
		jobs := several(4, job{runner: m.id, rows: 200, timeout: 60 * time.Second, want: []string{"refused"}})
		w.run(jobs, nil)
		for _, j := range jobs {
			if j.final.Code != "runner_offline" {
				w.broken("right-outcome", "not runner_offline: %+v", j.final)
			}
		}
		w.promised("to refuse what nobody hears", time.Since(began), 5*time.Second)
		w.start(m)
		w.quiet()
	}},
	{"control plane killed", func(_ *testing.T, w *world) {
		w.run(several(6, job{runner: "r0", rows: 1000, pause: 200, last: 2000, timeout: 60 * time.Second, bereft: true}), func() {
			<-time.After(time.Second) // the schedule's time
			w.restart()
		})
		w.idle(60 * time.Second)
		w.freed(2 * time.Minute) // in which a runner keeps the results for a control plane that was killed
	}},
	{"nothing is kept", func(_ *testing.T, w *world) {
		before := w.baseline()
		for range 10 {
			w.run(several(few, job{runner: "r0", rows: 300, timeout: 60 * time.Second, mustStart: true, mustComplete: true}), nil)
		}
		w.settled(&before)
	}},
}

// late has a runner get an assignment after its time, and says whether no cancel can have come with it: the control plane was stopped
// before it gave it up. It is one assignment, since of several some may leave in a second message.
func (w *world) late(m *member) (alone bool) {
	const (
		acceptWithin = 2 * time.Second // DESIGN, "Dispatch"
		clockBound   = 5 * time.Second // a runner may take its clock to be wrong by the round trip of its hello, which takes as long at most
		pingsFor     = 3 * time.Second // a runner that has no answer to its pings for so long may make its link anew
	)
	work := w.seen[byRunner]
	if m.link == stack.OverDials {
		work = w.seen[ofWork]
	}
	const dropped = "an assignment came too late and was dropped unrun"
	drops := func() int { return strings.Count(m.process.Stderr.String(), dropped) }
	before, dropsBefore, began := work.Load(), drops(), time.Now()
	m.process.Signal(w.t, syscall.SIGSTOP)
	j := &job{runner: m.id, rows: 200, last: 1000, timeout: 60 * time.Second, want: []string{"refused"}}
	w.run([]*job{j}, func() {
		eventually(5*time.Second, func() bool { return work.Load() > before })
		w.plane.Signal(w.t, syscall.SIGSTOP)
		if alone = time.Since(began) < acceptWithin; !alone {
			j.want = append(j.want, "outcome_unknown")
		}
		<-time.After(acceptWithin + clockBound)
		resumed := time.Now()
		m.process.Signal(w.t, syscall.SIGCONT)
		eventually(pingsFor, func() bool { return w.executed(j) > 0 || drops() > dropsBefore }) // it has as long to begin, if it does
		w.plane.Signal(w.t, syscall.SIGCONT)
		if time.Since(resumed) >= pingsFor {
			j.want = append(j.want, "outcome_unknown")
		}
	})
	if n := w.executed(j); n > 0 {
		w.broken("expired", "executed %d times after its time: %s", n, j)
	}
	return alone
}

// several is n jobs like one.
func several(n int, one job) []*job {
	jobs := make([]*job, n)
	for i := range jobs {
		j := one
		jobs[i] = &j
	}
	return jobs
}

// Each kind of fault has its outcome over each kind of link, while watchers listen to everything.
func TestDrills(t *testing.T) {
	stack.EachLink(t, func(t *testing.T, link stack.Link) {
		t.Parallel()
		for _, d := range drills {
			t.Run(d.name, func(t *testing.T) {
				began := time.Now()
				for spare := mostAgain; ; spare-- {
					w := newWorld(t, readable, []stack.Link{link}, few, nil)
					w.spare = spare
					w.eavesdrop(w.runners[0])
					d.run(t, w)
					w.watched()
					if !w.excused || t.Failed() {
						break
					}
					say("chaos: drill %q, %s, is done again\n", d.name, link)
				}
				say("chaos: drill %q, %s: %s\n", d.name, link, time.Since(began).Round(100*time.Millisecond))
			})
		}
	})
}

// drillNamed reports whether there is one.
func drillNamed(name string) bool {
	return slices.ContainsFunc(drills, func(d struct {
		name string
		run  func(t *testing.T, w *world)
	}) bool {
		return d.name == name
	})
}
