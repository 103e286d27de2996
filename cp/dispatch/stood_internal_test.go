package dispatch

import (
	"testing"
	"time"
)

// A runner that has accepted is not taken for one that has not because this process stood still: the time in which it did is added to that for
// an acceptance, once, and not beyond the deadline of the fetch; and no more than mostSpared, however often. A clock that goes on as it should adds nothing.
func TestAStandstillPutsOffTheAcceptance(t *testing.T) {
	const within = int64(2 * time.Second)
	start := func(timeout int64) (*Dispatcher, *run) {
		d := &Dispatcher{began: time.Now(), spare: int64(mostSpared)}
		r := &run{}
		r.endsAt = d.clock() + timeout
		if err := d.enter(r, false); err != nil { // looks begin
			t.Fatal(err)
		}
		r.stood = d.stood.Load()
		r.dueAt(d.clock() + within)
		return d, r
	}
	after := func(d *Dispatcher, passed time.Duration) (now int64) {
		d.began = d.began.Add(-passed)
		d.look()
		return d.coarse.Load()
	}

	d, r := start(10 * within)
	due := r.due
	now := after(d, 3*time.Second)
	if now < due || !d.spared(r, now) || r.due < due+int64(3*time.Second) || r.wakeAt.Load() != r.due {
		t.Errorf("after a standstill: now %d, due %d, before %d, to be woken at %d", now, r.due, due, r.wakeAt.Load())
	}
	if late := r.due; d.spared(r, late) || r.due != late {
		t.Errorf("a standstill counts twice: %d, %d", r.due, late)
	}

	d, r = start(100 * within)
	due = r.due
	for range 100 { // each look is late, as in a process that gets hardly any of the processor
		after(d, time.Second)
		d.spared(r, d.coarse.Load())
	}
	if most := due + int64(mostSpared); r.due != most || d.spared(r, most) {
		t.Errorf("a process that stands still all the time puts off %d to %d, which should be %d", due, r.due, most)
	}

	d, r = start(within + int64(time.Second))
	if now := after(d, 10*time.Second); d.spared(r, now) || r.due != r.endsAt {
		t.Errorf("a standstill puts off the deadline %d of a fetch to %d", r.endsAt, r.due)
	}

	d, r = start(10 * within)
	d.stood.Add(int64(time.Minute)) // before it was published
	r.stood = d.stood.Load()
	r.due = d.coarse.Load() // a look that is not late
	if d.spared(r, r.due) {
		t.Errorf("put off to %d without a standstill", r.due)
	}
}
