package sqlite

import (
	"errors"
	"io/fs"
	"syscall"
	"unsafe"

	sqlite3 "modernc.org/sqlite/lib"
)

// isFile reports whether the file that SQLite holds open is the one of the given identity: asked of the open file itself, so
// the name does not matter any more.
func (d *db) isFile(_ string, identity fs.FileInfo) (bool, error) {
	want, ok := identity.Sys().(*syscall.Stat_t)
	if !ok {
		return false, errors.New("the system tells no file identity")
	}
	const size = unsafe.Sizeof(uintptr(0))
	slot := d.tls.Alloc(int(size))
	defer d.tls.Free(int(size))
	if rc := sqlite3.Xsqlite3_file_control(d.tls, d.handle, 0, sqlite3.SQLITE_FCNTL_FILE_POINTER, slot); rc != sqlite3.SQLITE_OK {
		return false, d.failure(rc)
	}
	file := (*sqlite3.TunixFile)(pointer(*(*uintptr)(pointer(slot))))
	if file == nil || file.FpMethod == 0 {
		return false, errors.New("SQLite holds no file open")
	}
	var got syscall.Stat_t
	if err := syscall.Fstat(int(file.Fh), &got); err != nil {
		return false, err
	}
	return got.Dev == want.Dev && got.Ino == want.Ino, nil
}
