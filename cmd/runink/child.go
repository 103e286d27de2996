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
	"strings"
	"sync"
	"syscall"
	"time"
)

// child is one process of the local stack: this binary again, as `runink serve …`.
type child struct {
	name   string
	cmd    *exec.Cmd
	log    *tail
	exited chan struct{}
	err    error // of Wait, once exited is closed
}

// startChild starts `runink serve ROLE` and waits until it says that it is ready, which is decoded into ready. Its log goes to
// logs; when it fails to come up, the error has the last lines of it.
func startChild(ctx context.Context, role string, env map[string]string, logs io.Writer, ready any) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &child{name: role, cmd: exec.Command(self, "serve", role), log: &tail{to: logs}, exited: make(chan struct{})} //nolint:gosec,noctx // this binary; stopped by signals, in order
	c.cmd.Env = childEnv(env)
	c.cmd.Stderr = c.log
	ownGroup(c.cmd) // Ctrl-C reaches this process alone, which stops its children in order
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the %s: %w", role, err)
	}
	lines := make(chan []byte, 1)
	go func() {
		scanner := bufio.NewScanner(stdout)
		if scanner.Scan() {
			lines <- bytes.Clone(scanner.Bytes())
		}
		_, _ = io.Copy(io.Discard, stdout)
		c.err = c.cmd.Wait()
		close(c.exited)
	}()
	select {
	case line := <-lines:
		if err := json.Unmarshal(line, ready); err != nil {
			c.stop(time.Second)
			return nil, fmt.Errorf("the %s did not say that it is ready: %w", role, err)
		}
		return c, nil
	case <-c.exited:
		return nil, c.failure()
	case <-ctx.Done():
		c.stop(5 * time.Second)
		return nil, ctx.Err()
	}
}

// childEnv is this process's environment without anything that configures a control plane or a runner, plus env: a variable
// that is set here for another purpose must not change the stack.
func childEnv(env map[string]string) []string {
	out := make([]string, 0, len(os.Environ())+len(env))
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		ours := strings.HasPrefix(name, "RUNNER_") || strings.HasPrefix(name, "RUNBUS_") || strings.HasPrefix(name, "CORE_RUNNER_") || name == "RUNINK_TOKEN"
		if _, set := env[name]; !ours && !set {
			out = append(out, kv)
		}
	}
	for name, value := range env {
		out = append(out, name+"="+value)
	}
	return out
}

// failure is why the child ended, in its own last words.
func (c *child) failure() error {
	if text := c.log.last(); text != "" {
		return &exitError{1, fmt.Errorf("the %s did not start: %s", c.name, text)}
	}
	return &exitError{1, fmt.Errorf("the %s did not start: %w", c.name, c.err)}
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
	var exit *exec.ExitError
	if errors.As(c.err, &exit) {
		return fmt.Errorf("the %s ended with %s: %s", c.name, exit, c.log.last())
	}
	return c.err
}

// tail passes a log on and remembers its last lines that are no log records: what a process says when it gives up.
type tail struct {
	to io.Writer

	mu    sync.Mutex
	part  []byte
	lines []string
}

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
		if t.lines = append(t.lines, line); len(t.lines) > 20 {
			t.lines = t.lines[1:]
		}
	}
	return t.to.Write(p)
}

func (t *tail) last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimPrefix(strings.TrimSpace(strings.Join(t.lines, "\n")), "runink: ")
}
