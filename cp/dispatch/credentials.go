package dispatch

import (
	"context"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus/seal"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// sendCredentials reads the run's secrets, seals them to the key that the runner's hello signed, the caller's session beside
// them, and sends them. That they are read is durable in the audit log first (SPEC M2, R8). A runner that is lost by now, as one that was
// revoked after it had been sent the work and still has its link, gets none.
func (d *Dispatcher) sendCredentials(ctx context.Context, run *run) error {
	if why, lost := run.watch.Lost(); lost {
		return schemas.ErrRunnerLost(run.runner.Ref.Runner, why)
	}
	details := [...]audit.Detail{
		{Name: "names", Value: clip(strings.Join(slices.Sorted(maps.Keys(run.secrets)), ","), 256)},
		{Name: "runner", Value: run.runner.Ref.Runner}, run.source(),
	}
	durable, cancel := context.WithTimeout(ctx, d.d.CredentialsWithin)
	defer cancel()
	key, err := d.d.Registry.SealingKey(durable, run.runner.Ref, run.runner.Session)
	if err != nil {
		return err
	}
	read := run.brief("credential.read", "ok", d.d.Now(), details[:])
	if err := d.d.Audit.Record(durable, read.Event()); err != nil {
		return schemas.Wrap(schemas.CodeUnavailable, err, "the credentials were not read: that could not be recorded in the audit log").
			WithHint("try again when /readyz is ready")
	}
	run.credentialsRead = true
	ref := run.runner.Ref
	sealed, err := seal.Seal(key, seal.Context{
		Tenant: ref.Tenant, Runner: ref.Runner, Session: run.runner.Session, Dispatch: run.id,
	}, &runbusv1.CredentialBundle{
		Secrets: run.secrets,
		Caller: &runbusv1.CallerSession{
			Tenant: run.caller.Tenant, Person: run.caller.Name, Role: string(run.caller.Role),
			ExpiresAt: timestamppb.New(run.caller.ExpiresAt),
		},
	})
	if err != nil {
		return schemas.Wrap(schemas.CodeFailed, err, "the credentials could not be sealed to the runner's key")
	}
	d.d.Registry.AwaitHandover(ctx, ref.Tenant, ref.Runner)
	if why, lost := run.watch.Lost(); lost { // meanwhile
		return schemas.ErrRunnerLost(ref.Runner, why)
	}
	subject := run.runner.Work
	credentials := &runbusv1.RunnerWorkCredentials{DispatchId: run.id, Session: run.runner.Session, Sealed: sealed}
	if err := d.d.Bus.PublishTraced(run.trace, subject, "", credentials); err != nil {
		return schemas.Wrap(schemas.CodeFailed, err, "the credentials could not be sent to the runner")
	}
	// Ops gets no more of them than that they were sent.
	d.copyForOps(subject, &runbusv1.RunnerWorkCredentials{
		DispatchId: run.id, Session: run.runner.Session, Sealed: &runbusv1.SealedCredential{Suite: sealed.GetSuite()},
	})
	run.mark(PhaseCredentials, run.here)
	return nil
}
