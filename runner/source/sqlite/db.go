package sqlite

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unsafe"

	"modernc.org/libc"
	driver "modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
)

const (
	// maxValue is the longest text or blob in bytes; SQLite refuses to make or read a longer one.
	maxValue = 128 << 20
	// lockWait is how long a database that another program writes is waited for, and lockPoll how often it is tried.
	lockWait = 10 * time.Second
	lockPoll = 50 * time.Millisecond
	// interruptEvery repeats an interrupt: one that comes between two statements is lost.
	interruptEvery = 20 * time.Millisecond
)

// db is one read-only connection. It works on the SQLite library itself, since through database/sql a running step can't be
// interrupted and a date comes out changed. Used by one goroutine, but for the interrupt.
type db struct {
	tls    *libc.TLS
	handle uintptr
}

// ofdLocks makes SQLite's locks survive that something else in this process opens and closes the same file, where the system
// can. (A failure is what other systems answer; they lock as SQLite always did.)
var ofdLocks = sync.OnceFunc(func() { _, _ = driver.OFDLocking(true) })

// open opens the database at path, which must be the file of the given identity.
func open(path string, identity fs.FileInfo) (*db, error) {
	ofdLocks()
	d := &db{tls: libc.NewTLS()}
	name, err := libc.CString(path)
	if err != nil {
		d.tls.Close()
		return nil, err
	}
	defer libc.Xfree(d.tls, name)
	slot := d.tls.Alloc(int(unsafe.Sizeof(uintptr(0))))
	flags := int32(sqlite3.SQLITE_OPEN_READONLY | sqlite3.SQLITE_OPEN_NOMUTEX | sqlite3.SQLITE_OPEN_PRIVATECACHE | sqlite3.SQLITE_OPEN_NOFOLLOW | sqlite3.SQLITE_OPEN_EXRESCODE)
	rc := sqlite3.Xsqlite3_open_v2(d.tls, name, slot, flags, 0)
	d.handle = *(*uintptr)(pointer(slot))
	d.tls.Free(int(unsafe.Sizeof(uintptr(0))))
	if rc == sqlite3.SQLITE_OK {
		err = d.prepareConnection(path, identity)
	} else {
		err = d.failure(rc)
	}
	if err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

func (d *db) prepareConnection(path string, identity fs.FileInfo) error {
	same, err := d.isFile(path, identity)
	if err != nil {
		return schemas.Errorf(schemas.CodeSource, "open %s: %w", filepath.Base(path), err)
	}
	if !same {
		return schemas.Errorf(schemas.CodeForbidden, "%q was changed while it was opened", filepath.Base(path))
	}
	for option, on := range map[int32]int32{sqlite3.SQLITE_DBCONFIG_DEFENSIVE: 1, sqlite3.SQLITE_DBCONFIG_TRUSTED_SCHEMA: 0} {
		args := libc.NewVaList(on, uintptr(0))
		if args == 0 {
			return errors.New("sqlite: out of memory")
		}
		rc := sqlite3.Xsqlite3_db_config(d.tls, d.handle, option, args)
		libc.Xfree(d.tls, args)
		if rc != sqlite3.SQLITE_OK {
			return d.failure(rc)
		}
	}
	sqlite3.Xsqlite3_limit(d.tls, d.handle, sqlite3.SQLITE_LIMIT_LENGTH, maxValue)
	sqlite3.Xsqlite3_limit(d.tls, d.handle, sqlite3.SQLITE_LIMIT_ATTACHED, 0)
	for _, sql := range []string{"PRAGMA query_only=1", "PRAGMA cell_size_check=1", "BEGIN"} {
		s, _, err := d.compile(sql)
		if err != nil {
			return err
		}
		_, err = s.step()
		s.close()
		if err != nil {
			return err
		}
	}
	return nil
}

// close ends the transaction and the connection.
func (d *db) close() {
	if d.handle != 0 {
		sqlite3.Xsqlite3_close_v2(d.tls, d.handle)
		d.handle = 0
	}
	d.tls.Close()
}

// interruptWith stops what runs on the connection when ctx ends, until stop is called; stop waits for it.
func (d *db) interruptWith(ctx context.Context) (stop func()) {
	finished, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		select {
		case <-finished:
			return
		case <-ctx.Done():
		}
		tls := libc.NewTLS() // the connection's own is in use
		defer tls.Close()
		again := time.NewTicker(interruptEvery)
		defer again.Stop()
		for {
			sqlite3.Xsqlite3_interrupt(tls, d.handle)
			select {
			case <-finished:
				return
			case <-again.C:
			}
		}
	}()
	return func() {
		close(finished)
		<-stopped
	}
}

// failure is SQLite's own error in its own words.
func (d *db) failure(rc int32) error {
	text := libc.GoString(sqlite3.Xsqlite3_errstr(d.tls, rc))
	if d.handle != 0 {
		if msg := libc.GoString(sqlite3.Xsqlite3_errmsg(d.tls, d.handle)); msg != text && msg != "not an error" {
			text += ": " + msg
		}
	}
	return &failed{rc: rc, error: source.Redact(fmt.Errorf("%s (%d)", text, rc), nil)}
}

// failed is an error of SQLite with its result code.
type failed struct {
	rc int32
	error
}

// Unwrap returns the *schemas.Error.
func (f *failed) Unwrap() error { return f.error }

// locked reports whether err says that another program is writing.
func locked(err error) bool {
	var f *failed
	return errors.As(err, &f) && f.rc&0xff == sqlite3.SQLITE_BUSY
}

