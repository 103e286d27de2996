package registry

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/org-runink/runbus/schemas"
)

func TestWorkWaitsForTheLinkThatTakesOver(t *testing.T) {
	ref := schemas.RunnerRef{Tenant: "acme", Runner: schemas.NewRunnerID()}
	old, fresh := linkKey{"S", 1}, linkKey{"S", 2}
	linked := func() *Registry {
		return &Registry{fleet: map[string]map[string]*runner{ref.Tenant: {ref.Runner: {
			ref: ref, live: true, rec: Record{ProcessNonce: "n"}, links: processLinks{{"n", link{key: old}}},
		}}}}
	}
	await := func(r *Registry, ref schemas.RunnerRef) <-chan struct{} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			r.AwaitHandover(context.Background(), ref.Tenant, ref.Runner)
		}()
		synctest.Wait()
		return done
	}
	ended := func(t *testing.T, what string, done <-chan struct{}, want bool) {
		t.Helper()
		select {
		case <-done:
			if !want {
				t.Error(what, "did not wait")
			}
		default:
			if want {
				t.Error(what, "still waits")
			}
		}
	}
	synctest.Test(t, func(t *testing.T) {
		r := linked()
		ended(t, "work without a handover", await(r, ref), true)
		r.Handover(ref, time.Second)
		other := schemas.RunnerRef{Tenant: ref.Tenant, Runner: schemas.NewRunnerID()}
		ended(t, "work of another runner", await(r, other), true)
		work := await(r, ref)
		ended(t, "work", work, false)
		r.handovers.linked(ref, old) // an event that comes late
		synctest.Wait()
		ended(t, "work", work, false)
		r.handovers.linked(ref, fresh)
		synctest.Wait()
		ended(t, "work", work, true)
		ended(t, "later work", await(r, ref), true)

		r.Handover(ref, time.Second) // no link comes
		work = await(r, ref)
		<-time.After(time.Second - 1)
		synctest.Wait()
		ended(t, "work", work, false)
		<-time.After(1)
		synctest.Wait()
		ended(t, "work", work, true)

		r.Handover(ref, time.Second) // and once more, before that is over
		first := await(r, ref)
		r.Handover(ref, 2*time.Second)
		synctest.Wait()
		ended(t, "work of the first handover", first, true)
		second := await(r, ref)
		<-time.After(time.Second)
		synctest.Wait()
		ended(t, "work of the second handover", second, false)
		r.handovers.linked(ref, fresh)
		synctest.Wait()
		ended(t, "work of the second handover", second, true)
		if r.handovers.some.Load() != 0 || len(r.handovers.of) != 0 {
			t.Error("something is left over")
		}
		ctx, cancel := context.WithCancel(context.Background())
		r.Handover(ref, time.Hour)
		cancel()
		r.AwaitHandover(ctx, ref.Tenant, ref.Runner) // a caller that goes
		r.handovers.linked(ref, fresh)
	})
	unlinked := linked()
	unlinked.fleet[ref.Tenant][ref.Runner].links.drop("n")
	unlinked.Handover(ref, time.Hour)
	unlinked.Handover(schemas.RunnerRef{Tenant: "acme", Runner: "nobody"}, time.Hour)
	if unlinked.handovers.some.Load() != 0 {
		t.Error("a runner without a link is handed over")
	}
}
