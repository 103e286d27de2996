package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/org-runink/runbus/tests/bench/proc"
)

// report is what one run has measured. Times are in microseconds.
type report struct {
	Assignment int       `json:"assignmentBytes"`
	Result     int       `json:"resultBytes"`
	Span       string    `json:"span"`
	Repeat     int       `json:"repetitions"`
	Medians    []medians `json:"medians"`
	Ratios     []ratios  `json:"productAgainst"` // medians of the ratios of one repetition
}

// medians are those of a path at one level, over the repetitions.
type medians struct {
	InFlight  int     `json:"inFlight"`
	Path      string  `json:"path"`
	PerSecond float64 `json:"dispatchesPerSecond"`
	P50       float64 `json:"p50"`
	P99       float64 `json:"p99"`
	CPU       float64 `json:"cpu"`
	RunnerCPU float64 `json:"cpuOfRunner"`
	Messages  float64 `json:"messages,omitempty"`
}

// ratios are those of the product to another path at one level.
type ratios struct {
	InFlight   int     `json:"inFlight"`
	Path       string  `json:"path"`
	Throughput float64 `json:"throughput"`
	P50        float64 `json:"p50"`
	P99        float64 `json:"p99"`
	CPU        float64 `json:"cpu"`
}

// tables is where tables go.
func tables(json bool) proc.Out {
	if json {
		return proc.Out{W: os.Stderr}
	}
	return proc.Out{W: os.Stdout}
}

// compare measures the paths in turns and prints the tables.
func (m meter) compare(ctx context.Context, out proc.Out, paths map[string]path) (*report, error) {
	names := m.settings.paths
	r := &report{Span: m.settings.span.String(), Repeat: m.settings.repeat}
	out.Printf("%-9s %-8s %12s %10s %10s %14s %14s %9s\n", "in flight", "path", "dispatches/s", "p50", "p99", "CPU/dispatch", "of it runner", "messages")
	for _, level := range m.settings.levels {
		of := map[string][]figures{}
		for i := range m.settings.repeat {
			for j := range names {
				name := names[(i+j)%len(names)] // who goes first changes
				f, err := m.measure(ctx, name, paths[name], level)
				if err != nil {
					return nil, fmt.Errorf("%s at %d: %w", name, level, err)
				}
				of[name] = append(of[name], f)
			}
		}
		for _, name := range names {
			one := summary(level, name, of[name])
			r.Medians = append(r.Medians, one)
			out.Printf("%-9d %-8s %12.0f %7.0f us %7.0f us %11.1f us %11.1f us %9.2f\n",
				level, name, one.PerSecond, one.P50, one.P99, one.CPU, one.RunnerCPU, one.Messages)
			if product := of[productPath]; name != productPath && product != nil {
				r.Ratios = append(r.Ratios, against(level, name, product, of[name]))
			}
		}
		if m.settings.profile != "" {
			for _, name := range names {
				if err := m.profile(ctx, name, paths[name], level); err != nil {
					return nil, err
				}
			}
		}
	}
	if len(r.Ratios) == 0 {
		return r, nil
	}
	out.Printf("\nproduct against the others: medians of the ratios of one repetition\n%-9s %-8s %12s %10s %10s %14s\n",
		"in flight", "against", "throughput", "p50", "p99", "CPU/dispatch")
	for _, a := range r.Ratios {
		out.Printf("%-9d %-8s %12.2f %10.2f %10.2f %14.2f\n", a.InFlight, a.Path, a.Throughput, a.P50, a.P99, a.CPU)
	}
	return r, nil
}

// summary is the medians of the repetitions of a path.
func summary(level int, name string, of []figures) medians {
	us := func(get func(figures) float64) float64 { return median(of, get) / float64(time.Microsecond) }
	return medians{
		InFlight: level, Path: name, PerSecond: median(of, perSecond), P50: us(p50), P99: us(p99), CPU: us(cpu), RunnerCPU: us(runnerCPU),
		Messages: median(of, messages),
	}
}

// against is the medians of the ratios of repetitions that are neighbours in time.
func against(level int, name string, product, other []figures) ratios {
	ratio := func(get func(figures) float64) float64 {
		var all []float64
		for i, f := range product {
			all = append(all, get(f)/get(other[i]))
		}
		return middle(all)
	}
	return ratios{InFlight: level, Path: name, Throughput: ratio(perSecond), P50: ratio(p50), P99: ratio(p99), CPU: ratio(cpu)}
}

func median(all []figures, get func(figures) float64) float64 {
	var values []float64
	for _, f := range all {
		values = append(values, get(f))
	}
	return middle(values)
}

// middle is the median.
func middle(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return (values[(len(values)-1)/2] + values[len(values)/2]) / 2
}
