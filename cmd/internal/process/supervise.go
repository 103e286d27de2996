package process

import (
	"log/slog"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// Supervisor is the service manager that started this process; all it is told is lost if none did.
type Supervisor struct {
	log  *slog.Logger
	done chan struct{}
	once sync.Once
}

// NewSupervisor has told nothing yet.
func NewSupervisor(log *slog.Logger) *Supervisor {
	return &Supervisor{log: log, done: make(chan struct{})}
}

// Up tells the service manager that the process is up and, if it watches over it (WatchdogSec of systemd), that it still is: three
// times in each span that the manager waits, each time after alive has returned. alive must block while the process is stuck. Call it
// once, when the process heeds its signals: the manager may send one at once.
func (s *Supervisor) Up(alive func()) {
	s.tell(daemon.SdNotifyReady)
	within, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		s.log.Warn("WATCHDOG_USEC is not usable: the service manager's watchdog will end this process", "error", err)
	}
	if within > 0 {
		go s.watch(within/3, alive) // not waited for: it may be stuck in alive, which is what it is there to show
	}
}

func (s *Supervisor) watch(every time.Duration, alive func()) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		alive()
		s.tell(daemon.SdNotifyWatchdog)
		select {
		case <-tick.C:
		case <-s.done:
			return
		}
	}
}

// Stopping tells that the process ends by and by. The watchdog is still told until Close.
func (s *Supervisor) Stopping() { s.tell(daemon.SdNotifyStopping) }

// Close ends the telling. It does not wait for an alive that is stuck.
func (s *Supervisor) Close() { s.once.Do(func() { close(s.done) }) }

func (s *Supervisor) tell(state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		s.log.Warn("the service manager could not be told", "state", state, "error", err)
	}
}
