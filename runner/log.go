package runner

import (
	"context"
	"log/slog"
	"sync"
	"time"
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

// mostDone is how many works that went well have a line of their own within a second. Those beyond have one together, at its end: a
// log of thousands of lines a second tells nobody anything, and was a fifth of what a small work cost. What failed always has
// its own, and so has everything at level debug; the journal has every work in any case.
const mostDone = 100

// doneLog writes the lines of works that went well. Safe for concurrent use.
type doneLog struct {
	log *slog.Logger

	mu                 sync.Mutex
	second             time.Duration // uptime at which it began
	lines              int           // in it
	works, rows, bytes int64         // in it, without a line
}

// done writes the line of one work, or counts it; then flush is to be called at the uptime that it returns, which else is 0. now is the
// uptime.
func (d *doneLog) done(now time.Duration, dispatch, kind string, rows, bytes int64, after time.Duration) (flushAt time.Duration) {
	ctx := context.Background()
	if !d.log.Enabled(ctx, slog.LevelDebug) {
		counted, at := d.count(now, rows, bytes)
		if counted {
			return at
		}
	}
	d.log.LogAttrs(ctx, slog.LevelInfo, "work done", slog.String("dispatch", dispatch), slog.String("source", kind),
		slog.Int64("rows", rows), slog.Int64("bytes", bytes), slog.Duration("after", after))
	return 0
}

// count counts a work that gets no line.
func (d *doneLog) count(now time.Duration, rows, bytes int64) (counted bool, flushAt time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if now >= d.second+time.Second {
		d.tell()
		d.second, d.lines = now, 0
	}
	if d.lines < mostDone {
		d.lines++
		return false, 0
	}
	if d.works++; d.works == 1 {
		flushAt = d.second + time.Second
	}
	d.rows += rows
	d.bytes += bytes
	return true, flushAt
}

// flush writes the line of those that were counted, if their second is over. Else it returns the uptime at which it is; 0 when there
// are none.
func (d *doneLog) flush(now time.Duration) (again time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.works > 0 && now < d.second+time.Second {
		return d.second + time.Second
	}
	d.tell()
	return 0
}

// tell writes the line of those that were counted; mu is held.
func (d *doneLog) tell() {
	if d.works == 0 {
		return
	}
	d.log.LogAttrs(context.Background(), slog.LevelInfo, "more works done", slog.Int64("works", d.works),
		slog.Int64("rows", d.rows), slog.Int64("bytes", d.bytes))
	d.works, d.rows, d.bytes = 0, 0, 0
}
