// Package stack runs the product's own binaries as real processes, for tests: a control plane (face), runners (core-runner) and
// the command line (runink).
package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
)

// Binaries are the paths of one build.
type Binaries struct {
	Face, CoreRunner, Runink string
}

var (
	builds   [2]sync.Once
	built    [2]Binaries
	buildErr [2]error
	// buildDir is the folder of this process's programs.
	buildDir = sync.OnceValues(func() (string, error) { return os.MkdirTemp("", "runbus-bin-") })
	anyBuild atomic.Bool
)

// BinariesEnv names a folder of binaries to test instead of those that Build builds.
const BinariesEnv = "RUNBUS_TEST_BINARIES"

// BuildsEnv names a folder in which the test processes of one run build together: what one of them has built the others need not
// link again.
const BuildsEnv = "RUNBUS_TEST_BUILDS"

// programs are the names of what Build builds, each a folder in cmd.
var programs = []string{"face", "core-runner", "runink"}

func binariesIn(dir string) Binaries {
	return Binaries{filepath.Join(dir, "face"), filepath.Join(dir, "core-runner"), filepath.Join(dir, "runink")}
}

// Build builds the binaries once per test process, with the race detector or, for measurements of memory and time, without.
// Remove cleans up. It is safe for concurrent use.
func Build(race bool) (Binaries, error) {
	if dir := os.Getenv(BinariesEnv); dir != "" {
		return binariesIn(dir), nil
	}
	i := 0
	if race {
		i = 1
	}
	builds[i].Do(func() { built[i], buildErr[i] = build(race) })
	return built[i], buildErr[i]
}

func build(race bool) (Binaries, error) {
	kind := "plain"
	if race {
		kind = "race"
	}
	root, err := readSources()
	if err != nil {
		return Binaries{}, err
	}
	anyBuild.Store(true)
	own, err := buildDir()
	if err != nil {
		return Binaries{}, err
	}
	own = filepath.Join(own, kind)
	together := os.Getenv(BuildsEnv)
	if together == "" {
		return binariesIn(own), compile(root, own, race)
	}
	unlock, err := lock(together)
	if err != nil {
		return Binaries{}, err
	}
	defer unlock()
	shared := filepath.Join(together, kind)
	if err := compile(root, shared, race); err != nil {
		return Binaries{}, err
	}
	// Links of its own: whoever builds a later state there replaces the files, and this process goes on with what it began with.
	if err := linkAll(shared, own); err != nil { // another file system
		return binariesIn(own), compile(root, own, race)
	}
	return binariesIn(own), nil
}

// compile builds the programs into dir, without what debuggers need. What is there and is current it leaves.
func compile(root, dir string, race bool) error {
	args := []string{"build", "-ldflags=-s -w", "-o", dir + string(filepath.Separator)}
	if race {
		args = append(args, "-race")
	}
	for _, name := range programs {
		args = append(args, "github.com/org-runink/runbus/cmd/"+name)
	}
	cmd := exec.Command("go", args...) //nolint:gosec,noctx // this module's programs; a build is not cut short
	cmd.Dir = root                     // the benchmarks are a module of their own, with other requirements
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, text)
	}
	return nil
}

// lock makes dir, if need be, and waits until no other process builds there.
func lock(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // programs, no secrets
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600) //nolint:gosec // who runs the tests names the folder
	if err != nil {
		return nil, err
	}
	for {
		if err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX); !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// linkAll links the programs in from to the new folder to.
func linkAll(from, to string) error {
	if err := os.Mkdir(to, 0o700); err != nil {
		return err
	}
	for _, name := range programs {
		if err := os.Link(filepath.Join(from, name), filepath.Join(to, name)); err != nil {
			return err
		}
	}
	return nil
}

// readSources reads the folders of the sources, and returns the module's own. Go's test cache knows nothing of programs that a test builds, but looks again at whatever
// files a test looked at: without this, a change of the programs left a cached pass.
func readSources() (root string, err error) {
	out, err := exec.CommandContext(context.Background(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/org-runink/runbus").Output()
	if err != nil {
		return "", fmt.Errorf("go list: %w", err)
	}
	root = strings.TrimSpace(string(out))
	folders, err := SourceFolders(root)
	if err != nil {
		return "", err
	}
	for _, dir := range folders {
		err := filepath.WalkDir(filepath.Join(root, dir), func(_ string, _ fs.DirEntry, err error) error { return err })
		if err != nil {
			return "", err
		}
	}
	return root, nil
}

// SourceFolders are the folders, in that of the module, of which the programs are built.
func SourceFolders(root string) (folders []string, err error) {
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, err
	}
	none := []string{"bin", "deploy", "docs", "scripts", "tests", "tools"}
	for _, e := range entries {
		if e.IsDir() && !strings.HasPrefix(e.Name(), ".") && !slices.Contains(none, e.Name()) {
			folders = append(folders, e.Name())
		}
	}
	return folders, nil
}

// Remove removes what Build made; call it at the end of TestMain.
func Remove() {
	still.end()
	if !anyBuild.Load() {
		return
	}
	if dir, err := buildDir(); err == nil {
		_ = os.RemoveAll(dir)
	}
}
