package runner

import (
	"context"
	"log/slog"
	"time"

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
			reply, err := a.dialled.renewals.obey(m)
			a.tellRenewal(reply, err)
			a.reply(m, reply)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tellRenewal says how far a renewal has come, and until when the certificate holds that is in place. Why one failed is told
// whole here alone: the control plane hears nothing of a full disk, or of a folder that can't be written.
func (a *Agent) tellRenewal(reply *runbusv1.RunnerControlReply, failed error) {
	text, level := "a renewal of the certificate has begun: the one in place holds meanwhile", slog.LevelInfo
	args := []any{"certificate", a.dialled.store.Fingerprint(), "until", a.dialled.store.Leaf().Leaf.NotAfter.UTC().Format(time.RFC3339)}
	switch {
	case failed != nil:
		text, level = "a renewal of the certificate failed: the one in place holds, and the control plane tries again", slog.LevelWarn
		args = append(args, "error", failed, "hint", reply.GetError().GetHint())
	case reply.GetInstalled():
		text = "the renewed certificate is in place: the next link, which is made now, uses it"
	}
	a.log.Log(context.Background(), level, text, args...)
}

// obey carries out an order, and returns with the answer why it failed: that answer says of an error without a code only that it is one.
func (r *renewals) obey(m *runbusv1.RunnerControl) (reply *runbusv1.RunnerControlReply, err error) {
	reply = &runbusv1.RunnerControlReply{Id: m.GetId()}
	switch order := m.GetOrder().(type) {
	case *runbusv1.RunnerControl_Renew:
		reply.CsrDer, reply.LeafFingerprint, err = r.Request(m.GetReplica())
	case *runbusv1.RunnerControl_Install:
		reply.LeafFingerprint, err = r.Install(m.GetReplica(), order.Install.GetCertificatePem())
		reply.Installed = err == nil
	}
	reply.Error = schemas.ToDetail(err)
	return reply, err
}

// revoked ends a dialled runner for good (SPEC C9): its state folder says so before anything else happens.
func (a *Agent) revoked(reason string) error {
	if a.dialled == nil {
		return nil
	}
	return a.dialled.store.MarkRevoked(reason)
}
