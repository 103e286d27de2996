package bus

import "time"

// The times of a result stream.
const (
	// orphanAfter is how long the replica of a stream may be silent before Sender.Orphaned is closed.
	orphanAfter = 30 * time.Second
	// keepaliveEvery is the longest a Receiver that has got a frame is silent.
	keepaliveEvery = 10 * time.Second
	// resumeEvery is how often a sender asks after a reconnect, until credit comes.
	resumeEvery = time.Second
	// probeAfter is how long a sender waits for an acknowledgement before it asks whether its frames arrived.
	probeAfter = 5 * time.Second
	// resendEvery is how often a receiver asks again for the same missing frame.
	resendEvery = time.Second
	// tombstoneFor is how long a receiver's replica knows a closed dispatch.
	tombstoneFor = 5 * time.Minute
)

// timing is those times, as one stream end has them.
type timing struct {
	orphan, keepalive, resume, probe, resend, tombstone time.Duration
}

func newTiming(options []Option) timing {
	t := timing{orphanAfter, keepaliveEvery, resumeEvery, probeAfter, resendEvery, tombstoneFor}
	for _, o := range options {
		o(&t)
	}
	return t
}

// tick is how often deadlines are looked at.
func (t timing) tick() time.Duration {
	return max(min(t.orphan, t.keepalive, t.resume, t.probe, t.resend)/4, time.Millisecond)
}

// Option changes a time of NewSenders or NewReceivers. Production runs with none.
type Option func(*timing)

// OrphanAfter is how long the replica of a stream may be silent before Sender.Orphaned is closed. Default 30 s.
func OrphanAfter(d time.Duration) Option { return func(t *timing) { t.orphan = d } }

// KeepaliveEvery is the longest a Receiver that has got a frame is silent. Default 10 s; at most a third of OrphanAfter.
func KeepaliveEvery(d time.Duration) Option { return func(t *timing) { t.keepalive = d } }

// ResumeEvery is how often a sender asks after a reconnect until credit comes. Default 1 s.
func ResumeEvery(d time.Duration) Option { return func(t *timing) { t.resume = d } }

// ProbeAfter is how long a sender waits for an acknowledgement before it asks whether its frames arrived. Default 5 s.
func ProbeAfter(d time.Duration) Option { return func(t *timing) { t.probe = d } }

// ResendEvery is how often a receiver asks again for the same missing frame. Default 1 s.
func ResendEvery(d time.Duration) Option { return func(t *timing) { t.resend = d } }

// TombstoneFor is how long closed dispatches are known. Default 5 min.
func TombstoneFor(d time.Duration) Option { return func(t *timing) { t.tombstone = d } }
