package main

import (
	"context"
	"fmt"
	"time"

	"github.com/org-runink/runbus/cp/registry"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/bench/proc"
)

// fleet measures the product's path with one runner registered and with n more, by id and by name.
func (m meter) fleet(ctx context.Context, out proc.Out, p *plane, n int) error {
	const inFlight = 16
	measure := func() (byID []figures, err error) {
		for range m.settings.repeat {
			f, err := m.measure(ctx, productPath, p.fetch(runnerID), inFlight)
			if err != nil {
				return nil, err
			}
			byID = append(byID, f)
		}
		return byID, nil
	}
	few, err := measure()
	if err != nil {
		return err
	}
	table := jetstream.TableOf[registry.Known](p.store, jetstream.Known)
	for i := range n {
		ref := schemas.RunnerRef{Tenant: tenant, Runner: fmt.Sprintf("fleet-%05d", i)}
		if _, err := table.Create(ctx, schemas.RunnerKey(ref), registry.Known{
			Tenant: tenant, Runner: ref.Runner, Name: ref.Runner, FirstSeen: time.Now(), LastSeen: time.Now(),
		}); err != nil {
			return err
		}
	}
	for {
		changed := p.registry.Changed()
		list, err := p.registry.Snapshot(tenant)
		if err != nil {
			return err
		}
		if len(list) > n+1 { // the managed runner is listed too
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	many, err := measure()
	if err != nil {
		return err
	}
	out.Printf("\n%d runners registered against one, %d in flight: CPU a dispatch %s against %s, ratio %.2f; throughput ratio %.2f\n", n, inFlight,
		micro(median(many, cpu)), micro(median(few, cpu)), median(many, cpu)/median(few, cpu), median(many, perSecond)/median(few, perSecond))
	return nil
}
