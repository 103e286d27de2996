//go:build !linux

package sqlite

import (
	"io/fs"
	"os"
)

// isFile reports whether the name that SQLite opened still is the file of the given identity. Somebody who can rename inside
// the root could put it back in time; on Linux the open file itself is asked.
func (d *db) isFile(path string, identity fs.FileInfo) (bool, error) {
	now, err := os.Lstat(path)
	return err == nil && os.SameFile(now, identity), err
}
