package runner

import (
	"net"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/schemas"
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

// A cut of ten seconds leaves time within the grace of fifteen: whenever it ends, the next attempt comes within two seconds. What is
// answered slowly, or refused, is not asked so often; nor is what has been away for long.
func TestPausesLeaveTimeWithinTheGrace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var r redial
		now := time.Unix(0, 0)
		lost := now
		for attempt := 1; now.Sub(lost) < 15*time.Second; attempt++ {
			wait := r.pause(attempt, retryDelay(attempt), false, now)
			if wait > firstRetry {
				t.Fatalf("attempt %d, %s after the cut: a pause of %s", attempt, now.Sub(lost), wait)
			}
			most := 200
			if busy := rapid.Bool().Draw(t, "a busy host finds nobody"); busy {
				most = 3000
			}
			took := rapid.IntRange(0, most).Draw(t, "ms")
			r.nobody.Store(took > 200)
			now = now.Add(wait + time.Duration(took)*time.Millisecond)
		}
	})
	for name, c := range map[string]struct {
		refused, nobody bool
		took, since     time.Duration
		want            time.Duration
	}{
		"at once":        {false, false, time.Millisecond, 5 * time.Second, firstRetry},
		"nobody, slowly": {false, true, time.Second, 5 * time.Second, firstRetry},
		"nobody, now":    {true, true, time.Second, 5 * time.Second, firstRetry}, // the error is of an attempt before
		"refused":        {true, false, time.Millisecond, 5 * time.Second, 8 * time.Second},
		"slow":           {false, false, time.Second, 5 * time.Second, 8 * time.Second},
		"away":           {false, true, time.Millisecond, time.Minute, 8 * time.Second},
	} {
		now := time.Unix(1000, 0)
		r := redial{lost: now.Add(-c.since), next: now.Add(-c.took)}
		r.nobody.Store(c.nobody)
		if got := r.pause(3, 8*time.Second, c.refused, now); got > c.want || c.want > firstRetry && got != c.want {
			t.Errorf("%s: a pause of %s, want %s", name, got, c.want)
		}
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

// After a success the pauses begin anew, of the link and of the hello alike (SPEC E8).
func TestPausesBeginAnewAfterASuccess(t *testing.T) {
	cp := newControlPlane(t)
	proxy := bustest.NewProxy(t, cp.Addr())
	attempts := make(chan int, 1024)
	proxy.Cut(true)
	p := cp.run(t, func(c *Config) { c.Addrs = []string{proxy.Addr()} }, func(a *Agent) {
		a.retry = func(attempt int) time.Duration {
			attempts <- attempt
			return 10 * time.Millisecond
		}
	})
	// rising waits until the n-th attempt in a row, which must begin with the first.
	rising := func(what string, n int) {
		t.Helper()
		for want := 1; want <= n; want++ {
			if got := receive(t, attempts, what); got != want {
				t.Fatalf("%s: attempt %d, want %d", what, got, want)
			}
		}
	}
	settle := func() {
		for len(attempts) > 0 {
			<-attempts
		}
	}
	rising("first link", 4)
	cp.refuse(schemas.Errorf(schemas.CodeUnavailable, "not now"), false)
	proxy.Cut(false)
	p.log.await(t, "enrolment did not succeed")
	settle()
	p.log.awaitTimes(t, 5, "enrolment did not succeed")
	cp.answerWith(cp.accept)
	receive(t, p.enrolled, "enrolment")
	receive(t, cp.beats, "heartbeat")
	settle()

	proxy.Cut(true)
	rising("link after a cut", 4)
	cp.refuse(schemas.Errorf(schemas.CodeUnavailable, "not now"), false)
	settle()
	proxy.Cut(false)
	for { // what is left of the link's attempts
		if got := receive(t, attempts, "attempt"); got == 1 {
			break
		}
	}
	for want := 2; want <= 4; want++ {
		if got := receive(t, attempts, "hello after a cut"); got != want {
			t.Fatalf("hello after a cut: attempt %d, want %d", got, want)
		}
	}
	cp.answerWith(cp.accept)
	receive(t, p.enrolled, "enrolment after the cut")
}

// What a dial finds is seen: nobody, or somebody.
func TestDialsAreWatched(t *testing.T) {
	var r redial
	d := r.through(&net.Dialer{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer func() { _ = l.Close() }()
	for addr, nobody := range map[string]bool{"127.0.0.1:1": true, l.Addr().String(): false} {
		c, err := d.Dial("tcp", addr)
		if (err != nil) != nobody || r.nobody.Load() != nobody {
			t.Errorf("%s: %v, nobody %v", addr, err, r.nobody.Load())
		}
		if err == nil {
			_ = c.Close()
		}
	}
}
