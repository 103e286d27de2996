package dispatch

import (
	"time"

	"github.com/org-runink/runbus/bus"
)

// Receivers are the dispatcher's result streams.
func (d *Dispatcher) Receivers() *bus.Receivers { return d.receivers }

// StandStill has it seem that the process stood still for so long.
func (d *Dispatcher) StandStill(long time.Duration) { d.stood.Add(int64(long)) }

// Spare sets how long standstills put off the end of one wait, before any fetch.
func (d *Dispatcher) Spare(long time.Duration) { d.spare = int64(long) }
