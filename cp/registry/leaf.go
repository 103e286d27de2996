package registry

import (
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// leafHolder stands where an outbound runner has its key, in records and bindings of a dialled runner: its leaves come and go, and a
// renewal is no other holder. It is no public key, so that no key holds such an id.
const leafHolder = "leaf"

// verifyLeaf checks the hello of a dialled runner against the leaves that its id may have now. An id belongs to one kind: no leaf
// takes an outbound runner's id, and no key a dialled one's.
func (r *Registry) verifyLeaf(ref schemas.RunnerRef, fingerprint string, h *runbusv1.RunnerHello) (auth.Key, error) {
	if !schemas.IsDialledID(ref.Runner) {
		return auth.Key{}, schemas.Errorf(schemas.CodeForbidden, "the runner id %q is not that of a dialled runner: a leaf can't use it", ref.Runner)
	}
	runner, known, err := r.d.Roster.ByID(ref.Runner)
	switch {
	case err != nil:
		return auth.Key{}, unavailable(err)
	case !known || runner.Tenant != ref.Tenant:
		return auth.Key{}, schemas.ErrRunnerUnknown(ref.Runner)
	case runner.State == roster.Revoked:
		return auth.Key{}, schemas.ErrRunnerRevoked(runner.Name)
	}
	leaf := runner.Pinned(fingerprint)
	if leaf == nil {
		// One that another replica knows already, perhaps.
		return auth.Key{}, schemas.Errorf(schemas.CodeUnavailable, "the leaf that the hello names is not that of the runner now")
	}
	if !schemas.VerifyHello(leaf.PublicKey, schemas.HelloSigningInput(ref, h), h.GetSignature()) {
		return auth.Key{}, schemas.Errorf(schemas.CodeForbidden, "the signature of the hello does not verify").
			WithHint("something between the runner and the control plane changes messages, or their versions differ")
	}
	return auth.Key{ID: leafHolder, Tenant: ref.Tenant, PublicKey: leafHolder}, nil
}

// actorOf names who enrols in the audit log.
func actorOf(ref schemas.RunnerRef, key auth.Key) string {
	if key.PublicKey == leafHolder || key.PublicKey == managedHolder {
		return "runner:" + ref.Runner
	}
	return "key:" + key.ID
}

// Session is the present session of a runner whose link is up; false when there is none.
func (r *Registry) Session(ref schemas.RunnerRef) (session string, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rn := r.fleet[ref.Tenant][ref.Runner]
	if rn == nil || !rn.live || rn.rec.Left {
		return "", false
	}
	_, linked := rn.links.of(rn.rec.ProcessNonce)
	return rn.rec.Session, linked && rn.rec.Session != ""
}
