package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/controlplane"
	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/runner/policy"
	"github.com/org-runink/runbus/runner/source/all"
	"github.com/org-runink/runbus/schemas"
)

func upCommand() *cli.Command {
	up := command("up", "start a local control plane and a runner, and keep them running", "", []cli.Flag{
		&cli.StringFlag{Name: "data-dir", Usage: "`DIR` for keys, certificates and state, mode 0700 (default: runink in the user's data folder)", EnvVars: []string{"RUNBUS_DATA_DIR"}},
		&cli.StringFlag{Name: "http", Usage: "address of the HTTP API", Value: cp.DefaultHTTP, EnvVars: []string{"RUNBUS_HTTP"}},
		&cli.StringFlag{Name: "nats", Usage: "address for runners and the nats CLI", Value: cp.DefaultNATS, EnvVars: []string{"RUNBUS_NATS"}},
		&cli.StringFlag{Name: "websocket", Usage: "address for runners that come over WebSocket (default: off)", EnvVars: []string{"RUNBUS_WEBSOCKET"}},
		&cli.BoolFlag{Name: "no-runner", Usage: "start no runner that dials the control plane", DisableDefaultText: true},
		&cli.StringFlag{Name: "managed", Usage: "the managed runner, console: local, a child of the control plane, or none", Value: cp.ManagedLocal, EnvVars: []string{envEndpoint}},
		&cli.StringFlag{Name: "managed-policy", Usage: "`FILE` of the local policy: what console may reach, in every tenant (default: in the tenant local what this host reaches, in others public addresses)", EnvVars: []string{envPolicy}},
		&cli.StringSliceFlag{Name: "files", Usage: "`DIR` that the file and sqlite sources of both runners may read; may be repeated (for console alone: MANAGED_RUNNER_FILE_ROOTS)"},
		&cli.StringFlag{Name: "log-file", Usage: "`FILE` for the logs of both processes (default: standard error)"},
	}, up)
	up.Description = "The variables of a control plane (docs/configuration.md) hold for it as they do for face; a flag goes before its variable. Those of\n" +
		"a runner hold for no part of it."
	return up
}

// The variables of face that are flags of up with another name.
const (
	envEndpoint = "MANAGED_RUNNER_ENDPOINT"
	envPolicy   = "MANAGED_RUNNER_POLICY"
)

// planeEnv is what the environment says of the control plane, as face would have it.
func planeEnv(getenv func(string) string) (known cp.Config, set map[string]string, err error) {
	if known, err = cp.ConfigFromEnv(getenv); err != nil {
		hint := ""
		var wrong *schemas.Error
		if errors.As(err, &wrong) {
			hint = wrong.Hint
		}
		return known, nil, usageHint(hint, "%v", err)
	}
	if known.CertFile != "" || known.KeyFile != "" {
		return known, nil, usageHint("unset them, or start face and core-runner: README.md has how",
			"RUNBUS_TLS_CERT and RUNBUS_TLS_KEY are not for runink up: its runner and its context trust the certificate that it makes")
	}
	set = map[string]string{}
	for _, name := range cp.Variables() {
		if value := getenv(name); value != "" {
			set[name] = value
		}
	}
	return known, set, nil
}

// named is the flag, or its variable if the value is from there.
func named(flag, variable, value string) string {
	if value == os.Getenv(variable) {
		return variable
	}
	return flag
}

// upReport is what --json prints once the stack is up.
type upReport struct {
	controlplane.Ready
	RunnerID  string `json:"runnerId,omitempty"`
	RunnerPID int    `json:"runnerPid,omitempty"`
}

