package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"time"

	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// ManagedName is the display name of the managed runner (SPEC R2).
const ManagedName = "Runink managed"

// Why a managed runner gets no work that has no process, and gets one when there is work for it.
const (
	startsWithFirstFetch = "starts with its tenant's first fetch"
	startsWithNextFetch  = "starts with its tenant's next fetch" // it had one, which has ended
)

// managed is `console` as tenant sees it. r.mu must be held.
func (r *Registry) managed(tenant string, now time.Time) seen {
	rn := r.entry(schemas.RunnerRef{Tenant: tenant, Runner: schemas.ConsoleRunner})
	s := rn.seen(now)
	s.holder = ""
	s.candidate = rn.managed(now)
	if s.candidate.Offline != "" && r.d.ManagedWaits != nil && r.d.ManagedWaits(tenant) {
		s.candidate.Offline = startsWithFirstFetch
		if !s.rec.LastSeen.IsZero() {
			s.candidate.Offline = startsWithNextFetch
		}
	}
	return s
}

// managed is `console` for dispatch: always there, and fit for work only while a process of its own says so by heartbeat. r.mu
// must be held.
func (rn *runner) managed(now time.Time) Candidate {
	c := rn.candidate(rn.status(now))
	c.Name, c.Link = schemas.ConsoleRunner, LinkLocal
	return c
}

// describeManaged makes r the managed runner. RUNNING is what a live heartbeat over a link that is up says, and nothing else (SPEC R7).
func describeManaged(r *Runner) {
	r.ID, r.Name, r.DisplayName, r.Kind, r.Link = schemas.ConsoleRunner, schemas.ConsoleRunner, ManagedName, KindManaged, LinkLocal
	r.State = StateRunning
	if !r.Health.Connected || r.Health.Signals.Heartbeat != heartbeatFresh {
		r.State = StateUnknown
		r.Description = "liveness was not observed: the registry has no live heartbeat of the managed runner"
		if r.Health.Detail == startsWithFirstFetch || r.Health.Detail == startsWithNextFetch {
			r.Description = "liveness was not observed: it " + r.Health.Detail
		}
	}
}

// managedHolder stands where an outbound runner has its key, in the records of `console`: each process of it makes its own.
const managedHolder = "managed"

// verifyManaged checks a hello as `console` against the key of the process that this control plane started for the tenant. For
// everybody else the id is reserved (SPEC E4, R2).
func (r *Registry) verifyManaged(ref schemas.RunnerRef, h *runbusv1.RunnerHello) (auth.Key, error) {
	var public []byte
	started := false
	if r.d.Managed != nil {
		public, started = r.d.Managed(ref.Tenant)
	}
	sum := sha256.Sum256(public)
	switch fingerprint, ok := schemas.LeafFingerprint(h.GetPublicKey()); {
	case !ok || r.d.Managed == nil:
		return auth.Key{}, schemas.Errorf(schemas.CodeInvalid, "the runner id %q is reserved", ref.Runner).WithHint("choose another RUNNER_ID")
	case !started || fingerprint != hex.EncodeToString(sum[:]):
		return auth.Key{}, schemas.Errorf(schemas.CodeForbidden, "the hello is not that of the managed runner's process")
	case !schemas.VerifyHello(public, schemas.HelloSigningInput(ref, h), h.GetSignature()):
		return auth.Key{}, schemas.Errorf(schemas.CodeForbidden, "the signature of the hello does not verify")
	}
	return auth.Key{ID: managedHolder, Tenant: ref.Tenant, PublicKey: managedHolder}, nil
}

// processEnded is why a managed runner has left that didn't say goodbye.
const processEnded = "its process ended"

// ManagedEnded takes the tenant's managed runner out of the live view: whoever started its process has seen it end, so that what it ran
// is lost now, and not when the grace is over (SPEC D13). The next process has said no hello yet.
func (r *Registry) ManagedEnded(ctx context.Context, tenant string) {
	ref := schemas.RunnerRef{Tenant: tenant, Runner: schemas.ConsoleRunner}
	rec, _, there := r.record(ref)
	if !there || rec.Left {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, serveTimeout)
	defer cancel()
	if _, err := r.refresh(ctx, ref, rec.Session, rec.ProcessNonce, func(rec *Record) bool {
		rec.Left, rec.LeftReason, rec.InFlight = true, processEnded, 0
		return true
	}); err != nil {
		r.d.Log.Warn("the end of a managed runner was not recorded", "tenant", tenant, "error", err)
	}
}
