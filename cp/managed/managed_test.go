package managed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
)

func (p *plane) run(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	<-p.began
	stopped := false
	p.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	t.Cleanup(p.stop)
}

// arrival waits for the next link.
func (p *plane) arrival(t *testing.T) arrival {
	t.Helper()
	select {
	case a := <-p.links:
		return a
	case <-time.After(patience):
		t.Fatal("no link came")
		panic("unreachable")
	}
}

func (p *plane) use(t *testing.T, tenant string) (release func()) {
	t.Helper()
	release, err := p.Use(t.Context(), tenant)
	if err != nil {
		t.Fatal(err)
	}
	return release
}

// there reports whether a process is.
func there(pid int) bool { return !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }

// What a child gets: the lifeline, a folder, and of this process's environment what is on the list.
func TestWhatAChildIsGiven(t *testing.T) {
	t.Setenv("RUNBUS_SECRET", "canary")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "canary")
	t.Setenv("LOG_LEVEL", "debug")
	leaked, err := os.Create(filepath.Join(t.TempDir(), "secret"))
	if err != nil {
		t.Fatal(err)
	}
	defer leaked.Close()
	inherits, err := syscall.Dup(int(leaked.Fd())) // as one that this process was started with
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(inherits) //nolint:errcheck // of a test
	roots := []string{t.TempDir(), t.TempDir()}
	p := start(t, "runner", func(c *Config) { c.FileRoots, c.Concurrency = roots, 3 })
	own := p.arrival(t)
	p.use(t, "acme")()
	other := p.arrival(t)
	for _, a := range []arrival{own, other} {
		dir := filepath.Join(p.c.StateDir, a.tenant)
		want := []string{
			asChild + "=runner", "CORE_RUNNER_STATE_DIR=" + dir, "LOG_LEVEL=debug", "RUNNER_CONCURRENCY=3", "RUNNER_DRAIN_GRACE=30s", "RUNNER_LIFELINE=3",
		}
		if a.tenant == "own" {
			want = append(want, "RUNNER_FILE_ROOTS="+strings.Join(roots, ":"))
		} else {
			want = append(want, "RUNNER_POLICY="+filepath.Join(dir, "policy.yaml"))
		}
		got := slices.DeleteFunc(slices.Clone(a.Environ), func(v string) bool {
			name, _, _ := strings.Cut(v, "=")
			return name != "LOG_LEVEL" && slices.Contains(inherited, name) // what this machine has set
		})
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("the environment of %s's is %q, want %q", a.tenant, got, want)
		}
		if len(a.Arguments) != 2 || a.Arguments[1] != "serve" || a.Folder != dir || len(a.Files) > 0 {
			t.Errorf("%s's has %q, runs in %s, and has the files %q", a.tenant, a.Arguments, a.Folder, a.Files)
		}
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("its folder: %v, %v", info, err)
		}
		key, ok := p.Key(a.tenant)
		if string(key) != fmt.Sprintf("key of %d", a.PID) || !ok {
			t.Errorf("its key is %q", key)
		}
		if a.token != a.tenant+"/console,"+fingerprintOf(key)+",server" {
			t.Errorf("its token is for %s", a.token)
		}
		if _, ok := p.Leaf(a.tenant, fingerprintOf(key)); !ok {
			t.Error("its key is not let in")
		}
		if _, ok := p.Leaf(a.tenant, fingerprintOf([]byte("x"))); ok {
			t.Error("another key is let in")
		}
	}
	if key, _ := p.Key("acme"); fingerprintOf(key) == fingerprintOf([]byte(fmt.Sprintf("key of %d", own.PID))) || own.PID == other.PID {
		t.Error("two tenants share a process")
	}
	if _, ok := p.Leaf("acme", fingerprintOf([]byte(fmt.Sprintf("key of %d", own.PID)))); ok {
		t.Error("one tenant's key is let in as another's")
	}
	p.stop()
	for _, a := range []arrival{own, other} {
		if there(a.PID) {
			t.Errorf("process %d is still there", a.PID)
		}
		if _, ok := p.Key(a.tenant); ok {
			t.Error("the key of a process that is gone is known")
		}
	}
	if _, err := p.Use(t.Context(), "acme"); !errors.Is(err, errStops) {
		t.Errorf("used after the end: %v", err)
	}
}