func up(c *cli.Context) error {
	if err := noArgs(c); err != nil {
		return err
	}
	dir, err := dataDir(c.String("data-dir"))
	if err != nil {
		return err
	}
	env, set, err := planeEnv(os.Getenv)
	if err != nil {
		return err
	}
	cfg := stackConfig{
		plane: set, stopGrace: env.StopGrace,
		dataDir: dir, http: c.String("http"), nats: c.String("nats"), webSocket: c.String("websocket"),
		files: c.StringSlice("files"), logs: os.Stderr, runnerID: "local", managed: c.String("managed"), policy: c.String("managed-policy"),
	}
	if len(cfg.files) == 0 {
		cfg.managedFiles = env.Managed.FileRoots
	}
	if cfg.managed == "" { // as a variable
		cfg.managed = cp.ManagedLocal
	}
	if cfg.managed != cp.ManagedLocal && cfg.managed != cp.ManagedNone {
		return usagef("%s is %q: runink up has a managed runner that is local or none", named("--managed", envEndpoint, cfg.managed), cfg.managed)
	}
	if cfg.policy != "" {
		if _, err := policy.ReadFile(cfg.policy, all.Kinds()); err != nil {
			return usagef("%s: %v", named("--managed-policy", envPolicy, cfg.policy), err)
		}
		if cfg.policy, err = filepath.Abs(cfg.policy); err != nil {
			return err
		}
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
	if _, err := loadContexts(); err != nil {
		return err // before anything is started: the token could not be kept
	}
	ctx, stop := interruptible(c.Context)
	defer stop()
	s, err := startStack(ctx, cfg)
	if err != nil {
		return err
	}
	saved := endpoint{URL: s.endpoint.HTTP, Token: s.token, DataDir: s.endpoint.DataDir, NATS: s.endpoint.NATS}
	if strings.HasPrefix(saved.URL, "https://") {
		saved.CA = s.endpoint.CA
	}
	if !s.plaintext() {
		saved.NATSCA = s.endpoint.CA
	}
	if err := saveContext("local", saved, true); err != nil {
		_ = s.stop()
		return err
	}
	if s.minted {
		fmt.Fprintf(os.Stderr, "runink: the runner's key was revoked or had expired: it has a new one, sa-%s\n", cfg.runnerID)
	}
	if c.Bool("json") {
		err = printJSON(c.App.Writer, upReport{s.endpoint, s.enrolled.RunnerID, s.enrolled.PID})
	} else {
		err = whatNext(c.App.Writer, s)
	}
	if err != nil {
		_ = s.stop()
		return err
	}
	return s.keep(ctx)
}

// keep runs the stack until ctx ends or a part of it does. A runner that is told to stop for good (its key was revoked, another process
// took its id) leaves the control plane running.
func (s *stack) keep(ctx context.Context) error {
	var runnerExited <-chan struct{}
	if s.runner != nil {
		runnerExited = s.runner.exited
	}
	for {
		select {
		case <-ctx.Done():
			return s.stop()
		case <-s.plane.exited:
			err := s.plane.failure()
			_ = s.stop() // the error that counts is err
			return err
		case <-runnerExited:
			err := s.runner.failure()
			if said := s.runner.said; said == nil || said.Exit != runner.ExitRefused && said.Exit != runner.ExitReplaced {
				_ = s.stop()
				return err
			}
			fmt.Fprintf(os.Stderr, "runink: %s\n  → the control plane goes on without it; `runink up` anew starts a runner with a new key\n", process.Text(err))
			s.runner, runnerExited = nil, nil
		}
	}
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

// whatNext is what to type now, in words that can be pasted.
func whatNext(w io.Writer, s *stack) error {
	runink := selfCommand("runink")
	var b strings.Builder
	fmt.Fprintf(&b, "Runbus is up.\n\n  API    %s\n  NATS   %s\n", s.endpoint.HTTP, s.endpoint.NATS)
	if s.endpoint.WebSocket != "" {
		fmt.Fprintf(&b, "         %s\n", s.endpoint.WebSocket)
	}
	fmt.Fprintf(&b, "  data   %s\n\nThe context \"local\" has the token of the tenant's admin, and is now the current one. In another terminal:\n\n  %s runner list\n", s.endpoint.DataDir, runink)
	switch runner := s.managed; {
	case s.runner != nil:
		runner = s.enrolled.RunnerID
		fallthrough
	case runner != "":
		fmt.Fprintf(&b, "  %s fetch run --runner %s --source file --set %s\n", runink, runner, quote("path="+s.sample()))
	}
	if s.runner == nil {
		trust := "RUNNER_ENROLL_CA=" + quote(s.endpoint.CA)
		if s.plaintext() {
			trust = "RUNNER_ENROLL_TLS=false"
		}
		fmt.Fprintf(&b, "  %s key create edge    # its token goes into a 0600 file on the runner's host; there:\n", runink)
		fmt.Fprintf(&b, "  RUNNER_ENROLL_ADDR=%s %s RUNNER_ID=edge RUNNER_ENROLL_TOKEN_FILE=FILE %s serve\n",
			strings.TrimPrefix(s.endpoint.NATS, "tls://"), trust, selfCommand("core-runner"))
	}
	fmt.Fprintf(&b, "  %s runner create --address 127.0.0.1:7443 dialled    # a runner that is dialled there: prints the command that starts it\n", runink)
	fmt.Fprintf(&b, "  %s nats context    # then: %s\n", runink, natsWatch("runbus-ops"))
	if _, err := exec.LookPath("nats"); err != nil {
		b.WriteString("\nThe nats CLI is not in the PATH: it is https://github.com/nats-io/natscli, and scripts/setup puts it into bin/.\n")
	}
	if s.managed != "" {
		fmt.Fprintf(&b, "\nTo fetch a file of your own: start this with --files DIR, then `%s fetch run --runner %s --source file --set path=DIR/FILE.csv`.\n", runink, s.managed)
	}
	b.WriteString("\nCtrl-C stops it.\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// natsWatch is how the stock nats CLI shows the bus.
func natsWatch(context string) string {
	return fmt.Sprintf("nats --context %s sub 'runbus.v1.>' --translate %s", context, quote(selfCommand("runink")+" decode"))
}

// selfCommand is how to start a binary of this build again: by its name if the shell finds this one there, else by its path; `go run`
// for a binary that was started so.
func selfCommand(name string) string {
	self, err := os.Executable()
	if err != nil {
		return name
	}
	if strings.Contains(self, string(filepath.Separator)+"go-build") {
		return "go run ./cmd/" + name
	}
	beside := filepath.Join(filepath.Dir(self), name)
	found, err := exec.LookPath(name)
	if err == nil && sameFile(found, beside) {
		return name
	}
	if _, err := os.Stat(beside); err != nil {
		return name
	}
	return quote(beside)
}

func sameFile(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// quote is a word for a shell.
func quote(word string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_-./=:,@%+", r)
	}
	if word != "" && strings.TrimFunc(word, plain) == "" {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
