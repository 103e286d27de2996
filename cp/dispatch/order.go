package dispatch

import (
	"context"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Order sends an order that is no dispatch's to one session of a runner, and waits for the reply as bus.Receivers.Order does.
func (d *Dispatcher) Order(ctx context.Context, ref schemas.RunnerRef, session string, order *runbusv1.RunnerControl) (*runbusv1.RunnerControlReply, error) {
	reply, err := d.receivers.Order(ctx, ref, session, order)
	if d.d.Copies != nil {
		d.d.Copies(schemas.ControlSubject(ref, session), order) // its id is known by now
	}
	return reply, err
}
