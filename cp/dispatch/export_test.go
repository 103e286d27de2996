package dispatch

import "github.com/org-runink/runbus/bus"

// Receivers are the dispatcher's result streams.
func (d *Dispatcher) Receivers() *bus.Receivers { return d.receivers }
