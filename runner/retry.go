package runner

import (
	"math/rand/v2"
	"time"
)

const (
	firstRetry   = 2 * time.Second // SPEC E8: within 5 s
	slowestRetry = 20 * time.Second
)

// retryDelay spaces attempts for ever: after the first failure (attempt 1) at most firstRetry, then doubling to slowestRetry,
// each from a quarter of that to the whole of it, so that many runners don't come at once.
func retryDelay(attempt int) time.Duration {
	doublings := min(max(attempt, 1)-1, 10)
	most := min(firstRetry<<doublings, slowestRetry)
	return most/4 + rand.N(most*3/4) //nolint:gosec // spreads load, keeps no secret
}
