// Package dispatch runs fetches on runners: it selects the runner, hands it the work at most once, and relays the result to
// the caller. fetch.go is the main job from top to bottom.
package dispatch

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/registry"
)

// Deps are the parts that a Dispatcher stands on. Bus, Registry and Audit are required.
type Deps struct {
	Bus      *bus.Conn // connection in account RUN that waits for results
	Registry *registry.Registry
	Audit    *audit.Log
	// Timeout is the default and the ceiling of a fetch's time (SPEC D4, DISPATCH_TIMEOUT). Zero means 10m.
	Timeout time.Duration
	// Isolation is REQUIRE_RUNNER_ISOLATION (SPEC D10). It changes a text; a fetch never runs in the control plane anyway.
	Isolation bool
	// Copies, if set, is given every message published on a work or control subject, for the view of ops; sealed credentials
	// are left out of the copy. It must not block.
	Copies  func(subject string, m proto.Message)
	Metrics prometheus.Registerer // nil: none
	Log     *slog.Logger          // nil: slog.Default()
	Now     func() time.Time      // nil: time.Now
}

// Dispatcher runs fetches. Safe for concurrent use.
type Dispatcher struct{}

// New makes a Dispatcher that waits for results on d.Bus.
func New(d Deps) (*Dispatcher, error) { panic("unreachable") }

// Replica is the random id of this boot, as it stands in result subjects.
func (d *Dispatcher) Replica() string { panic("unreachable") }

// Fetch runs one fetch to its end. id is the dispatch id, a ULID; empty makes a new one. Everything that goes wrong is in
// the Outcome.
func (d *Dispatcher) Fetch(ctx context.Context, req Request, id string, sink Sink) Outcome {
	panic("unreachable")
}

// Cancel stops a running dispatch of by's tenant. by must be WRITER or better. CodeNotFound when no such dispatch runs here.
func (d *Dispatcher) Cancel(by auth.Principal, dispatchID string) error { panic("unreachable") }

// Running lists the dispatches of tenant that run on this replica, oldest first.
func (d *Dispatcher) Running(tenant string) []Running { panic("unreachable") }

// Close takes no new dispatch and waits for the running ones; when ctx ends, it cancels them.
func (d *Dispatcher) Close(ctx context.Context) error { panic("unreachable") }
