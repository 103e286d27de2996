package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/jedib0t/go-pretty/v6/progress"
)

// newProgress is a bar on a terminal, and nothing elsewhere or when quiet.
func newProgress(f *os.File, quiet bool) progressSink {
	if quiet || !isTerminal(f) {
		return noProgress{}
	}
	return newBar(f)
}

type noProgress struct{}

func (noProgress) accepted(acceptedLine) {}
func (noProgress) progress(progressLine) {}
func (noProgress) stop()                 {}

// progressLines writes a line per step.
type progressLines struct{ w io.Writer }

func (p progressLines) accepted(a acceptedLine) {
	_, _ = fmt.Fprintf(p.w, "  accepted    by runner %q, process %d\n", a.RunnerID, a.RunnerPID)
}

func (p progressLines) progress(l progressLine) {
	_, _ = fmt.Fprintf(p.w, "  %-11s %d rows, %s  %s\n", l.Phase, l.Rows, size(l.Bytes), oneLine(l.Message))
}

func (progressLines) stop() {}

// bar shows rows and bytes while they come; nobody knows the total, so it has no end.
type bar struct {
	writer  progress.Writer
	tracker *progress.Tracker
	done    chan struct{}
}

func newBar(f *os.File) *bar {
	b := &bar{writer: progress.NewWriter(), tracker: &progress.Tracker{Message: "waiting for the runner", Units: progress.UnitsBytes}, done: make(chan struct{})}
	b.writer.SetOutputWriter(f)
	b.writer.SetUpdateFrequency(100 * time.Millisecond)
	b.writer.SetStyle(progress.StyleBlocks)
	b.writer.Style().Visibility.ETA, b.writer.Style().Visibility.Percentage = false, false
	b.writer.SetMessageLength(44)
	b.writer.AppendTracker(b.tracker)
	go func() { b.writer.Render(); close(b.done) }()
	return b
}

func (b *bar) accepted(a acceptedLine) {
	if a.RunnerID != "" {
		b.tracker.UpdateMessage("accepted by " + oneLine(a.RunnerID))
	}
}

func (b *bar) progress(p progressLine) {
	text := p.Phase
	if p.Rows > 0 {
		text = fmt.Sprintf("%s, %d rows", p.Phase, p.Rows)
	}
	b.tracker.UpdateMessage(text)
	b.tracker.SetValue(p.Bytes)
}

func (b *bar) stop() {
	const again = 5 * time.Millisecond
	b.tracker.MarkAsDone()
	for {
		b.writer.Stop() // which does nothing before Render has begun
		select {
		case <-b.done:
			return
		case <-time.After(again):
		}
	}
}
