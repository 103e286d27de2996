package process

import (
	"os"
	"runtime"
)

// heapFloor is how much a serving process may allocate at least between two garbage collections, in bytes.
const heapFloor = 32 << 20

// RelaxMemory keeps the garbage collector from running all the time in a process that moves results: its live heap is a few
// MiB, so that with Go's default it would collect after every few chunks (measured: a third of the control plane's processor
// time in a large fetch). It takes address space, not memory: at most 64 MiB more become resident. GOGC and GOMEMLIMIT, if
// set, are left to whoever set them. The function it returns gives that up again.
func RelaxMemory() (release func()) {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return func() {}
	}
	// Never touched, so never resident; counted by the collector's pace as live.
	floor := make([]byte, heapFloor)
	return func() { runtime.KeepAlive(floor) }
}
