package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/internal/selfguard"
	"github.com/org-runink/runbus/schemas"
)

// child is one process of the local stack: this binary again, as `runink serve …`.
type child struct {
	name   string
	cmd    *exec.Cmd
	log    *tail
	exited chan struct{}
	// Once exited is closed:
	said *process.Failure // why it ended, in its own words; may be nil
	err  error            // of Wait
}

// startChild starts `runink serve ROLE` and waits until it says that it is ready, which is decoded into ready. Its log goes to
// logs. When it fails to come up, the error is its own.
func startChild(ctx context.Context, role string, env map[string]string, logs io.Writer, ready any) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &child{
		name: strings.ReplaceAll(role, "-", " "), cmd: exec.Command(self, "serve", role), //nolint:gosec,noctx // this binary; stopped by signals, in order
		log: &tail{to: logs}, exited: make(chan struct{}),
	}
	c.cmd.Env = childEnv(env)
	c.cmd.Stderr = c.log
	ownGroup(c.cmd) // Ctrl-C reaches this process alone, which stops its children in order
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	started, lines := make(chan error, 1), make(chan []byte, 1)
	go func() {
		// Linux ends the child when the thread that started it ends, not the process: so this thread lives as long as the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := c.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		c.listen(stdout, lines)
		c.err = c.cmd.Wait()
		close(c.exited)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start the %s: %w", c.name, err)
	}
	select {
	case line := <-lines:
		if err := json.Unmarshal(line, ready); err != nil {
			_ = c.stop(time.Second) // the error that counts is err
			return nil, fmt.Errorf("the %s did not say that it is ready: %w", c.name, err)
		}
		return c, nil
	case <-c.exited:
		return nil, c.failure()
	case <-ctx.Done():
		_ = c.stop(drainGrace + stopSpare) // the error that counts is the context's
		return nil, ctx.Err()
	}
}

// listen takes the child's standard output: the line that says that it is ready, and the one that says why it ends.
func (c *child) listen(stdout io.Reader, ready chan<- []byte) {
	scanner := bufio.NewScanner(stdout)
	for first := true; scanner.Scan(); {
		if f := process.ParseFailure(scanner.Bytes()); f != nil {
			c.said = f
		} else if first {
			ready <- bytes.Clone(scanner.Bytes())
			first = false
		}
	}
	_, _ = io.Copy(io.Discard, stdout) // a line too long: the child must not block on it
}

// childEnv is this process's environment without anything that configures a control plane or a runner, plus env: a variable
// that is set here for another purpose must not change the stack.
func childEnv(env map[string]string) []string {
	out := make([]string, 0, len(os.Environ())+len(env))
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		if _, set := env[name]; !set && !configuresStack(name) {
			out = append(out, kv)
		}
	}
	for name, value := range env {
		out = append(out, name+"="+value)
	}
	return out
}

func configuresStack(name string) bool {
	for _, prefix := range []string{"RUNNER_", "RUNBUS_", "CORE_RUNNER_", "MANAGED_RUNNER_", "RUNINK_"} {
		if strings.HasPrefix(name, prefix) {
			return name != selfguard.EnvDebug
		}
	}
	return name == "SERVICE_ROLE"
}

// failure is why the child ended, in its own words.
func (c *child) failure() error {
	if c.said != nil {
		status := process.ExitFailed
		if c.said.Exit == process.ExitUsage { // a setting, which is this process's
			status = process.ExitUsage
		}
		return &exitError{status, (&schemas.Error{Code: c.said.Code, Message: "the " + c.name + " ended: " + c.said.Message}).WithHint(c.said.Hint)}
	}
	why := "without a word"
	if c.err != nil {
		why = c.err.Error()
	}
	if text := c.log.words(); text != "" {
		why += ": " + text
	}
	return &exitError{1, schemas.Errorf(schemas.CodeFailed, "the %s ended: %s", c.name, why)}
}

// stop sends SIGTERM and waits; a child that outlives the grace is killed.
func (c *child) stop(grace time.Duration) error {
	_ = c.cmd.Process.Signal(syscall.SIGTERM) // it may have gone already
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-c.exited:
	case <-timer.C:
		_ = c.cmd.Process.Kill()
		<-c.exited
		return fmt.Errorf("the %s did not stop within %s and was killed", c.name, grace)
	}
	if c.err == nil {
		return nil
	}
	return c.failure()
}

// tail passes a log on and remembers the first lines that are no log records: what a process says when it breaks.
type tail struct {
	to io.Writer

	mu    sync.Mutex
	part  []byte
	lines []string
}

const tailLines = 20

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.part = append(t.part, p...)
	for {
		i := bytes.IndexByte(t.part, '\n')
		if i < 0 {
			break
		}
		line := string(t.part[:i])
		t.part = t.part[i+1:]
		if strings.HasPrefix(line, "time=") || strings.HasPrefix(line, `{"time"`) || line == "" {
			continue
		}
		if len(t.lines) < tailLines { // of a panic the first lines tell
			t.lines = append(t.lines, line)
		}
	}
	_, _ = t.to.Write(p) // a log that can't be written must not stop the child
	return len(p), nil
}

func (t *tail) words() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(strings.Join(t.lines, "\n"))
}

var errSaid = errors.New("said already")
