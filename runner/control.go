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
		a.end(&ExitError{Code: ExitReplaced, Err: &schemas.Error{Code: schemas.CodeReplaced, Message: "REPLACED: " + reason}})
	case *runbusv1.RunnerControl_Goodbye:
		a.log.Info("the control plane says goodbye", "reason", order.Goodbye.GetReason())
		a.end(fmt.Errorf("goodbye: %w", errDrained))
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
	default:
		a.log.Warn("an unknown order was ignored", "id", m.GetId())
		return
	}
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
