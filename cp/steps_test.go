package cp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/org-runink/runbus/jetstream"
)

// A step of the start is taken again while JetStream does not answer, for a minute, and for nothing else.
func TestAStepIsTakenAgain(t *testing.T) {
	other := errors.New("drift")
	away := fmt.Errorf("open: %w", jetstream.ErrUnavailable)
	for name, c := range map[string]struct {
		errs  []error // of each time; the last one stays
		want  error
		times int
		took  time.Duration
	}{
		"at once":     {[]error{nil}, nil, 1, 0},
		"third time":  {[]error{away, away, nil}, nil, 3, 2 * stepAgain},
		"other error": {[]error{other}, other, 1, 0},
		"other later": {[]error{away, other}, other, 2, stepAgain},
		"never":       {[]error{away}, away, int(stepWithin/stepAgain) + 2, stepWithin + stepAgain},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began, times := time.Now(), 0
				err := patiently(t.Context(), slog.New(slog.DiscardHandler), "x", func() error {
					times++
					return c.errs[min(times, len(c.errs))-1]
				})
				if !errors.Is(err, c.want) || times != c.times || time.Since(began) != c.took {
					t.Errorf("%v after %d times in %s, want %v, %d, %s", err, times, time.Since(began), c.want, c.times, c.took)
				}
			})
		})
	}
	t.Run("interrupted", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			began := time.Now()
			if err := patiently(ctx, slog.New(slog.DiscardHandler), "x", func() error { return away }); !errors.Is(err, jetstream.ErrUnavailable) || time.Since(began) != time.Second {
				t.Errorf("%v after %s", err, time.Since(began))
			}
		})
	})
}
