// Package durable writes small files for their owner alone (mode 0600), whole or not at all, also across a crash or a loss of power.
package durable

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Step is told of each step of a write, for tests that end the process there. Nil is fine.
type Step func(name string)

func (s Step) at(file, step string) {
	if s != nil {
		s(filepath.Base(file) + ": " + step)
	}
}

// Replace puts body into file, in place of the one that may be there. When it returns nil the content is on the disk; a reader,
// and a crash at any point, finds the old content or the new. Its folder must exist.
func Replace(file string, body []byte, step Step) error {
	return write(file, body, os.Rename, step)
}

// Create is Replace for a file that must not be there: else fs.ErrExist, and of two processes at once one makes it.
func Create(file string, body []byte, step Step) error {
	return write(file, body, os.Link, step)
}

func write(file string, body []byte, place func(from, to string) error, step Step) error {
	tmp, err := os.CreateTemp(filepath.Dir(file), tempPrefix(file)+"*") // 0600
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) //nolint:errcheck // gone after a rename; what is left of a crash RemoveTemp takes away
	step.at(file, "made")
	_, err = tmp.Write(body)
	if err = errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	step.at(file, "written")
	if err := place(tmp.Name(), file); err != nil {
		return err
	}
	step.at(file, "placed")
	return SyncDir(filepath.Dir(file))
}

// Remove removes file for good; one that is not there is fine.
func Remove(file string, step Step) error {
	if err := os.Remove(file); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	}
	step.at(file, "removed")
	return SyncDir(filepath.Dir(file))
}

// RemoveTemp removes what a crash in Replace or Create of file left beside it.
func RemoveTemp(file string) error {
	entries, err := os.ReadDir(filepath.Dir(file))
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempPrefix(file)) {
			err = errors.Join(err, os.Remove(filepath.Join(filepath.Dir(file), e.Name())))
		}
	}
	return err
}

func tempPrefix(file string) string { return "." + filepath.Base(file) + "." }

// OthersUser is the id of the user that a file or folder belongs to, if that is not this process's user: it can change what is in there,
// whatever the mode.
func OthersUser(info os.FileInfo) (uid int, others bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return int(st.Uid), int(st.Uid) != os.Geteuid()
}

// SyncDir makes the names in a folder durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
