package runner

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// obey carries out one order of the control plane. It runs on the connection's callback and never blocks.
func (a *Agent) obey(msg *nats.Msg) {
	m := new(runbusv1.RunnerControl)
	if err := bus.Decode(msg, m); err != nil {
		a.log.Warn("an order could not be read", "error", err)
		return
	}
	reply := &runbusv1.RunnerControlReply{Id: m.GetId()}
	switch order := m.GetOrder().(type) {
	case *runbusv1.RunnerControl_Cancel:
		reason := errCancelled()
		if order.Cancel.GetCode() == string(schemas.CodeDeadline) {
			reason = errDeadline()
		}
		reply.CancelState = a.works.cancel(order.Cancel.GetDispatchId(), reason)
		a.log.Info("cancel", "dispatch", order.Cancel.GetDispatchId(), "code", reason.Code, "state", reply.GetCancelState())
	case *runbusv1.RunnerControl_Rehello:
		a.log.Info("the control plane asks for another hello")
		signal(a.rehello)
	case *runbusv1.RunnerControl_Replaced:
		reason := order.Replaced.GetReason()
		if reason == "" {
			reason = "another process said hello with this runner's id"
		}
		a.end(a.replaced(&schemas.Error{Code: schemas.CodeReplaced, Message: "REPLACED: " + reason}))
	case *runbusv1.RunnerControl_Goodbye:
		a.log.Info("the control plane says goodbye", "reason", order.Goodbye.GetReason(), "revoked", order.Goodbye.GetRevoked())
		if order.Goodbye.GetRevoked() {
			if err := a.revoked(order.Goodbye.GetReason()); err != nil {
				a.log.Error("this runner was revoked, and its state folder can't say so", "error", err)
			}
		}
		a.reply(m, reply) // what follows closes the connection
		a.end(fmt.Errorf("goodbye: %w", errDrained))
		return
	case *runbusv1.RunnerControl_Drain:
		grace := a.cfg.DrainGrace // an order may only shorten it
		if order.Drain.GetGrace() != nil {
			grace = min(grace, max(order.Drain.GetGrace().AsDuration(), 0))
		}
		a.drain(grace)
	case *runbusv1.RunnerControl_Move:
		a.log.Info("the control plane asks to reconnect")
		if err := a.conn.NATS().ForceReconnect(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
			a.log.Warn("reconnect", "error", err)
		}
	case *runbusv1.RunnerControl_Health:
		reply.Health = a.health()
	case *runbusv1.RunnerControl_Renew, *runbusv1.RunnerControl_Install:
		err := a.renew(m)
		if err == nil {
			return // answered when it is carried out
		}
		reply.Error = schemas.ToDetail(err)
	default:
		a.log.Warn("an unknown order was ignored", "id", m.GetId())
		return
	}
	a.reply(m, reply)
}

// replaced is the end of this process because another one took its id, as err says. The hint is for this kind of runner.
func (a *Agent) replaced(err *schemas.Error) error {
	hint := "two processes use this runner's id: stop one of them, or give one another RUNNER_ID"
	if a.linked != nil { // its id is that of its state folder
		hint = "two processes are this runner: stop one of them; a second runner is created with `runink runner create`, and gets a state folder of its own"
	}
	return &ExitError{Code: ExitReplaced, Err: err.WithHint(hint)}
}

// reply answers an order, if an answer is wanted.
func (a *Agent) reply(m *runbusv1.RunnerControl, reply *runbusv1.RunnerControlReply) {
	if m.GetReplica() == "" {
		return
	}
	if err := a.conn.Publish(schemas.ReplySubject(a.ref, m.GetReplica(), m.GetId()), reply); err != nil {
		a.log.Warn("an answer was not sent", "error", err)
	}
}

// health is this process's claim about itself; it touches no source (SPEC C10).
func (a *Agent) health() *runbusv1.RunnerHealth {
	return &runbusv1.RunnerHealth{
		InFlight: int32(a.works.count()), Limit: int32(a.cfg.Concurrency),
		ResidentBytes: residentBytes(), Goroutines: int32(runtime.NumGoroutine()),
		StartedAt: timestamppb.New(processStart),
	}
}
