package jetstream

import (
	"context"
	"errors"
	"testing"
	"time"
)

// A request whose time was over is made once more, if there is time left; what was answered is not asked again, whatever the answer.
func TestALateRequestIsMadeAgain(t *testing.T) {
	refused := errors.New("refused")
	late := func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}
	over, end := context.WithCancel(t.Context())
	end()
	for name, c := range map[string]struct {
		ctx     context.Context //nolint:containedctx // of the case
		within  time.Duration
		answers []func(context.Context) error
		want    error
	}{
		"answered":        {t.Context(), time.Hour, []func(context.Context) error{func(context.Context) error { return nil }}, nil},
		"refused":         {t.Context(), time.Hour, []func(context.Context) error{func(context.Context) error { return refused }}, refused},
		"late once":       {t.Context(), time.Millisecond, []func(context.Context) error{late, func(context.Context) error { return nil }}, nil},
		"late twice":      {t.Context(), time.Millisecond, []func(context.Context) error{late, late}, context.DeadlineExceeded},
		"nobody waits":    {over, time.Hour, []func(context.Context) error{late}, context.Canceled},
		"late, then not":  {t.Context(), time.Millisecond, []func(context.Context) error{late, func(context.Context) error { return refused }}, refused},
		"there, and late": {t.Context(), time.Millisecond, []func(context.Context) error{func(ctx context.Context) error { _ = late(ctx); return nil }}, nil},
	} {
		asked := 0
		err := ask(c.ctx, c.within, func(ctx context.Context) error {
			asked++
			return c.answers[min(asked, len(c.answers))-1](ctx)
		})
		if !errors.Is(err, c.want) || asked != len(c.answers) {
			t.Errorf("%s: %v after %d times", name, err, asked)
		}
	}
}
