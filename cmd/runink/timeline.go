package main

import (
	"fmt"
	"io"
	"time"
)

// phaseLine is one step of a dispatch's timeline.
type phaseLine struct {
	Phase string    `json:"phase"`
	At    time.Time `json:"at"`
	By    string    `json:"by"`
}

func printTimeline(w io.Writer, phases []phaseLine) {
	for _, p := range phases {
		_, _ = fmt.Fprintf(w, "  %+8.1f ms  %-12s %s\n", float64(p.At.Sub(phases[0].At).Microseconds())/1000, p.Phase, p.By)
	}
}
