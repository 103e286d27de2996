package runner

import (
	"context"

	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// renewals takes the orders that renew a certificate (SPEC C8) off the connection's callback, which they would block: they write to
// the disk. They are carried out in their order.
type renewals struct {
	*identity.Renewals
	orders chan *runbusv1.RunnerControl
}

func newRenewals(s *identity.Store) *renewals {
	return &renewals{Renewals: identity.NewRenewals(s), orders: make(chan *runbusv1.RunnerControl, 4)}
}

// renew queues an order. A control plane sends the next one after the answer, so there is room unless it errs.
func (a *Agent) renew(m *runbusv1.RunnerControl) error {
	if a.dialled == nil {
		return schemas.Errorf(schemas.CodeConflict, "this runner dials out: it has a key and no certificate")
	}
	select {
	case a.dialled.renewals.orders <- m:
		return nil
	default:
		return schemas.Errorf(schemas.CodeUnavailable, "renewals are queued already")
	}
}

// keepRenewing carries out what renew queues.
func (a *Agent) keepRenewing(ctx context.Context) error {
	if a.dialled == nil {
		return nil
	}
	for {
		select {
		case m := <-a.dialled.renewals.orders:
			reply := a.dialled.renewals.obey(m)
			a.log.Info("renewal", "installed", reply.GetInstalled(), "certificate", reply.GetLeafFingerprint(), "error", reply.GetError().GetMessage())
			a.reply(m, reply)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (r *renewals) obey(m *runbusv1.RunnerControl) *runbusv1.RunnerControlReply {
	reply := &runbusv1.RunnerControlReply{Id: m.GetId()}
	var err error
	switch order := m.GetOrder().(type) {
	case *runbusv1.RunnerControl_Renew:
		reply.CsrDer, reply.LeafFingerprint, err = r.Request(m.GetReplica())
	case *runbusv1.RunnerControl_Install:
		reply.LeafFingerprint, err = r.Install(m.GetReplica(), order.Install.GetCertificatePem())
		reply.Installed = err == nil
	}
	reply.Error = schemas.ToDetail(err)
	return reply
}

// revoked ends a dialled runner for good (SPEC C9): its state folder says so before anything else happens.
func (a *Agent) revoked(reason string) error {
	if a.dialled == nil {
		return nil
	}
	return a.dialled.store.MarkRevoked(reason)
}
