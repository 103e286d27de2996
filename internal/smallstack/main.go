// Command smallstack prepares a build in which the NATS server takes less memory: it copies the server that a module requires, changes a
// few lines of it, and writes a go.mod for `go build -modfile` that has the copy in place of the original. A build with the plain go.mod
// behaves the same, and takes that memory.
//
// Small stacks: the server keeps an array of 24 KiB on the stack of the goroutine that writes to a connection, room for 1,024 buffers to
// be written at once. So each connection's stack grows to 32 KiB with its first PONG, and at each garbage collection shrinks and grows
// anew: 30 to 40 KiB of memory for each runner that waits for work. A connection rarely has more than a few buffers to write: the copy
// has room for 16, and takes more from the heap.
//
// Buffers that come back: a message that is longer than one read of the connection is gathered in memory that the server makes for it,
// half a MiB for each chunk of a large result. To clear that memory and to collect it was an eighth of the control plane's processor
// time for a result of 1 GiB (measured). Nobody keeps what a message is read into: a short one lies in the connection's read buffer, which
// the next read overwrites. In the copy, messages of 64 to 516 KiB are gathered in buffers that they take turns with.
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

// change is another text in place of one that is in a file once.
type change struct{ file, before, after string }

var changes = []change{
	{
		"server/client.go",
		"\tvar _orig [nbMaxVectorSize][]byte\n\torig := append(_orig[:0], c.out.wnb...)\n",
		"\tvar _orig [16][]byte // changed by runbus/internal/smallstack: was nbMaxVectorSize\n\torig := append(_orig[:0], c.out.wnb...)\n",
	},
	{
		"server/client.go",
		"// nbPoolGet returns a frame that is a best-effort match for the given size.\n",
		splitPool + "// nbPoolGet returns a frame that is a best-effort match for the given size.\n",
	},
	{
		"server/parser.go",
		"\t\t\tc.msgBuf = make([]byte, lrem, c.pa.size+LEN_CR_LF)\n",
		"\t\t\tc.msgBuf = splitGet(lrem, c.pa.size+LEN_CR_LF) // changed by runbus/internal/smallstack\n",
	},
	{
		"server/parser.go",
		"\t\t\t\tc.processInboundMsg(c.msgBuf)\n\n\t\t\t\tmt.sendEvent()\n",
		"\t\t\t\tc.processInboundMsg(c.msgBuf)\n\n\t\t\t\tmt.sendEvent()\n\t\t\t\tsplitPut(c.msgBuf) // added by runbus/internal/smallstack\n",
	},
}

// splitPool is what the copy's client.go has more.
const splitPool = `// Added by runbus/internal/smallstack: the buffers in which messages longer than one read are gathered.
const (
	splitLeast = 64 << 10
	splitMost  = 516 << 10
)

var splitPool = &sync.Pool{New: func() any { return new([splitMost]byte) }}

// splitGet returns n bytes of a buffer that has room for size.
func splitGet(n, size int) []byte {
	if size < splitLeast || size > splitMost {
		return make([]byte, n, size)
	}
	return splitPool.Get().(*[splitMost]byte)[:n]
}

// splitPut recycles what splitGet returned, which nobody may use any more, and leaves other buffers alone.
func splitPut(b []byte) {
	if cap(b) == splitMost {
		splitPool.Put((*[splitMost]byte)(b[:splitMost]))
	}
}

`

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

// copyChanged copies the server, without its tests, and makes the changes.
func copyChanged(to, from string) error {
	made := 0
	source := os.DirFS(from)
	err := fs.WalkDir(source, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || strings.HasSuffix(name, "_test.go") {
			return err
		}
		body, err := fs.ReadFile(source, name)
		if err != nil {
			return err
		}
		for _, c := range changes {
			if c.file != name {
				continue
			}
			if body, err = c.make(body); err != nil {
				return fmt.Errorf("%s in %s: %w", name, from, err)
			}
			made++
		}
		return write(filepath.Join(to, filepath.FromSlash(name)), body)
	})
	if err == nil && made < len(changes) {
		err = fmt.Errorf("%s has not all files that are to be changed", from)
	}
	return err
}

// make fails when the text is another than the one that was known when this was written: look whether it is needed any more.
func (c change) make(text []byte) ([]byte, error) {
	if n := bytes.Count(text, []byte(c.before)); n != 1 {
		return nil, fmt.Errorf("the text to change is there %d times, not once: another version of the server:\n%s", n, c.before)
	}
	return bytes.Replace(text, []byte(c.before), []byte(c.after), 1), nil
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
