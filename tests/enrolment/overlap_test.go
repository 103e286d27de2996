package enrolment

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/org-runink/runbus/cp/enrol"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A renewal that takes longer than the pause between two tries is not begun a second time beside itself, however short a certificate
// lives; others go on being tried meanwhile.
func TestARenewalDoesNotOverlapItself(t *testing.T) {
	p := start(t)
	p.stop()
	p.life = 12 * time.Second // tried again after a second
	p.restart(t)
	slow, _ := p.enrolled(t, "slow")
	refuses, _ := p.enrolled(t, "refuses")
	p.clock.advance(9 * time.Second)

	asked := make(chan string, 1000)
	letGo := make(chan struct{})
	var slowly, overlaps atomic.Int32 // of the slow one: under way now, and begun beside another
	renewer := enrol.NewRenewer(enrol.RenewerConfig{
		Enroller: p.enrol, Linked: func(string) bool { return true }, Redial: func(string) {}, Log: p.Log,
		Order: func(ctx context.Context, ref schemas.RunnerRef, _ *runbusv1.RunnerControl) (*runbusv1.RunnerControlReply, error) {
			if ref.Runner == slow.ID {
				if slowly.Add(1) > 1 {
					overlaps.Add(1)
				}
				defer slowly.Add(-1)
			}
			asked <- ref.Runner
			if ref.Runner == slow.ID {
				select {
				case <-letGo:
				case <-ctx.Done():
				}
			}
			return nil, errors.New("not now")
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- renewer.Run(ctx) }()
	times := map[string]int{}
	next := func() string {
		t.Helper()
		select {
		case id := <-asked:
			times[id]++
			return id
		case <-time.After(patience):
			t.Fatalf("nobody is asked any more: %v", times)
			return ""
		}
	}
	for times[refuses.ID] < 4 || times[slow.ID] == 0 {
		next()
	}
	if n := overlaps.Load(); n > 0 { // one that has ended, since even the slow one is given up some time, may be begun again
		t.Errorf("a renewal under way was begun %d times beside itself", n)
	}
	close(letGo)
	for next() != slow.ID { // and is tried again once it has ended
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if r := p.runner(t, slow.ID); r.State != roster.Active || r.Next != nil {
		t.Errorf("%+v", r)
	}
}
