// Command smallstack prepares a build in which NATS takes less memory: it copies the server and the client that a module requires, changes
// a few lines of them, and writes a go.mod for `go build -modfile` that has the copies in place of the originals. A build with the plain
// go.mod behaves the same, and takes that memory.
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
//
// Messages that come back: the client makes memory for each such message too, and hands it to the subscriber for good. In the copy a message
// of 256 KiB or more has a method Recycle, by which the subscriber gives its memory to a later one; a dispatch does once its caller has taken the
// chunk (Return in bus/lent.go). Made anew, cleared and cold, it was a quarter of the control plane's processor time for a result of 1 GiB by HTTP (measured).
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

const (
	server = "github.com/nats-io/nats-server/v2"
	client = "github.com/nats-io/nats.go"
)

// change is another text in place of one that is in a file once.
type change struct{ file, before, after string }

// module is one that is copied.
type module struct {
	path, folder string // folder: the beginning of the copy's name
	changes      []change
}

var modules = []module{{server, "nats-server-", serverChanges}, {client, "nats.go-", clientChanges}}

var serverChanges = []change{
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

// splitGet is what both copies have more: memory, which is called what, for messages from so many KiB on.
func splitGet(least, what string) string {
	return `const (
	splitLeast = ` + least + ` << 10
	splitMost  = 516 << 10
)

var splitPool = &sync.Pool{New: func() any { return new([splitMost]byte) }}

// splitGet returns n bytes of ` + what + ` that has room for size.
func splitGet(n, size int) []byte {
	if size < splitLeast || size > splitMost {
		return make([]byte, n, size)
	}
	return splitPool.Get().(*[splitMost]byte)[:n]
}
`
}

// splitPool is what the copy's client.go has more.
var splitPool = `// Added by runbus/internal/smallstack: the buffers in which messages longer than one read are gathered.
` + splitGet("64", "a buffer") + `
// splitPut recycles what splitGet returned, which nobody may use any more, and leaves other buffers alone.
func splitPut(b []byte) {
	if cap(b) == splitMost {
		splitPool.Put((*[splitMost]byte)(b[:splitMost]))
	}
}

`

var clientChanges = []change{
	{
		"parser.go",
		"\t\t\tnc.ps.msgBuf = make([]byte, lrem, nc.ps.ma.size)\n",
		"\t\t\tnc.ps.msgBuf = splitGet(lrem, nc.ps.ma.size) // changed by runbus/internal/smallstack\n",
	},
	{
		"nats.go",
		"\tackd    uint32\n}\n",
		"\tackd    uint32\n\tsplit   *[splitMost]byte // added by runbus/internal/smallstack: what Data lies in, if that comes back\n}\n" + recycling,
	},
	{
		"nats.go",
		"\tm := &Msg{\n\t\tSubject: subj,\n\t\tReply:   reply,\n\t\tHeader:  h,\n",
		"\tm := &Msg{\n\t\tsplit:   splitOf(data, nc.ps.msgCopied), // added by runbus/internal/smallstack\n\t\tSubject: subj,\n\t\tReply:   reply,\n\t\tHeader:  h,\n",
	},
}

// recycling is what the copy's nats.go has more.
var recycling = `
// Added by runbus/internal/smallstack: memory in which messages longer than one read are gathered, and handed out.
` + splitGet("256", "memory") + `
// splitOf is the memory of data, if it is of splitGet and comes back.
func splitOf(data []byte, gathered bool) *[splitMost]byte {
	if !gathered || cap(data) != splitMost {
		return nil
	}
	return (*[splitMost]byte)(data[:splitMost])
}

// Recycle gives the memory of Data, which nobody may read any more, to another message. Without an effect for those that are
// shorter than 256 KiB, and the second time. Not safe for concurrent use.
func (m *Msg) Recycle() {
	if m.split != nil {
		splitPool.Put(m.split)
		m.split, m.Data = nil, nil
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

// prepare writes go.mod, go.sum and the copies into dir, which it makes, for the module in the folder root.
func prepare(root, dir string) error {
	required := os.DirFS(root)
	requirements, err := fs.ReadFile(required, "go.mod")
	if err != nil {
		return err
	}
	sums, err := fs.ReadFile(required, "go.sum")
	if err != nil {
		return err
	}
	requirements = append(requirements, '\n')
	for _, m := range modules {
		list := exec.CommandContext(context.Background(), "go", "list", "-m", "-f", "{{.Version}} {{.Dir}}", m.path) //nolint:gosec // one of modules
		list.Dir = root
		out, err := list.Output()
		if err != nil {
			return fmt.Errorf("go list -m %s: %w", m.path, err)
		}
		version, original, _ := strings.Cut(strings.TrimSpace(string(out)), " ")
		copied := filepath.Join(dir, m.folder+version)
		if err := m.copyChanged(copied, original); err != nil {
			return err
		}
		target, err := relative(root, copied)
		if err != nil {
			return err
		}
		requirements = append(requirements, fmt.Sprintf("replace %s => %s\n", m.path, target)...)
	}
	if err := write(filepath.Join(dir, "go.mod"), requirements); err != nil {
		return err
	}
	return write(filepath.Join(dir, "go.sum"), sums)
}

// relative is the path of to in a go.mod in root: relative, since programs carry it.
func relative(root, to string) (string, error) {
	from, err := filepath.Abs(root)
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

// copyChanged copies the module, without its tests, and makes the changes.
func (m module) copyChanged(to, from string) error {
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
		for _, c := range m.changes {
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
	if err == nil && made < len(m.changes) {
		err = fmt.Errorf("%s has not all files that are to be changed", from)
	}
	return err
}

// make fails when the text is another than the one that was known when this was written: look whether it is needed any more.
func (c change) make(text []byte) ([]byte, error) {
	if n := bytes.Count(text, []byte(c.before)); n != 1 {
		return nil, fmt.Errorf("the text to change is there %d times, not once: another version of the module:\n%s", n, c.before)
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
