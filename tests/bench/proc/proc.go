// Package proc runs the parts of a benchmark as processes of their own: the program starts itself again in a role, tells it
// what to do by lines on its standard input, and each line is answered by one on its standard output.
package proc

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Child is a process of the benchmark, as its parent has it. It is for one goroutine at a time.
type Child struct {
	name string
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
}

// Start starts this program again with role as its only argument and env beside its own environment. It returns when the child
// serves, with what it said of itself in into, if that is not nil.
func Start(role string, env []string, into any) (*Child, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &Child{name: role, cmd: exec.Command(exe, role)} //nolint:gosec,noctx // this program itself; Stop ends it
	c.cmd.Env = append(os.Environ(), env...)
	c.cmd.Stderr = os.Stderr
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.out = bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	if err := c.answer(into); err != nil {
		return nil, errors.Join(fmt.Errorf("%s did not start: %w", role, err), c.Kill())
	}
	return c, nil
}

// Ask has the child carry out a command and waits for its answer, decoded into into unless that is nil.
func (c *Child) Ask(command string, into any) error {
	if _, err := fmt.Fprintln(c.in, command); err != nil {
		return fmt.Errorf("%s: %w", c.name, err)
	}
	if err := c.answer(into); err != nil {
		return fmt.Errorf("%s: %s: %w", c.name, command, err)
	}
	return nil
}

// reply is one line of an answer.
type reply struct {
	Error string          `json:"error,omitempty"`
	Value json.RawMessage `json:"value,omitempty"`
}

func (c *Child) answer(into any) error {
	line, err := c.out.ReadBytes('\n')
	if err != nil {
		return err
	}
	var r reply
	if err := json.Unmarshal(line, &r); err != nil {
		return err
	}
	if r.Error != "" {
		return errors.New(r.Error)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(r.Value, into)
}

// CPU is the processor time that the child has used.
func (c *Child) CPU() (time.Duration, error) {
	var d time.Duration
	err := c.Ask("cpu", &d)
	return d, err
}

// Profile begins a CPU profile of the child in a file; Profiled ends it.
func (c *Child) Profile(file string) error { return c.Ask("profile "+file, nil) }

// Profiled ends the profile.
func (c *Child) Profiled() error { return c.Ask("profiled", nil) }

// Memory is resident memory in bytes: now, and the most since the start or ForgetPeak.
type Memory struct{ Now, Peak int64 }

// Memory reads the child's from the system.
func (c *Child) Memory() (m Memory, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.cmd.Process.Pid))
	if err != nil {
		return m, err
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		name, rest, _ := strings.Cut(line, ":")
		into := map[string]*int64{"VmRSS": &m.Now, "VmHWM": &m.Peak}[name]
		if into == nil {
			continue
		}
		if _, err := fmt.Sscanf(rest, "%d kB", into); err != nil {
			return m, fmt.Errorf("%s: %w", name, err)
		}
		*into <<= 10
	}
	return m, nil
}

// ForgetPeak begins the peak anew, from what is resident now.
func (c *Child) ForgetPeak() error {
	return os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", c.cmd.Process.Pid), []byte("5"), 0o200)
}

// Stop closes the child's input, which ends it, and waits.
func (c *Child) Stop() error { return errors.Join(c.in.Close(), c.cmd.Wait()) }

// Kill ends the child at once (SIGKILL) and waits.
func (c *Child) Kill() error {
	err := c.cmd.Process.Kill()
	var killed *exec.ExitError
	if waited := c.cmd.Wait(); !errors.As(waited, &killed) {
		err = errors.Join(err, waited)
	}
	return errors.Join(err, ignoreClosed(c.in.Close()))
}

func ignoreClosed(err error) error {
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// Command is what a child does when told, with what follows the word. It returns what the answer carries.
type Command func(arg string) (any, error)

// Serve is the child's side: it says hello and obeys until its input ends. It knows by itself: cpu, profile FILE, profiled, heap FILE,
// classes, collect.
func Serve(hello any, commands map[string]Command) error {
	out := json.NewEncoder(os.Stdout)
	say := func(v any, err error) error {
		var r reply
		if err == nil {
			r.Value, err = json.Marshal(v)
		}
		if err != nil {
			r = reply{Error: err.Error()}
		}
		return out.Encode(r)
	}
	if err := say(hello, nil); err != nil {
		return err
	}
	var profile *os.File
	own := map[string]Command{
		"cpu": func(string) (any, error) { return CPU(), nil },
		"profile": func(file string) (_ any, err error) {
			if profile, err = os.Create(file); err != nil {
				return nil, err
			}
			return nil, pprof.StartCPUProfile(profile)
		},
		"profiled": func(string) (any, error) {
			pprof.StopCPUProfile()
			return nil, profile.Close()
		},
		"heap": func(file string) (any, error) {
			f, err := os.Create(file)
			if err != nil {
				return nil, err
			}
			defer f.Close()
			runtime.GC()
			if err := pprof.Lookup("heap").WriteTo(f, 0); err != nil {
				return nil, err
			}
			g, err := os.Create(filepath.Join(filepath.Dir(file), "goroutines-"+filepath.Base(file)))
			if err != nil {
				return nil, err
			}
			defer g.Close()
			return nil, pprof.Lookup("goroutine").WriteTo(g, 0)
		},
		"classes": func(string) (any, error) { return readClasses(), nil },
		"collect": func(string) (any, error) { debug.FreeOSMemory(); return nil, nil },
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		word, arg, _ := strings.Cut(lines.Text(), " ")
		do := commands[word]
		if do == nil {
			do = own[word]
		}
		if do == nil {
			do = func(string) (any, error) { return nil, fmt.Errorf("unknown command %q", word) }
		}
		if err := say(do(arg)); err != nil {
			return err
		}
	}
	return nil
}

// CPU is the processor time that this process has used.
func CPU() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// RaiseFiles lets this process and those it starts open as many files as the system allows, and says how many.
func RaiseFiles() (uint64, error) {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		return 0, err
	}
	l.Cur = l.Max
	return l.Cur, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &l)
}

// Median is the middle of the values, or the mean of the middle two.
func Median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}
