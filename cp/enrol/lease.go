package enrol

import (
	"context"
	"errors"
	"time"

	"github.com/org-runink/runbus/jetstream"
)

// leaseEvery is how often the record of a link is renewed; it expires by itself after three of these.
const leaseEvery = 10 * time.Second

// Lease records which replica has the link to a runner, so that no other dials it meanwhile. It decides nothing: the runner does.
type Lease struct {
	Replica string    `json:"replica"`
	Since   time.Time `json:"since"`
}

// keepLease records a link until ctx ends, then takes the record back. What can't be written is left: another replica may dial then,
// and hears `linked elsewhere`.
func (d *Dialler) keepLease(ctx context.Context, id string, since time.Time) {
	lease := Lease{Replica: d.d.Replica, Since: since}
	tick := time.NewTicker(leaseEvery)
	defer tick.Stop()
	revision := d.putLease(ctx, id, lease)
	for {
		select {
		case <-tick.C:
			revision = d.putLease(ctx, id, lease)
		case <-ctx.Done():
			if revision == 0 {
				return
			}
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			if err := d.leases.Delete(ctx, id, revision); err != nil {
				d.d.Log.Debug("the lease of a link was not taken back", "runner", id, "error", err)
			}
			return
		}
	}
}

// putLease writes the record over whatever is there, but for that of this replica's later link, and returns its revision, 0 if it has none.
func (d *Dialler) putLease(ctx context.Context, id string, lease Lease) uint64 {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	row, err := d.leases.Get(ctx, id)
	var revision uint64
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
		revision, err = d.leases.Create(ctx, id, lease)
	case err == nil && row.Value.Replica == lease.Replica && row.Value.Since.After(lease.Since):
		return 0 // of the link beside this one, which takes its place: what this one wrote it would take back at its end
	case err == nil:
		revision, err = d.leases.Update(ctx, id, lease, row.Revision)
	}
	if err != nil {
		d.d.Log.Debug("the lease of a link was not written", "runner", id, "error", err)
		return 0
	}
	return revision
}

// heldElsewhere reports whether another replica that is there has recorded a link to the runner.
func (d *Dialler) heldElsewhere(id string) bool {
	row, ok := d.leaseView.Get(id)
	return ok && row.Value.Replica != d.d.Replica && d.replicas.live(row.Value.Replica)
}
