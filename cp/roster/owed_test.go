package roster

import (
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A process that is killed between a change and its record leaves the event with the change: the next one records it, once, whoever
// made the change.
func TestWhatAKilledProcessDidIsRecorded(t *testing.T) {
	type death struct{}
	die := ""
	e := start(t, func(d *Deps) {
		d.Step = func(step string) {
			if step == die {
				panic(death{})
			}
		}
	})
	killed := func(step string, do func()) {
		t.Helper()
		die = step
		defer func() {
			die = ""
			if dead := recover(); dead != (death{}) {
				t.Fatalf("not killed at %q: %v", step, dead)
			}
		}()
		do()
	}
	recorded := func(action string) (n int) {
		t.Helper()
		events, err := e.audit.List(t.Context(), acme, 1000)
		must(t, err)
		for _, event := range events {
			if event.GetAction() == action && event.GetOutcome() == "ok" {
				n++
			}
		}
		return n
	}
	restart := func() {
		t.Helper()
		e.replica(t, nil)
		row, err := e.r.docs.Get(t.Context(), acme)
		must(t, err)
		if owed := row.Value.Owed; len(owed) > 0 {
			t.Errorf("after a start %d events are still owed", len(owed))
		}
	}
	killed("runner.create decided", func() { _, _, _ = e.r.Create(t.Context(), e.ada, spec("edge")) })
	if n := recorded("runner.create"); n != 0 {
		t.Fatalf("recorded %d times before the start", n)
	}
	for range 2 {
		restart()
		if n := recorded("runner.create"); n != 1 {
			t.Errorf("recorded %d times", n)
		}
	}
	made, _, err := e.r.Find(acme, "edge")
	must(t, err)
	killed("runner.revoke decided", func() { _, _ = e.r.Revoke(t.Context(), e.ada, made.ID) })
	// This one was recorded all the same, and only that it was is not on record.
	row, err := e.r.docs.Get(t.Context(), acme)
	must(t, err)
	event := new(runbusv1.AuditEvent)
	must(t, proto.Unmarshal(row.Value.Owed[0].Event, event))
	must(t, e.audit.Record(t.Context(), event))
	restart()
	if n := recorded("runner.revoke"); n != 1 {
		t.Errorf("recorded %d times", n)
	}
	must(t, e.r.Remove(t.Context(), e.ada, made.ID)) // nobody was killed: nothing is left
	if row, err = e.r.docs.Get(t.Context(), acme); err != nil || len(row.Value.Owed) > 0 || recorded("runner.remove") != 1 {
		t.Errorf("%v, owed %v", err, row.Value.Owed)
	}
	left := 0
	e.r.writers(acme).recorded.Range(func(any, any) bool { left++; return true })
	if left > 0 {
		t.Errorf("%d events are remembered for nothing", left)
	}
}

// Renewals are tried again for as long as they can't be recorded. What they leave stays within a bound, and the audit log gets it when it
// takes something again, without a start.
func TestWhatRenewalsOweIsBounded(t *testing.T) {
	type death struct{}
	dies := false
	e := start(t, func(d *Deps) {
		d.Step = func(step string) {
			if dies && step == "runner.certificate.next decided" {
				panic(death{})
			}
		}
	})
	runner := e.enrolled(t, "edge")
	renew := func() error { return e.r.SetNext(t.Context(), runner.ID, runner.Current.Fingerprint, leaf("next")) }
	owed := func() int {
		t.Helper()
		row, err := e.r.docs.Get(t.Context(), acme)
		must(t, err)
		return len(row.Value.Owed)
	}
	dies = true
	most := 0
	for range mostOwed + 3 {
		func() {
			defer func() {
				if dead := recover(); dead != (death{}) {
					t.Fatalf("not killed: %v", dead)
				}
			}()
			must(t, renew())
		}()
		most = max(most, owed())
	}
	if most != mostOwed {
		t.Errorf("up to %d events were owed, want %d", most, mostOwed)
	}
	if n := len(e.events(t, "runner.certificate.next")); n != mostOwed {
		t.Errorf("%d are recorded, want %d", n, mostOwed)
	}
}

// Renewals that come together when much is owed have each event recorded once, those that are under way themselves too.
func TestWhatIsOwedIsRecordedOnce(t *testing.T) {
	const together = 8
	e := start(t, nil)
	runners := make([]Runner, together)
	for i := range runners {
		runners[i] = e.enrolled(t, fmt.Sprintf("edge-%d", i))
	}
	must(t, e.r.change(t.Context(), acme, nil, func(d *document, _ time.Time) error {
		for i := range mostOwed {
			owed := e.r.event(runners[0], "runner.certificate.next", nil, "next", strconv.Itoa(i))
			if err := d.owe(owed); err != nil {
				return err
			}
		}
		return nil
	}))
	var renewals sync.WaitGroup
	var unavailable atomic.Int32 // attempts, which may have taken effect all the same
	for _, runner := range runners {
		renewals.Go(func() {
			renew := func() error {
				return e.r.SetNext(t.Context(), runner.ID, runner.Current.Fingerprint, leaf("next of "+runner.Name))
			}
			err := renew()
			for range mostAgain { // a busy machine's: who is told so asks again
				if schemas.CodeOf(err) != schemas.CodeUnavailable {
					break
				}
				unavailable.Add(1)
				err = renew()
			}
			if err != nil {
				t.Errorf("%s: %v", runner.Name, err)
			}
		})
	}
	renewals.Wait()
	times := map[string]int{}
	for _, event := range e.events(t, "runner.certificate.next") {
		if event.GetOutcome() == "ok" {
			times[event.GetId()]++
		}
	}
	if n := len(times); n < mostOwed+together || n > mostOwed+together+int(unavailable.Load()) {
		t.Errorf("%d events are recorded, want %d, after %d attempts that the registry had no time for", n, mostOwed+together, unavailable.Load())
	}
	t.Logf("%d attempts were made again", unavailable.Load())
	for id, n := range times {
		if n != 1 {
			t.Errorf("%s is recorded %d times", id, n)
		}
	}
	e.r.writers(acme).recording.Range(func(id, _ any) bool {
		t.Errorf("%v is still to be recorded", id)
		return true
	})
}
