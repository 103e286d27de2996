package identity

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// Folder is what a state folder says, read for somebody who only looks: core-runner doctor.
type Folder struct {
	store   *Store
	missing bool
}

// Look checks dir and its files as Open does, with the same errors, beside the runner that may hold it: it makes, repairs, removes
// and locks nothing. A folder that is not there is an Empty one.
func Look(dir string) (*Folder, error) {
	dir = filepath.Clean(dir)
	f := &Folder{store: &Store{dir: dir}}
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		f.missing = true
		return f, nil
	}
	opened, err := openFolder(dir)
	if err != nil {
		return nil, err
	}
	defer opened.Close()
	err = f.store.look()
	if err == nil && f.store.state == Empty { // an enrolment may have ended between the looks at two of its files
		err = f.store.look()
	}
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Makeable is the error of Open if there is no folder yet and none can be made. It makes nothing.
func (f *Folder) Makeable() error { return Makeable(f.store.dir) }

// Missing reports whether there is no folder yet.
func (f *Folder) Missing() bool { return f.missing }

// State is what the folder said.
func (f *Folder) State() State { return f.store.State() }

// RunnerID is the runner's id, "" in an Empty folder.
func (f *Folder) RunnerID() string { return f.store.RunnerID() }

// Usable is Store.Usable.
func (f *Folder) Usable(now time.Time) error { return f.store.Usable(now) }

// Writable is the error of Open if the folder can't be written. It finds out by writing, and leaves nothing.
func (f *Folder) Writable() error { return writable(f.store.dir) }

// Admits is the error of Store.Admit, which would change the folder.
func (f *Folder) Admits(t *schemas.Ticket, now time.Time) error { return f.store.admits(t, now) }
