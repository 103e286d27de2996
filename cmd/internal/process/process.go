// Package process holds what every binary of this module does the same way: its log, its signals, its one line on standard
// output when it is ready, and its exit status.
package process

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
)

// Exit statuses of commands (SPEC, "Interfaces that are fixed now"). Runners have more: runner.Exit….
const (
	ExitDone    = 0
	ExitFailed  = 1
	ExitUsage   = 2
	ExitRefused = 3
	ExitUnknown = 4
)

// NewLog is a logger on w as LOG_LEVEL (debug, info, warn, error; default info) and LOG_FORMAT (text, json; default text)
// say.
func NewLog(w io.Writer, getenv func(string) string) (*slog.Logger, error) {
	var level slog.Level
	if v := getenv("LOG_LEVEL"); v != "" {
		if err := level.UnmarshalText([]byte(v)); err != nil {
			return nil, fmt.Errorf("LOG_LEVEL is %q: use debug, info, warn or error", v)
		}
	}
	options := &slog.HandlerOptions{Level: level}
	switch v := strings.ToLower(getenv("LOG_FORMAT")); v {
	case "", "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	default:
		return nil, fmt.Errorf("LOG_FORMAT is %q: use text or json", v)
	}
}

// OnStop calls first at the first SIGINT or SIGTERM and again at each later one, until the returned function is called.
func OnStop(first, again func()) (release func()) {
	signals, done := make(chan os.Signal, 2), make(chan struct{})
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	var ended sync.WaitGroup
	ended.Go(func() {
		for act := first; ; act = again {
			select {
			case <-signals:
				act()
			case <-done:
				return
			}
		}
	})
	return func() {
		signal.Stop(signals)
		close(done)
		ended.Wait()
	}
}

// Announce writes v as one line of JSON: how a child tells its parent that it is ready. It is not an error if nobody reads.
func Announce(w io.Writer, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		return
	}
	_, _ = w.Write(append(b, '\n'))
}
