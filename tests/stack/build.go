// Package stack runs the product's own binaries as real processes, for tests: a control plane (face), runners (core-runner) and
// the command line (runink).
package stack

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// Binaries are the paths of one build.
type Binaries struct {
	Face, CoreRunner, Runink string
}

var (
	buildOnce [2]sync.Once
	built     [2]Binaries
	buildErr  [2]error
	buildDir  string
	dirOnce   sync.Once
)

// BinariesEnv names a folder of binaries to test instead of those that Build builds.
const BinariesEnv = "RUNBUS_TEST_BINARIES"

// Build builds the binaries once per test process, with the race detector or, for measurements of memory and time, without.
// Remove cleans up.
func Build(race bool) (Binaries, error) {
	if dir := os.Getenv(BinariesEnv); dir != "" {
		return Binaries{filepath.Join(dir, "face"), filepath.Join(dir, "core-runner"), filepath.Join(dir, "runink")}, nil
	}
	i := 0
	args := []string{"build"}
	if race {
		i = 1
		args = append(args, "-race")
	}
	buildOnce[i].Do(func() {
		dirOnce.Do(func() { buildDir, buildErr[i] = os.MkdirTemp("", "runbus-bin-") })
		if buildErr[i] != nil {
			return
		}
		out := filepath.Join(buildDir, [2]string{"plain", "race"}[i])
		const module = "github.com/org-runink/runbus/cmd/"
		root, err := readSources()
		if err != nil {
			buildErr[i] = err
			return
		}
		cmd := exec.Command("go", append(args, "-o", out+string(filepath.Separator), module+"face", module+"core-runner", module+"runink")...) //nolint:gosec,noctx // this module's programs; a build is not cut short
		cmd.Dir = root                                                                                                                         // the benchmarks are a module of their own, with other requirements
		if text, err := cmd.CombinedOutput(); err != nil {
			buildErr[i] = fmt.Errorf("go build: %w\n%s", err, text)
			return
		}
		built[i] = Binaries{filepath.Join(out, "face"), filepath.Join(out, "core-runner"), filepath.Join(out, "runink")}
	})
	return built[i], buildErr[i]
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
	if buildDir != "" {
		_ = os.RemoveAll(buildDir)
	}
}
