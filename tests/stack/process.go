package stack

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Patience bounds every wait of a test for an event: it is how long a hung test takes to fail, not how long anything takes.
const Patience = 90 * time.Second

// Process is one running program. Its output is kept, and tests can wait for lines of it.
type Process struct {
	Name   string
	PID    int
	cmd    *exec.Cmd
	Stdout *Lines
	Stderr *Lines
	exited chan struct{}
}

// Start runs path with args and exactly env, beside PATH, HOME and TMPDIR; a race detector in it does not linger at the exit. It is killed, if still there, when the test ends, and its log is
// shown when the test failed.
func Start(t testing.TB, name, path string, env map[string]string, args ...string) *Process {
	t.Helper()
	return StartWith(t, name, path, env, nil, args...)
}

// StartWith is Start with a standard input.
func StartWith(t testing.TB, name, path string, env map[string]string, stdin io.Reader, args ...string) *Process {
	t.Helper()
	p := &Process{Name: name, cmd: exec.Command(path, args...), //nolint:gosec,noctx // a test names it, and ends it by signals
		Stdout: newLines(), Stderr: newLines(), exited: make(chan struct{})}
	home := env["HOME"]
	if home == "" {
		home = t.TempDir()
	}
	p.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "TMPDIR=" + os.TempDir(), "GORACE=atexit_sleep_ms=0"}
	for k, v := range env {
		p.cmd.Env = append(p.cmd.Env, k+"="+v)
	}
	p.cmd.Stdin = stdin
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	p.PID = p.cmd.Process.Pid
	var read sync.WaitGroup
	read.Go(func() { p.Stdout.readFrom(stdout) })
	read.Go(func() { p.Stderr.readFrom(stderr) })
	go func() {
		read.Wait()
		_ = p.cmd.Wait() // the state is read from ProcessState
		close(p.exited)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Signal(syscall.SIGCONT)
		_ = p.cmd.Process.Kill()
		<-p.exited
		if t.Failed() {
			t.Logf("log of %s (process %d):\n%s", name, p.PID, p.Stderr)
		}
	})
	return p
}

// Signal sends one.
func (p *Process) Signal(t testing.TB, s syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatalf("signal %v to %s: %v", s, p.Name, err)
	}
}

// Exit waits for the end and returns the exit status; -1 when a signal ended it.
func (p *Process) Exit(t testing.TB) int {
	t.Helper()
	select {
	case <-p.exited:
	case <-time.After(Patience):
		t.Fatalf("%s has not ended", p.Name)
	}
	return p.cmd.ProcessState.ExitCode()
}

// Exited is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Stop sends SIGTERM, waits, and fails the test unless the exit status is 0.
func (p *Process) Stop(t testing.TB) {
	t.Helper()
	p.Signal(t, syscall.SIGTERM)
	if code := p.Exit(t); code != 0 {
		t.Errorf("%s ended with status %d", p.Name, code)
	}
}

// PeakMemory is VmHWM of the process in bytes: the most memory it ever had resident.
func (p *Process) PeakMemory(t testing.TB) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kb << 10
		}
	}
	t.Fatalf("no VmHWM of %s", p.Name)
	return 0
}

// Lines is the output of a process, line by line.
type Lines struct {
	mu     sync.Mutex
	lines  []string
	change chan struct{} // closed at each change
	ended  bool
}

func newLines() *Lines { return &Lines{change: make(chan struct{})} }

func (l *Lines) readFrom(r io.Reader) {
	buf := bufio.NewReaderSize(r, 1<<20)
	for {
		line, err := buf.ReadString('\n')
		l.mu.Lock()
		if line != "" {
			l.lines = append(l.lines, strings.TrimSuffix(line, "\n"))
		}
		l.ended = l.ended || err != nil
		close(l.change)
		l.change = make(chan struct{})
		l.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// String is all of it.
func (l *Lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

// Has reports whether a line so far has text in it.
func (l *Lines) Has(text string) bool { return strings.Contains(l.String(), text) }

// errEnded tells that the output ended without the line.
var errEnded = errors.New("the output ended")

// Await waits for the first line from index from on that has text in it, and returns it and the index behind it.
func (l *Lines) Await(text string, from int) (line string, next int, err error) {
	timeout := time.After(Patience)
	for {
		l.mu.Lock()
		for i := from; i < len(l.lines); i++ {
			if strings.Contains(l.lines[i], text) {
				defer l.mu.Unlock()
				return l.lines[i], i + 1, nil
			}
		}
		from = max(from, len(l.lines))
		change, ended := l.change, l.ended
		l.mu.Unlock()
		if ended {
			return "", from, errEnded
		}
		select {
		case <-change:
		case <-timeout:
			return "", from, errors.New("no such line came")
		}
	}
}

// Must is Await from the start that fails the test.
func (l *Lines) Must(t testing.TB, text string) string {
	t.Helper()
	line, _, err := l.Await(text, 0)
	if err != nil {
		t.Fatalf("waiting for a line with %q: %v; output:\n%s", text, err, l)
	}
	return line
}