// A process that is killed is started again, and a link that ends is made anew with the same process.
func TestAChildThatDies(t *testing.T) {
	p := start(t, "runner", nil)
	first := p.arrival(t)
	_ = first.conn.Close()
	again := p.arrival(t)
	if again.PID != first.PID || again.token != first.token {
		t.Errorf("a cut made process %d of %d", again.PID, first.PID)
	}
	if err := syscall.Kill(first.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	next := p.arrival(t)
	if len(p.ended) != 1 || <-p.ended != "own" {
		t.Error("the end of the process was not told")
	}
	if next.PID == first.PID || next.token == first.token {
		t.Errorf("the process after %d is %d with the token %s", first.PID, next.PID, next.token)
	}
	p.use(t, "own")()
}

// A process that takes no links any more is replaced.
func TestAChildThatIsStuck(t *testing.T) {
	p := start(t, "deaf", nil)
	first := p.arrival(t)
	_ = first.conn.Close()
	if next := p.arrival(t); next.PID == first.PID || there(first.PID) {
		t.Errorf("the process after %d is %d", first.PID, next.PID)
	}
}

// One that does not stop is killed.
func TestAStubbornChild(t *testing.T) {
	p := start(t, "unmoved", func(c *Config) { c.StopWithin = 50 * time.Millisecond })
	a := p.arrival(t)
	p.stop()
	if there(a.PID) {
		t.Error("it is still there")
	}
}

// Who wants a fetch is told why there is no runner, in words without anything of the host; while it dies again and again, at once.
func TestAChildThatFails(t *testing.T) {
	for kind, want := range map[string]string{
		"fails": "the managed runner does not come up: it ended; the control plane's log says more",
		"mute":  "the managed runner does not come up: it does not do what a runner does; the control plane's log says more",
	} {
		p := start(t, kind, nil)
		if _, err := p.Use(t.Context(), "own"); err == nil || err.Error() != want {
			t.Errorf("%s: %v", kind, err)
		}
		p.stop()
	}
	p := start(t, "mute", func(c *Config) { c.UpWithin, c.FirstRetry, c.SlowestRetry = time.Millisecond, time.Hour, time.Hour })
	if _, err := p.Use(t.Context(), "own"); err == nil || !strings.HasPrefix(err.Error(), "the managed runner is not up within 1ms") {
		t.Errorf("within a moment: %v", err)
	}
	given, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Use(given, "own"); !errors.Is(err, context.Canceled) && !strings.HasPrefix(err.Error(), "the managed runner is not up") {
		t.Errorf("given up: %v", err)
	}
}

// There are Most processes at most. One whose tenant does not use it gives way; that of the operator never does.
func TestRoomForSoMany(t *testing.T) {
	p := start(t, "runner", func(c *Config) { c.Most = 3 })
	own := p.arrival(t)
	inUse := p.use(t, "a")
	a := p.arrival(t)
	p.use(t, "b")()
	b := p.arrival(t)
	p.use(t, "c")()
	c := p.arrival(t)
	if there(b.PID) || !there(a.PID) || !there(own.PID) {
		t.Errorf("the idle one is there: %v; the used one: %v; the operator's: %v", there(b.PID), there(a.PID), there(own.PID))
	}
	second := p.use(t, "c")
	if _, err := p.Use(t.Context(), "d"); err == nil || err.Error() != "3 tenants use a managed runner, and there is room for no more on this host" {
		t.Errorf("no room: %v", err)
	}
	second()
	second() // twice is once
	p.use(t, "d")()
	if d := p.arrival(t); d.tenant != "d" || there(c.PID) || !there(a.PID) {
		t.Errorf("%s has come; c's is there: %v; a's: %v", d.tenant, there(c.PID), there(a.PID))
	}
	inUse()
	p.use(t, "own")() // is there still
	if !there(own.PID) {
		t.Error("the operator's has given way")
	}
}

func TestWhatCannotBeStarted(t *testing.T) {
	ok := Config{Command: []string{"/bin/sh"}, StateDir: t.TempDir()}
	for name, c := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"no program":   {func(c *Config) { c.Command = []string{filepath.Join(t.TempDir(), "core-runner")} }, "the managed runner can't be started"},
		"no policy":    {func(c *Config) { c.Policy = filepath.Join(t.TempDir(), "p.yaml") }, "MANAGED_RUNNER_POLICY: "},
		"a place":      {func(c *Config) { c.FileRoots = []string{t.TempDir(), "here"} }, `MANAGED_RUNNER_FILE_ROOTS: "here" is not an absolute path`},
		"no folder":    {func(c *Config) { c.FileRoots = []string{filepath.Join(t.TempDir(), "x")} }, "MANAGED_RUNNER_FILE_ROOTS: "},
		"a file":       {func(c *Config) { c.FileRoots = []string{"/dev/null"} }, "MANAGED_RUNNER_FILE_ROOTS: "},
		"no such name": {func(c *Config) { c.Command = []string{"core-runner-that-is-not-there"} }, "the managed runner can't be started"},
	} {
		conf := ok
		c.change(&conf)
		if _, err := New(conf); schemas.CodeOf(err) != schemas.CodeInvalid || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := New(Config{}); err == nil {
		t.Error("no command is taken")
	}
	if _, err := New(ok); err != nil {
		t.Error(err)
	}
}

// A state folder that others can read, or that is none, is not used.
func TestAStateFolderOfOthers(t *testing.T) {
	dir := t.TempDir()
	for name, spoil := range map[string]func(string) error{
		"open":   func(d string) error { return os.Mkdir(d, 0o755) },
		"a link": func(d string) error { return os.Symlink(t.TempDir(), d) },
		"a file": func(d string) error { return os.WriteFile(d, nil, 0o600) },
	} {
		state := filepath.Join(dir, name)
		if err := spoil(state); err != nil {
			t.Fatal(err)
		}
		p := start(t, "runner", func(c *Config) { c.StateDir = state })
		if _, err := p.Use(t.Context(), "own"); err == nil || err.Error() != "the managed runner does not come up: its state folder can't be used; the control plane's log says more" {
			t.Errorf("%s: %v", name, err)
		}
		p.stop()
	}
}