// whenUnlocked calls try until it doesn't find the database locked, for at most lockWait.
func whenUnlocked(ctx context.Context, try func() error) error {
	until := time.Now().Add(lockWait)
	for {
		err := try()
		if !locked(err) || time.Now().After(until) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(lockPoll):
		}
	}
}

// stmt is one compiled statement.
type stmt struct {
	db     *db
	handle uintptr
}

// query compiles what must be one read-only statement by SQLite's own judgement.
func (d *db) query(sql string) (*stmt, error) {
	s, tail, err := d.compile(sql)
	if err != nil {
		return nil, err
	}
	if s.handle == 0 {
		return nil, schemas.Errorf(schemas.CodeReadOnly, "the query is refused: SQLite finds no statement in it")
	}
	if tail != "" {
		second, _, err := d.compile(tail)
		if err == nil && second.handle == 0 {
			tail = "" // white space and comments
		} else if err == nil {
			second.close()
		}
	}
	switch {
	case tail != "":
		err = schemas.Errorf(schemas.CodeReadOnly, "the query is refused: SQLite finds more than one statement in it")
	case sqlite3.Xsqlite3_stmt_readonly(d.tls, s.handle) == 0 && sqlite3.Xsqlite3_stmt_isexplain(d.tls, s.handle) == 0:
		err = schemas.Errorf(schemas.CodeReadOnly, "the query is refused: SQLite says that it writes")
	case sqlite3.Xsqlite3_bind_parameter_count(d.tls, s.handle) > 0:
		err = schemas.Errorf(schemas.CodeBadSource, "the query has parameters; a fetch has no values for them")
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (d *db) compile(sql string) (s *stmt, tail string, err error) {
	text, err := libc.CString(sql)
	if err != nil {
		return nil, "", err
	}
	defer libc.Xfree(d.tls, text)
	const size = 2 * unsafe.Sizeof(uintptr(0))
	slots := d.tls.Alloc(int(size))
	defer d.tls.Free(int(size))
	rest := slots + unsafe.Sizeof(uintptr(0))
	if rc := sqlite3.Xsqlite3_prepare_v2(d.tls, d.handle, text, int32(len(sql)+1), slots, rest); rc != sqlite3.SQLITE_OK {
		return nil, "", d.failure(rc)
	}
	return &stmt{d, *(*uintptr)(pointer(slots))}, sql[*(*uintptr)(pointer(rest))-text:], nil
}

// step goes to the next row; false at the end.
func (s *stmt) step() (bool, error) {
	switch rc := sqlite3.Xsqlite3_step(s.db.tls, s.handle); rc {
	case sqlite3.SQLITE_ROW:
		return true, nil
	case sqlite3.SQLITE_DONE:
		return false, nil
	default:
		return false, s.db.failure(rc)
	}
}

// reset goes back to before the first row.
func (s *stmt) reset() { sqlite3.Xsqlite3_reset(s.db.tls, s.handle) }

func (s *stmt) close() { sqlite3.Xsqlite3_finalize(s.db.tls, s.handle) }

// columns are the result's names and declared types.
func (s *stmt) columns() []column {
	cols := make([]column, sqlite3.Xsqlite3_column_count(s.db.tls, s.handle))
	for i := range cols {
		cols[i].name = strings.ToValidUTF8(libc.GoString(sqlite3.Xsqlite3_column_name(s.db.tls, s.handle, int32(i))), "�")
		cols[i].declared = declaredKind(libc.GoString(sqlite3.Xsqlite3_column_decltype(s.db.tls, s.handle, int32(i))))
	}
	return cols
}

// row reads the current row into cells. The bytes in them are SQLite's and good until the next step.
func (s *stmt) row(cells []cell) error {
	tls, h := s.db.tls, s.handle
	for i := range cells {
		n := int32(i)
		c := cell{}
		switch sqlite3.Xsqlite3_column_type(tls, h, n) {
		case sqlite3.SQLITE_INTEGER:
			c.class, c.integer = classInteger, sqlite3.Xsqlite3_column_int64(tls, h, n)
		case sqlite3.SQLITE_FLOAT:
			c.class, c.real = classReal, sqlite3.Xsqlite3_column_double(tls, h, n)
		case sqlite3.SQLITE_TEXT:
			p := sqlite3.Xsqlite3_column_text(tls, h, n)
			if p == 0 {
				return s.db.failure(sqlite3.SQLITE_NOMEM)
			}
			c.class, c.data = classText, view(p, sqlite3.Xsqlite3_column_bytes(tls, h, n))
		case sqlite3.SQLITE_BLOB:
			p := sqlite3.Xsqlite3_column_blob(tls, h, n) // 0 for a blob without bytes
			size := sqlite3.Xsqlite3_column_bytes(tls, h, n)
			if p == 0 && size > 0 {
				return s.db.failure(sqlite3.SQLITE_NOMEM)
			}
			c.class, c.data = classBlob, view(p, size)
		}
		cells[i] = c
	}
	return nil
}

// view is n bytes of SQLite's memory.
func view(p uintptr, n int32) []byte {
	if p == 0 || n <= 0 {
		return nil
	}
	return unsafe.Slice((*byte)(pointer(p)), n) //nolint:gosec // SQLite's own length
}

// pointer is an address in SQLite's memory, which Go's collector doesn't manage.
func pointer(p uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&p)) } //nolint:gosec // an address is all that the library gives
