package stack

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/internal/selfguard"
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

	folders []string // where it may leave files
	shows   bool     // it makes a secret and prints it
	shown   shown
	past    atomic.Bool // its start
}

// LogLevel is LOG_LEVEL of all processes that don't have one of their own: whatever they can write is searched for secrets.
var LogLevel = "debug"

// Measure leaves LOG_LEVEL at its default and results unsearched, for measurements that those would be part of.
func Measure() { LogLevel, measuring = "info", true }

var measuring bool

// Start runs path with args and exactly env, beside PATH, HOME, TMPDIR, LOG_LEVEL and the like, in a folder of its own; a race detector in it does
// not linger at the exit. It is killed, if still there, when the test ends, and its log is shown when the test failed. The test fails if the
// process shows a secret anywhere: see Secrets.
func Start(t testing.TB, name, path string, env map[string]string, args ...string) *Process {
	t.Helper()
	return StartWith(t, name, path, env, nil, args...)
}

// StartWith is Start with a standard input.
func StartWith(t testing.TB, name, path string, env map[string]string, stdin io.Reader, args ...string) *Process {
	t.Helper()
	p := &Process{Name: name, cmd: exec.Command(path, args...), //nolint:gosec,noctx // a test names it, and ends it by signals
		Stdout: newLines(), Stderr: newLines(), exited: make(chan struct{}), shows: shows(args)}
	var err error
	here := t.TempDir()
	home, temporary := filepath.Join(here, "home"), filepath.Join(here, "tmp")
	for _, dir := range []string{home, temporary} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	p.cmd.Dir = here
	p.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "TMPDIR=" + temporary, "GORACE=atexit_sleep_ms=0", "LOG_LEVEL=" + LogLevel}
	if os.Geteuid() != 0 { // else nobody here could look at what the kernel shows of it
		p.cmd.Env = append(p.cmd.Env, selfguard.EnvDebug+"=true")
	}
	for k, v := range env {
		p.cmd.Env = append(p.cmd.Env, k+"="+v)
	}
	p.folders = foldersOf(here, env, args)
	learnEnvironment(name, env)
	var given []byte
	if text, ok := stdin.(*strings.Reader); ok {
		if given, err = io.ReadAll(text); err != nil {
			t.Fatal(err)
		}
		stdin = bytes.NewReader(given)
	}
	learnInputs(name, args, given)
	p.cmd.Stdin = stdin
	lookAtAll()
	still.begin()
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
	p.enlist()
	var read sync.WaitGroup
	var once sync.Once
	began := func(string) { once.Do(func() { p.look() }) }
	read.Go(func() {
		p.Stdout.readFrom(stdout, func(line string) {
			if p.shows {
				Secrets.Learn(p.output(), []byte(line))
			}
		}, began)
	})
	read.Go(func() { p.Stderr.readFrom(stderr, nil, began) })
	go func() {
		read.Wait()
		_ = p.cmd.Wait() // the state is read from ProcessState
		close(p.exited)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Signal(syscall.SIGCONT)
		p.lookClosely()
		p.discharge()
		_ = p.cmd.Process.Kill()
		<-p.exited
		p.inspect(t)
		if t.Failed() {
			t.Logf("log of %s (process %d):\n%s", name, p.PID, p.Stderr)
		}
	})
	return p
}

// foldersOf are those in which a process may leave something: here, where it runs, and those that it is told of.
func foldersOf(here string, env map[string]string, args []string) []string {
	folders := []string{here}
	for _, variable := range []string{"HOME", "XDG_CONFIG_HOME", "RUNBUS_DATA_DIR", "CORE_RUNNER_STATE_DIR", "CORE_RUNNER_CA_DIR"} {
		if dir := env[variable]; dir != "" {
			folders = append(folders, dir)
		}
	}
	for i, arg := range args {
		if i > 0 && (args[i-1] == "--data-dir" || args[i-1] == "--state-dir") {
			folders = append(folders, arg)
		}
	}
	return folders
}

// Signal sends one. After SIGSTOP it returns when the process stands still.
func (p *Process) Signal(t testing.TB, s syscall.Signal) {
	t.Helper()
	if s != syscall.SIGSTOP && s != syscall.SIGCONT { // which end nothing, and whose time may count
		p.lookClosely()
	}
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatalf("signal %v to %s: %v", s, p.Name, err)
	}
	if s == syscall.SIGSTOP {
		p.awaitStopped(t)
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

// readFrom reads to the end. first, if any, is called with each line before it can be awaited, then after it.
func (l *Lines) readFrom(r io.Reader, first, then func(line string)) {
	buf := bufio.NewReaderSize(r, 1<<20)
	for {
		line, err := buf.ReadString('\n')
		if first != nil {
			first(line)
		}
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
		then(line)
	}
}

// any reports whether there is a line.
func (l *Lines) any() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.lines) > 0
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
	return l.await(func(line string) bool { return strings.Contains(line, text) }, from)
}

// Match waits for a line that pattern is found in.
func (l *Lines) Match(pattern *regexp.Regexp) error {
	_, _, err := l.await(pattern.MatchString, 0)
	return err
}

func (l *Lines) await(is func(line string) bool, from int) (line string, next int, err error) {
	timeout := time.After(Patience)
	for {
		l.mu.Lock()
		for i := from; i < len(l.lines); i++ {
			if is(l.lines[i]) {
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
