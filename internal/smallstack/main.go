// Command smallstack prepares a build in which connections to the NATS server take less memory: it copies the server that a module
// requires, changes one line of it, and writes a go.mod for `go build -modfile` that has the copy in place of the original.
//
// The server keeps an array of 24 KiB on the stack of the goroutine that writes to a connection, room for 1,024 buffers to be written
// at once. So each connection's stack grows to 32 KiB with its first PONG, and at each garbage collection shrinks and grows anew: 30 to
// 40 KiB of memory for each runner that waits for work. A connection rarely has more than a few buffers to write: the copy has room for
// 16, and takes more from the heap. A build with the plain go.mod behaves the same, and takes that memory.
package main

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const server = "github.com/nats-io/nats-server/v2"

// The change.
const (
	file   = "server/client.go"
	before = "\tvar _orig [nbMaxVectorSize][]byte\n\torig := append(_orig[:0], c.out.wnb...)\n"
	after  = "\tvar _orig [16][]byte // changed by runbus/internal/smallstack: was nbMaxVectorSize\n\torig := append(_orig[:0], c.out.wnb...)\n"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: smallstack MODULE FOLDER: writes FOLDER/go.mod, for the module in the folder MODULE")
		os.Exit(2)
	}
	if err := prepare(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "smallstack:", err)
		os.Exit(1)
	}
}

// prepare writes go.mod, go.sum and the copy into dir, which it makes, for the module in the folder module.
func prepare(module, dir string) error {
	list := exec.CommandContext(context.Background(), "go", "list", "-m", "-f", "{{.Version}} {{.Dir}}", server)
	list.Dir = module
	out, err := list.Output()
	if err != nil {
		return fmt.Errorf("go list -m %s: %w", server, err)
	}
	version, original, _ := strings.Cut(strings.TrimSpace(string(out)), " ")
	copied := filepath.Join(dir, "nats-server-"+version)
	if err := copyChanged(copied, original); err != nil {
		return err
	}
	target, err := relative(module, copied)
	if err != nil {
		return err
	}
	required := os.DirFS(module)
	requirements, err := fs.ReadFile(required, "go.mod")
	if err != nil {
		return err
	}
	sums, err := fs.ReadFile(required, "go.sum")
	if err != nil {
		return err
	}
	requirements = append(requirements, fmt.Sprintf("\nreplace %s => %s\n", server, target)...)
	if err := write(filepath.Join(dir, "go.mod"), requirements); err != nil {
		return err
	}
	return write(filepath.Join(dir, "go.sum"), sums)
}

// relative is the path of to in a go.mod of module: relative, since programs carry it.
func relative(module, to string) (string, error) {
	from, err := filepath.Abs(module)
	if err != nil {
		return "", err
	}
	if to, err = filepath.Abs(to); err != nil {
		return "", err
	}
	path, err := filepath.Rel(from, to)
	if err != nil {
		return "", err
	}
	if path = filepath.ToSlash(path); !strings.HasPrefix(path, "../") {
		path = "./" + path
	}
	return path, nil
}

// copyChanged copies the server, without its tests, and makes the change.
func copyChanged(to, from string) error {
	changed := false
	source := os.DirFS(from)
	err := fs.WalkDir(source, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || strings.HasSuffix(name, "_test.go") {
			return err
		}
		body, err := fs.ReadFile(source, name)
		if err != nil {
			return err
		}
		if name == file {
			if body, err = change(body); err != nil {
				return fmt.Errorf("%s in %s: %w", name, from, err)
			}
			changed = true
		}
		return write(filepath.Join(to, filepath.FromSlash(name)), body)
	})
	if err == nil && !changed {
		err = fmt.Errorf("%s has no %s", from, file)
	}
	return err
}

// change fails when the text is another than the one that was known when this was written: look whether it is needed any more.
func change(text []byte) ([]byte, error) {
	if n := bytes.Count(text, []byte(before)); n != 1 {
		return nil, fmt.Errorf("the line to change is there %d times, not once: another version of the server", n)
	}
	return bytes.Replace(text, []byte(before), []byte(after), 1), nil
}

// write leaves a file alone that is so already: another build may be reading it.
func write(path string, body []byte) error {
	if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, body) { //nolint:gosec // where whoever builds says
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { //nolint:gosec // public sources
		return err
	}
	return os.WriteFile(path, body, 0o644) //nolint:gosec // the same
}
