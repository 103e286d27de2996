package runner

import (
	"context"
	"log/slog"
)

// tagged is the log of one work: each line has the dispatch. The attribute is prepared line by line, since most works write one line
// or none, and preparing it for all costs as much as a line.
type tagged struct {
	slog.Handler
	dispatch string
}

func (t *tagged) with() slog.Handler {
	return t.Handler.WithAttrs([]slog.Attr{slog.String("dispatch", t.dispatch)})
}

// Handle writes the line with the dispatch.
func (t *tagged) Handle(ctx context.Context, r slog.Record) error { return t.with().Handle(ctx, r) }

// WithAttrs adds attributes behind the dispatch.
func (t *tagged) WithAttrs(attrs []slog.Attr) slog.Handler { return t.with().WithAttrs(attrs) }

// WithGroup names a group of what follows the dispatch.
func (t *tagged) WithGroup(name string) slog.Handler { return t.with().WithGroup(name) }
