package bus

import (
	"context"
	"fmt"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// waiter is an order whose reply is awaited.
type waiter struct {
	ref   schemas.RunnerRef
	reply chan *nats.Msg // room for one
}

// Order sends one order to one session of a runner and waits for the reply. It fills in the order's id and replica. It
// returns ErrNoResponders when the session is gone (nobody got the order), and the context's error when no reply came in
// time (10 s if ctx has no deadline): then the runner may have got the order or not.
func (r *Receivers) Order(ctx context.Context, ref schemas.RunnerRef, session string, order *runbusv1.RunnerControl) (*runbusv1.RunnerControlReply, error) {
	ctx, cancel := withDeadline(ctx)
	defer cancel()
	order.Id, order.Replica = schemas.NewID(), r.replica
	w := &waiter{ref: ref, reply: make(chan *nats.Msg, 1)}
	r.mu.Lock()
	r.waiting[order.Id] = w
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		delete(r.waiting, order.Id)
		r.mu.Unlock()
	}()
	subject := schemas.ControlSubject(ref, session)
	if err := r.conn.PublishWithReply(subject, schemas.ReplySubject(ref, r.replica, order.Id), order); err != nil {
		return nil, err
	}
	select {
	case msg := <-w.reply:
		if isNoResponders(msg) {
			return nil, fmt.Errorf("order to %s: %w", ref, ErrNoResponders)
		}
		reply := &runbusv1.RunnerControlReply{}
		if err := Decode(msg, reply); err != nil {
			return nil, err
		}
		if reply.GetId() != order.Id {
			return nil, schemas.Errorf(schemas.CodeInvalid, "runner %s answered another order", ref)
		}
		return reply, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("order to %s: %w", ref, ctx.Err())
	case <-r.stop:
		return nil, ErrClosed
	}
}

// reply runs in the subscription's callback.
func (r *Receivers) reply(msg *nats.Msg) {
	subject, err := schemas.Parse(msg.Subject)
	if err != nil {
		r.drop(DropInvalid)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch w := r.waiting[subject.ID]; {
	case w == nil:
		r.dropped[DropUnknown]++
	case w.ref != subject.Ref:
		r.dropped[DropForeign]++
	default:
		delete(r.waiting, subject.ID)
		w.reply <- msg
	}
}
