// Command dispatch measures what a dispatch costs. This process has the dispatcher and the embedded server, a process that it
// starts has the runner, another one the runner's side of the controls, and TLS 1.3 is between them. In one run, in turns, it measures
// three paths in a closed loop:
//
//   - product: dispatch.Dispatcher.Fetch with registry, audit and sessions, to the relay at the caller; the runner is the
//     product's, with a connector that does nothing and returns 1 KB;
//   - raw: nc.Request with payloads of the same sizes, answered in the subscription's callback;
//   - grpc: assignment, accepted and result as messages of one gRPC bidirectional stream.
//
// It prints medians over the repetitions, and medians of the ratios of neighbours in time. Nothing is asserted.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// settings are the flags of one run.
type settings struct {
	levels  []int
	repeat  int
	span    time.Duration
	warm    time.Duration
	paths   []string
	scale   int
	profile string
	sampled time.Duration // length of each profile
	journal string
	json    bool
}

func main() {
	floor := make([]byte, 32<<20) // as the product's programs do (cmd/internal/process): the collector rests
	defer runtime.KeepAlive(floor)
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case runnerRole:
			exit(runRunner())
		case controlsRole:
			exit(runControls())
		}
	}
	var s settings
	levels := flag.String("levels", "1,16,64,256", "dispatches in flight")
	paths := flag.String("paths", "product,raw,grpc", "what is measured")
	flag.IntVar(&s.repeat, "repeat", 7, "repetitions of each")
	flag.DurationVar(&s.span, "span", time.Second, "length of one repetition")
	flag.DurationVar(&s.warm, "warm", 300*time.Millisecond, "run before the clock in each repetition")
	flag.IntVar(&s.scale, "scale", 5000, "runners that are registered for the comparison with one; 0 leaves it out")
	flag.StringVar(&s.journal, "journal", "off", "the runner's own journal: on or off")
	flag.StringVar(&s.profile, "profile", "", "folder for CPU profiles of both processes, one a path and level")
	flag.DurationVar(&s.sampled, "sampled", 3*time.Second, "length of each CPU profile")
	flag.BoolVar(&s.json, "json", false, "print one JSON document on standard output, and the tables on standard error")
	flag.Parse()
	s.paths = strings.Split(*paths, ",")
	for _, l := range strings.Split(*levels, ",") {
		n, err := strconv.Atoi(l)
		if err != nil || n < 1 {
			exit(fmt.Errorf("-levels: %q is not a number of dispatches", l))
		}
		s.levels = append(s.levels, n)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, s)
	stop()
	exit(err)
}

func exit(err error) {
	if err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "dispatch:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func run(ctx context.Context, s settings) (err error) {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	dir, err := os.MkdirTemp("", "runbus-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	p, err := startPlane(ctx, dir, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	children, err := startChildren(p, dir, s.journal)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, children.stop()) }()
	if err := p.await(ctx, runnerID); err != nil {
		return err
	}
	sizes, err := p.sizes(ctx)
	if err != nil {
		return err
	}
	if err := children.controls.resultSize(sizes.result); err != nil {
		return err
	}
	out := tables(s.json)
	out.Printf("assignment %d bytes, result %d bytes (an Arrow stream with 1024 bytes in one row), TLS 1.3, two processes a path, %s a repetition, %d repetitions, the runner's journal %s\n"+
		"product: its runner has one of Go's processors while that is enough, as core-runner; raw and gRPC: Go's default\n\n",
		sizes.assignment, sizes.result, s.span, s.repeat, s.journal)
	all := map[string]path{}
	for _, name := range s.paths {
		switch name {
		case productPath:
			all[name] = p.fetch(runnerID)
		case "raw":
			all[name], err = p.raw(sizes)
		case "grpc":
			all[name], err = p.grpc.dispatch(ctx)
		default:
			err = fmt.Errorf("-paths: no %q", name)
		}
		if err != nil {
			return err
		}
	}
	m := meter{children: children, waiting: p.waiting, settings: s}
	measured, err := m.compare(ctx, out, all)
	if err != nil {
		return err
	}
	measured.Assignment, measured.Result = sizes.assignment, sizes.result
	if s.json {
		if err := json.NewEncoder(os.Stdout).Encode(measured); err != nil {
			return err
		}
	}
	if s.scale > 0 {
		return m.fleet(ctx, out, p, s.scale)
	}
	return nil
}
