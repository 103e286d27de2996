package stack

import (
	"bytes"
	"debug/elf"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/org-runink/runbus/tests/canary"
)

// inspect fails the test for each secret that a process, which has ended, showed: in its log and its output, in what the kernel showed of
// it, and in the files that it left, but for those that are there to keep secrets. A command that makes a secret may print that one.
func (p *Process) inspect(t testing.TB) {
	t.Helper()
	own := nothing
	if p.shows {
		own = func(s canary.Secret) bool { return s.Born == p.output() }
	}
	Inspect(t, p.output(), []byte(p.Stdout.String()), own)
	Inspect(t, "the log of "+p.Name, []byte(p.Stderr.String()), nothing)
	given := Secrets.Find([]byte(strings.Join(p.cmd.Args[1:], "\n")), nothing) // by what is known now: another test may know the same by now
	for _, s := range p.shown.all() {
		may := nothing
		if s.given { // what a test puts there on purpose is refused, but stands there until then
			may = func(s canary.Secret) bool {
				return slices.ContainsFunc(given, func(h canary.Hit) bool { return h.Secret == s })
			}
		}
		Inspect(t, s.sink, s.text, may)
	}
	for _, folder := range p.folders {
		InspectFolder(t, folder, p.Name)
	}
}

func (p *Process) output() string { return "the output of " + p.Name }

// learnFiles makes known what the private files of the process hold now.
func (p *Process) learnFiles() {
	for _, folder := range p.folders {
		if root, err := os.OpenRoot(folder); err == nil { // else it is not made yet
			learnFolder(root)
			_ = root.Close()
		}
	}
}

func learnFolder(root *os.Root) {
	_ = fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error { // what is gone by now is learned of elsewhere
		if err != nil || !d.Type().IsRegular() || !isPrivate(root.Name()+"/"+path) {
			return nil //nolint:nilerr // as above
		}
		if body, err := root.ReadFile(path); err == nil {
			Secrets.Learn("file "+filepath.Base(path), body)
		}
		return nil
	})
}

// blind is in the description of a stream whose files hold what no search can find.
var blind = [][]byte{[]byte(`"compression":"s2"`), []byte(`"cipher":"`)}

// InspectFolder looks at all files in a folder, core files and streams too, for what is in the private ones and all else that is known. Private
// files must be their owner's alone. whose names the folder in what is found.
func InspectFolder(t testing.TB, folder, whose string) {
	t.Helper()
	root, err := os.OpenRoot(folder)
	if err != nil {
		return // never made, or no folder: the process has said so
	}
	defer root.Close() //nolint:errcheck // nothing was written
	learnFolder(root)
	err = fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		sink := "file " + path + " of " + whose
		if isPrivate(folder + "/" + path) {
			if info, err := d.Info(); err == nil && info.Mode().Perm()&0o077 != 0 {
				t.Errorf("LEAK private key in %s: others may read it (mode %04o)", sink, info.Mode().Perm())
			}
			return nil
		}
		f, err := root.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		defer f.Close()
		if filepath.Base(path) == "meta.inf" {
			body, err := io.ReadAll(f)
			for _, mark := range blind {
				if err == nil && bytes.Contains(body, mark) {
					t.Errorf("%s: the stream's files can't be searched: %s", sink, mark)
				}
			}
			Inspect(t, sink, body, nothing)
			return err
		}
		look := Secrets.NewWriter(nothing)
		if isCore(f) {
			t.Errorf("LEAK memory in %s: it is a core file", sink)
			return nil // of a terabyte with holes, if the race detector is in it
		}
		if _, err := io.Copy(look, f); err != nil {
			return err
		}
		report(t, sink, look.Hits())
		return nil
	})
	if err != nil {
		t.Errorf("look at the files of %s: %v", whose, err)
	}
}

// isCore reports whether a file is a core file.
func isCore(f io.ReaderAt) bool {
	var head [18]byte
	n, err := f.ReadAt(head[:], 0)
	return err == nil && n == len(head) && bytes.HasPrefix(head[:], []byte("\x7fELF")) && elf.Type(head[16]) == elf.ET_CORE
}
