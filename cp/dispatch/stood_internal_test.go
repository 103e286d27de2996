package dispatch

import (
	"testing"
	"time"
)

// A runner that has accepted is not taken for one that has not because this process stood still: the time in which it did is added to that for
// an acceptance, once, and not beyond the deadline of the fetch. A clock that goes on as it should adds nothing.
func TestAStandstillPutsOffTheAcceptance(t *testing.T) {
	const within = int64(2 * time.Second)
	start := func(timeout int64) (*Dispatcher, *run) {
		d := &Dispatcher{began: time.Now()}
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
