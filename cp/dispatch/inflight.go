package dispatch

// InFlight is how many dispatches run on this replica now.
func (d *Dispatcher) InFlight() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.running)
}
