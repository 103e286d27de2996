// Package process holds what every binary of this module does the same way: its log, its signals, its one line on standard
// output when it is ready, and its exit status.
package process

import (
	"encoding/json"
	"io"
	"os"
	"os/signal"
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

// OnHangup calls act at each SIGHUP, until the returned function is called.
func OnHangup(act func()) (release func()) {
	signals, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(signals, syscall.SIGHUP)
	var ended sync.WaitGroup
	ended.Go(func() {
		for {
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
