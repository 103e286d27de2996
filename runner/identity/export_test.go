package identity

import "time"

// SetClock lets a test tell the time.
func (r *Renewals) SetClock(now func() time.Time) { r.now = now }
