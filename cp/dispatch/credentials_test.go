package dispatch_test

import (
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/org-runink/runbus/cp/dispatch"
	rt "github.com/org-runink/runbus/cp/registry/registrytest"
	"github.com/org-runink/runbus/cp/trace"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A runner whose key is revoked once it has been sent the work, or while its credentials are being read, gets none of them, though it has
// accepted in time.
func TestNoCredentialsAfterARevocation(t *testing.T) {
	for when, c := range map[string]struct{ looks, read int }{ // at how many times the clock the dispatcher revokes it; how often it then has read
		"as it accepts": {1, 0}, "as they are read": {2, 1},
	} {
		t.Run(when, func(t *testing.T) {
			var e *env
			var looks atomic.Int64 // until the revocation; it is over at 0
			e = newEnv(t, func(d *dispatch.Deps) {
				now := d.Now
				d.Now = func() time.Time {
					if looks.Load() > 0 && looks.Add(-1) == 0 {
						if _, err := e.Auth.RevokeKey(t.Context(), e.Admin, e.cred.ID); err != nil {
							t.Error(err)
						}
					}
					return now()
				}
			}, nil)
			f := e.start(t, secretRequest())
			w := e.take(t)
			looks.Store(int64(c.looks))
			rt.Send(t, w.Sender, &runbusv1.RunnerWorkAccepted{Pid: 1})
			o := f.wait(t)
			wantOutcome(t, o, dispatch.OutcomeRunnerLost, "runner_lost",
				`runner "edge-1" was lost while it ran this fetch: its service-account key was revoked`)
			if events := e.Events(t, "credential.read"); len(events) != c.read {
				t.Errorf("audit events = %v", events)
			}
			if p := phases(o); slices.Contains(p, trace.PhaseCredentials) || !slices.Contains(p, trace.PhaseAccepted) {
				t.Errorf("phases = %v", p)
			}
		})
	}
}
