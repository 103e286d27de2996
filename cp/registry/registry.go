// Package registry knows the outbound runners: it serves their hello, heartbeat and goodbye, decides by compare-and-set which
// process holds a runner's id, and keeps a live view of the fleet from the buckets and from the server's link events.
package registry

import (
	"context"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
)

// Deps are the parts that a Registry stands on. Store, Serve, Sys, Auth and Audit are required.
type Deps struct {
	Store *jetstream.Store
	Serve *bus.Conn  // connection in account RUN that serves runners' messages
	Sys   *nats.Conn // connection in account SYS, for link events
	Auth  *auth.Auth
	Audit *audit.Log
	// Grace is how long running works outlive a lost link (SPEC D13). Zero means 15s.
	Grace time.Duration
	// Replica names this replica in records. Empty: random.
	Replica string
	// Copies, if set, is given every message published on a control subject, for the view of ops.
	Copies  func(subject string, m proto.Message)
	Metrics prometheus.Registerer // nil: none
	Log     *slog.Logger          // nil: slog.Default()
	Now     func() time.Time      // nil: time.Now
}

// Registry is the live view of the fleet. Safe for concurrent use.
type Registry struct{}

// New follows the buckets and the link events and serves hello, heartbeat and goodbye from when it returns. Run must run
// beside it.
func New(ctx context.Context, d Deps) (*Registry, error) { panic("unreachable") }

// Run keeps the view fresh until ctx ends: link rescans, the probe of the leader, the batched writes of known runners.
func (r *Registry) Run(ctx context.Context) error { panic("unreachable") }

// Close stops serving and following. Run must have returned or its ctx be done.
func (r *Registry) Close() { panic("unreachable") }

// Bound is the public key that holds ref's id, from the view; false when nobody does. For the auth callout.
func (r *Registry) Bound(ref schemas.RunnerRef) (publicKey string, ok bool) { panic("unreachable") }

// List is every outbound runner of tenant, by id. ErrRegistryUnavailable when the view isn't confirmed.
func (r *Registry) List(tenant string) ([]Runner, error) { panic("unreachable") }

// Snapshot is the same for dispatch.Select.
func (r *Registry) Snapshot(tenant string) ([]Candidate, error) { panic("unreachable") }

// SessionNow is the session under which the process that had session can be reached now.
func (r *Registry) SessionNow(ref schemas.RunnerRef, session string) string { panic("unreachable") }

// ReleaseID frees id for another key (SPEC E4). by must be ORG_ADMIN of the tenant. Audited.
func (r *Registry) ReleaseID(ctx context.Context, by auth.Principal, id string) error {
	panic("unreachable")
}

// Changed is closed at the next change of the view.
func (r *Registry) Changed() <-chan struct{} { panic("unreachable") }

// Readable returns nil when the view is confirmed against the leader, for /readyz.
func (r *Registry) Readable() error { panic("unreachable") }

// WatchLoss reports once, with the reason, when the process that has session is lost.
func (r *Registry) WatchLoss(ref schemas.RunnerRef, session string) (lost <-chan string, stop func()) {
	panic("unreachable")
}
