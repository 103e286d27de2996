package cp

import (
	"os"
	"time"

	"github.com/org-runink/runbus/schemas"
)

const (
	// notReadyAfter is how long the audit log may fail before the replica is not ready; shorter is an election.
	notReadyAfter = 5 * time.Second
	// stuckAfter is how long it may fail, on a disk that takes writes, before only a restart can help.
	stuckAfter = 30 * time.Second
	// probeBytes is what the disk must take for that.
	probeBytes = 1 << 20
)

// auditWritable is a condition of /readyz: what must be recorded first can be done.
func (c *ControlPlane) auditWritable() error {
	if d, err := c.audit.Failing(); d > notReadyAfter {
		return schemas.Wrap(schemas.CodeUnavailable, err, "the audit log can't be written: what must be recorded first is refused")
	}
	return nil
}

// storageAlive is the condition of /livez. A stream of nats-server whose file failed once (a full disk) stays failed until the server
// starts again, though there is room by then (measured on 2.14.10). While the disk is full a restart would not help.
func (c *ControlPlane) storageAlive() error {
	d, err := c.audit.Failing()
	if d < stuckAfter {
		return nil
	}
	if full := probeDisk(c.cfg.DataDir); full != nil {
		return nil //nolint:nilerr // not ready, but alive
	}
	return schemas.Wrap(schemas.CodeUnavailable, err, "the audit stream takes no writes although the data folder does: only a restart mends that")
}

// probeDisk writes a file to dir and removes it.
func probeDisk(dir string) error {
	f, err := os.CreateTemp(dir, ".probe-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) //nolint:errcheck // best effort: a leftover does no harm
	_, err = f.Write(make([]byte, probeBytes))
	if err == nil {
		err = f.Sync()
	}
	if closed := f.Close(); err == nil {
		err = closed
	}
	return err
}
