package cp

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/org-runink/runbus/jetstream"
)

const (
	// stepWithin is how long JetStream may not answer a step of the start: a host may stand still for some seconds, and nobody is served yet
	// that would wait.
	stepWithin = time.Minute
	stepAgain  = 100 * time.Millisecond
)

// patiently takes a step of the start, again as long as JetStream does not answer (jetstream.ErrUnavailable), within stepWithin or until ctx
// ends. Any other error ends it. A step that failed must have left nothing open.
func patiently(ctx context.Context, log *slog.Logger, what string, step func() error) error {
	give := time.Now().Add(stepWithin)
	for {
		err := step()
		if !errors.Is(err, jetstream.ErrUnavailable) || time.Now().After(give) {
			return err
		}
		log.Warn("JetStream does not answer; a step of the start is taken again", "step", what, "error", err)
		select {
		case <-ctx.Done():
			return err
		case <-time.After(stepAgain):
		}
	}
}
