// Package stack runs the product's own binaries as real processes, for tests: a control plane (face), runners (core-runner) and
// the command line (runink).
package stack

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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

// Build builds the binaries once per test process, with the race detector or, for measurements of memory and time, without.
// Remove cleans up.
func Build(race bool) (Binaries, error) {
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
		cmd := exec.Command("go", append(args, "-o", out+string(filepath.Separator), module+"face", module+"core-runner", module+"runink")...)
		if text, err := cmd.CombinedOutput(); err != nil {
			buildErr[i] = fmt.Errorf("go build: %w\n%s", err, text)
			return
		}
		built[i] = Binaries{filepath.Join(out, "face"), filepath.Join(out, "core-runner"), filepath.Join(out, "runink")}
	})
	return built[i], buildErr[i]
}

// Remove removes what Build made; call it at the end of TestMain.
func Remove() {
	if buildDir != "" {
		_ = os.RemoveAll(buildDir)
	}
}
