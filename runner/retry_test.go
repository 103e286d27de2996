package runner

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The first retry comes within 5 s, none takes longer than the slowest, and no number of attempts ends it (SPEC E8).
func TestRetryDelay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		attempt := rapid.OneOf(rapid.IntRange(-3, 20), rapid.Int()).Draw(t, "attempt")
		d := retryDelay(attempt)
		if d <= 0 || d > slowestRetry || attempt <= 1 && d > 5*time.Second {
			t.Fatalf("attempt %d after %s", attempt, d)
		}
		if attempt >= 5 && d < slowestRetry/4 {
			t.Fatalf("attempt %d after %s: too soon", attempt, d)
		}
	})
	seen := map[time.Duration]bool{}
	for range 100 {
		seen[retryDelay(1)] = true
	}
	if len(seen) < 50 {
		t.Errorf("100 first retries have %d delays: no jitter", len(seen))
	}
}

// Control-plane time goes on by this host's clock from where an answer set it, half-way of the request.
func TestClock(t *testing.T) {
	var c clock
	if d := time.Since(c.now()); d < 0 || d > time.Minute {
		t.Errorf("before the first answer it is %s off", d)
	}
	got := time.Now()
	sent := got.Add(-4 * time.Second)
	server := time.Now().Add(time.Hour)
	c.adjust(server, sent, got)
	if d := c.now().Sub(server); d < 2*time.Second || d > time.Minute {
		t.Errorf("%s after the server's time, want 2 s and what the test took", d)
	}
}
