package runner

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// quiet is a log that takes no lines of level debug.
type quiet struct{ *journal }

func (quiet) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }

// In a burst the first works have lines of their own, and the rest of the second one together.
func TestABurstOfWorksHasFewLines(t *testing.T) {
	log := newJournal()
	d := doneLog{log: slog.New(quiet{log})}
	for i := range mostDone + 50 {
		counted, at := d.count(time.Millisecond, 2, 100)
		if counted != (i >= mostDone) || (at == time.Second) != (i == mostDone) {
			t.Fatalf("work %d: counted %v, flush at %s", i, counted, at)
		}
	}
	if at := d.flush(time.Second - 1); at != time.Second || log.text() != "" {
		t.Errorf("before the second is over: again at %s, log %q", at, log.text())
	}
	if at := d.flush(time.Second); at != 0 || log.text() != "INFO more works done works=50 rows=100 bytes=5000" {
		t.Errorf("again at %s, log %q", at, log.text())
	}
	if at := d.flush(2 * time.Second); at != 0 {
		t.Errorf("nothing was counted, and is to be flushed at %s", at)
	}
	if counted, _ := d.count(2*time.Second, 1, 1); counted {
		t.Error("the next second has no lines")
	}
}

// A runner under load tells of every work, in one line or together with others.
func TestEveryWorkIsInTheLog(t *testing.T) {
	log := newJournal()
	d := doneLog{log: slog.New(quiet{log})}
	for range 3 * mostDone {
		d.done(uptime(), "d", "test", 1, 8, time.Millisecond)
	}
	d.flush(uptime() + time.Second)
	own := strings.Count(log.text(), "INFO work done dispatch=d source=test rows=1 bytes=8 after=1ms")
	if own < mostDone || own < 3*mostDone && !strings.Contains(log.text(), "INFO more works done works=") {
		t.Errorf("%d lines:\n%s", own, log.text())
	}
}
