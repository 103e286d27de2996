package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/schemas"
)

func upCommand() *cli.Command {
	return command("up", "start a local control plane and a runner, and keep them running", "", []cli.Flag{
		&cli.StringFlag{Name: "data-dir", Usage: "`DIR` for keys, certificates and state, mode 0700 (default: runink in the user's data folder)", EnvVars: []string{"RUNBUS_DATA_DIR"}},
		&cli.StringFlag{Name: "http", Usage: "address of the HTTP API", Value: cp.DefaultHTTP},
		&cli.StringFlag{Name: "nats", Usage: "address for runners and the nats CLI", Value: cp.DefaultNATS},
		&cli.StringFlag{Name: "websocket", Usage: "address for runners that come over WebSocket (default: off)"},
		&cli.BoolFlag{Name: "no-runner", Usage: "start the control plane alone"},
		&cli.StringSliceFlag{Name: "files", Usage: "`DIR` that the runner's file and sqlite sources may read; may be repeated"},
		&cli.StringFlag{Name: "log-file", Usage: "`FILE` for the logs of both processes (default: standard error)"},
	}, up)
}

func up(c *cli.Context) error {
	if err := noArgs(c); err != nil {
		return err
	}
	dir, err := dataDir(c.String("data-dir"))
	if err != nil {
		return err
	}
	cfg := stackConfig{
		dataDir: dir, http: c.String("http"), nats: c.String("nats"), webSocket: c.String("websocket"),
		files: c.StringSlice("files"), logs: os.Stderr, runnerID: "local",
	}
	if c.Bool("no-runner") {
		cfg.runnerID = ""
	}
	for _, f := range cfg.files {
		if info, err := os.Stat(f); err != nil || !info.IsDir() {
			return usagef("--files %s is not a folder", f)
		}
	}
	if name := c.String("log-file"); name != "" {
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err != nil {
			return usagef("--log-file: %v", err)
		}
		defer f.Close()
		cfg.logs = f
	}
	ctx, stop := interruptible(c.Context)
	defer stop()
	s, err := startStack(ctx, cfg)
	if err != nil {
		return err
	}
	if err := saveContext("local", endpoint{
		URL: s.endpoint.HTTP, Token: s.token, DataDir: s.endpoint.DataDir, NATS: s.endpoint.NATS, NATSCA: s.endpoint.CA,
	}, true); err != nil {
		_ = s.stop()
		return err
	}
	if c.Bool("json") {
		err = printJSON(c.App.Writer, s.endpoint)
	} else {
		err = whatNext(c.App.Writer, s)
	}
	if err != nil {
		_ = s.stop()
		return err
	}
	runnerExited := make(<-chan struct{})
	if s.runner != nil {
		runnerExited = s.runner.exited
	}
	select {
	case <-ctx.Done():
		return s.stop()
	case <-s.plane.exited:
		err = s.plane.failure()
	case <-runnerExited:
		err = s.runner.failure()
	}
	_ = s.stop()
	return err
}

// dataDir is DIR, or a folder of this user's.
func dataDir(dir string) (string, error) {
	if dir != "" {
		return dir, nil
	}
	if base := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(base) {
		return filepath.Join(base, "runink"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", schemas.Errorf(schemas.CodeInvalid, "no folder for the data: %w", err).WithHint("name one with --data-dir")
	}
	return filepath.Join(home, ".local", "share", "runink"), nil
}

func whatNext(w io.Writer, s *stack) error {
	text := fmt.Sprintf("Runbus is up.\n\n  API    %s\n  NATS   %s\n", s.endpoint.HTTP, s.endpoint.NATS)
	if s.endpoint.WebSocket != "" {
		text += fmt.Sprintf("         %s\n", s.endpoint.WebSocket)
	}
	text += fmt.Sprintf("  data   %s\n\nThe context \"local\" has the token of the tenant's admin. In another terminal:\n\n  runink runner list\n", s.endpoint.DataDir)
	if s.runner != nil {
		text += fmt.Sprintf("  runink fetch run --runner %s --source file --set path=%s\n", s.enrolled.RunnerID, s.sample())
	} else {
		text += fmt.Sprintf(`  runink key create edge          # then, on the runner's host:
  RUNNER_ENROLL_ADDR=%s RUNNER_ENROLL_CA=%s RUNNER_ID=edge RUNNER_ENROLL_TOKEN=… core-runner serve
`, s.endpoint.NATS, s.endpoint.CA)
	}
	text += "  runink nats context             # then: nats --context runbus-ops sub 'runbus.v1.>' --translate 'runink decode'\n\nCtrl-C stops it.\n"
	_, err := io.WriteString(w, text)
	return err
}
