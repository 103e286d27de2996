package journal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

const headFile = "head"

var errNoHead = errors.New("the file " + headFile + " is missing beside records: somebody took it, and whether the end was cut off can't be told; " +
	"move the folder away to begin anew")

// readHead is the head on the disk; there is false if there is none.
func readHead(dir string) (a Anchor, there bool, err error) {
	text, err := os.ReadFile(filepath.Join(dir, headFile))
	if errors.Is(err, os.ErrNotExist) {
		return Anchor{}, false, nil
	}
	if err != nil {
		return Anchor{}, false, err
	}
	seq, hash, ok := strings.Cut(strings.TrimSuffix(string(text), "\n"), ":")
	a.Seq, err = strconv.ParseUint(seq, 10, 64)
	if !ok || err != nil || !isHash(hash) {
		return Anchor{}, false, fmt.Errorf("the file %s is damaged: it is not NUMBER:SHA256", headFile)
	}
	a.Hash = hash
	return a, true, nil
}

// writeHead overwrites the head in place: it always has the same length, well below a sector, so it is the old or the new one
// whatever happens meanwhile.
func writeHead(dir string, a Anchor) error {
	f, err := os.OpenFile(filepath.Join(dir, headFile), os.O_CREATE|os.O_WRONLY|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(fmt.Appendf(nil, "%020d:%s\n", a.Seq, a.Hash), 0)
	return errors.Join(err, f.Close())
}

// syncFile brings a file or folder to the disk.
func syncFile(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
