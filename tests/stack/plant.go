package stack

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// CopyModule copies what the programs are built of to dir, which is there: to plant a mistake in the copy and show that a test notices.
func CopyModule(dir string) error {
	root, err := readSources()
	if err != nil {
		return err
	}
	folders, err := SourceFolders(root)
	if err != nil {
		return err
	}
	for _, folder := range folders {
		if err := os.CopyFS(filepath.Join(dir, folder), os.DirFS(filepath.Join(root, folder))); err != nil {
			return err
		}
	}
	for _, file := range []string{"go.mod", "go.sum"} {
		b, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, file), b, 0o600); err != nil { //nolint:gosec // one of the two above
			return err
		}
	}
	return nil
}

// Patch runs `git apply` in a copy, which is no repository.
func Patch(dir string, args ...string) error {
	cmd := exec.CommandContext(context.Background(), "git", append([]string{"apply"}, args...)...) //nolint:gosec // a test names the patch
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+filepath.Dir(dir))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("git apply: %w\n%s", err, out)
	}
	return nil
}

// BuildCopy builds the programs of a copy, without the race detector, into its folder bin, for BinariesEnv.
func BuildCopy(dir string) (bin string, err error) {
	bin = filepath.Join(dir, "bin")
	cmd := exec.CommandContext(context.Background(), "go", "build", "-buildvcs=false", "-o", bin+string(filepath.Separator), "./cmd/face", "./cmd/core-runner", "./cmd/runink") //nolint:gosec // a test names the folder
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return bin, nil
}
