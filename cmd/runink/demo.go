package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/runink/demodata"
	"github.com/org-runink/runbus/cp"
)

func demoCommand() *cli.Command {
	return command("demo", "run one fetch on real data: control plane and runner as two processes, on free ports, nothing left behind", "",
		[]cli.Flag{&cli.BoolFlag{Name: "verbose", Usage: "show the logs of both processes", DisableDefaultText: true}}, demo)
}

// demoReport is what --json prints.
type demoReport struct {
	DispatchID      string      `json:"dispatchId"`
	TenantID        string      `json:"tenantId"`
	RunnerID        string      `json:"runnerId"`
	PID             int         `json:"pid"`
	ControlPlanePID int         `json:"controlPlanePid"`
	RunnerPID       int64       `json:"runnerPid"` // as the executing process reports it
	Source          string      `json:"source"`
	Rows            int64       `json:"rows"`
	Bytes           int64       `json:"bytes"`
	Phases          []phaseLine `json:"phases"`
	DurationMs      int64       `json:"durationMs"`
}

func demo(c *cli.Context) (err error) {
	if err := noArgs(c); err != nil {
		return err
	}
	started := time.Now()
	ctx, stop := interruptible(c.Context) // before anything is made that must go again
	defer stop()
	dir, err := os.MkdirTemp("", "runink-demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	logs := io.Discard
	if c.Bool("verbose") {
		logs = os.Stderr
	}
	out := c.App.Writer
	if c.Bool("json") {
		out = io.Discard
	}
	tell := func(format string, args ...any) { _, _ = fmt.Fprintf(out, format, args...) } // who closed the pipe has seen enough
	tell("Starting a control plane and a runner, each a process of its own …\n")
	s, err := startStack(ctx, stackConfig{dataDir: dir, http: "127.0.0.1:0", nats: "127.0.0.1:0", runnerID: "demo", managed: cp.ManagedNone, logs: logs})
	if err != nil {
		return err
	}
	defer func() {
		if stopErr := s.stop(); err == nil {
			err = stopErr
		}
	}()
	tell("  control plane  process %d, API %s, bus %s\n  runner         process %d, %q of tenant %q, enrolled with a service-account key\n\n",
		s.endpoint.PID, s.endpoint.HTTP, s.endpoint.NATS, s.enrolled.PID, s.enrolled.RunnerID, s.enrolled.TenantID)

	var rows bytes.Buffer
	run := fetch{
		api:  s.api,
		body: fetchBody{RunnerID: s.enrolled.RunnerID, Source: &sourceBody{Kind: "file", Settings: map[string]string{"path": s.sample()}}},
		rows: newTableRows(&rows, demoTableRows), progress: progressLines{out},
	}
	tell("Fetching %s (%s) on runner %q:\n", demodata.Name, demodata.Title, s.enrolled.RunnerID)
	result, err := run.stream(ctx)
	if err != nil {
		return err
	}
	if result.Rows != demodata.Rows {
		return fmt.Errorf("the demo fetched %d rows of %d", result.Rows, demodata.Rows)
	}
	report := demoReport{
		DispatchID: result.DispatchID, TenantID: run.accepted.TenantID, RunnerID: result.RunnerID, PID: os.Getpid(),
		ControlPlanePID: s.endpoint.PID, RunnerPID: result.RunnerPID, Source: "file", Rows: result.Rows, Bytes: result.Bytes,
		Phases: result.Phases, DurationMs: time.Since(started).Milliseconds(),
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, report)
	}
	tell("\n%s\n%d rows, %s of Arrow, from process %d.\n\nTimeline of dispatch %s:\n", rows.String(), result.Rows, size(result.Bytes), result.RunnerPID, result.DispatchID)
	printTimeline(out, result.Phases)
	tell("\nStart to result: %s. `%s up` keeps such a stack running.\n", time.Since(started).Round(time.Millisecond), selfCommand("runink"))
	return nil
}

const demoTableRows = 10
