package cp

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/org-runink/runbus/internal/durable"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
)

// dataDir is the folder that one control plane at a time works in.
type dataDir struct {
	path string
	lock *os.File
}

// The files in the data folder, beside what JetStream and the certificates keep.
const (
	fileLock        = "lock"
	fileKeys        = "bus-keys.json"
	fileInitialised = "initialised"
	fileOperator    = "operator.token"
	fileLocalAdmin  = "local-admin.token"
	fileOpsSeed     = "ops.nk"
	fileOpsSysSeed  = "ops-sys.nk"
	dirStore        = "jetstream"
	dirTLS          = "tls"
)

// openDataDir makes the folder when it is missing and locks it. A folder that can't be written, is open to others, or is in
// use is an error that says so.
func openDataDir(path string) (*dataDir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the data folder %s can't be made: %w", path, reason(err)).
			WithHint("choose another one with RUNBUS_DATA_DIR (`runink up`: --data-dir), or make it for this user")
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the data folder %s is open to others (mode %04o), and it holds keys", path, info.Mode().Perm()).
			WithHint("chmod 700 " + path)
	}
	lock, err := os.OpenFile(filepath.Join(path, fileLock), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the data folder %s can't be written: %w", path, reason(err)).
			WithHint("choose another one with RUNBUS_DATA_DIR (`runink up`: --data-dir), or give it to this user")
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = lock.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, schemas.Errorf(schemas.CodeConflict, "the data folder %s is in use by another control plane", path).
				WithHint("stop it first, or choose another folder with RUNBUS_DATA_DIR (`runink up`: --data-dir)")
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return &dataDir{path: path, lock: lock}, nil
}

// reason is what is wrong without the path, which the message has already.
func reason(err error) error {
	var path *os.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

func (d *dataDir) file(name string) string { return filepath.Join(d.path, name) }

// initialisedText opens the file fileInitialised; the format of the folder follows. The first version wrote the text alone.
const (
	initialisedText = "The security buckets were created. A missing one is an alarm from now on.\n"
	formatPrefix    = "format "
)

// format is the jetstream.Format with which the folder was last opened; fresh is true when it never was. Only then, or for
// buckets that came after that format, may security buckets be created. A folder of a later version is refused: this one
// doesn't know what it would have to guard.
func (d *dataDir) format() (format int, fresh bool, err error) {
	text, err := os.ReadFile(d.file(fileInitialised))
	if errors.Is(err, os.ErrNotExist) {
		return 0, true, nil
	}
	if err != nil {
		return 0, false, err
	}
	rest, ok := strings.CutPrefix(string(text), initialisedText)
	if ok && rest == "" {
		return 1, false, nil
	}
	number, known := strings.CutPrefix(strings.TrimSpace(rest), formatPrefix)
	format, err = strconv.Atoi(number)
	if !ok || !known || err != nil || format < 1 {
		return 0, false, schemas.Errorf(schemas.CodeInvalid, "the file %s is damaged: it says which format the data folder has", d.file(fileInitialised)).
			WithHint("restore it from a backup of the data folder")
	}
	if format > jetstream.Format {
		return 0, false, schemas.Errorf(schemas.CodeConflict, "the data folder %s has format %d, and this version knows up to %d", d.path, format, jetstream.Format).
			WithHint("start the version that made it, or a later one")
	}
	return format, false, nil
}

// initialised notes that the buckets of this version are there.
func (d *dataDir) initialised() error {
	return writeFile(d.file(fileInitialised), fmt.Appendf(nil, "%s%s%d\n", initialisedText, formatPrefix, jetstream.Format))
}

func (d *dataDir) close() { _ = d.lock.Close() }

// writeFile replaces a file of mode 0600 in one step.
func writeFile(name string, content []byte) error { return durable.Replace(name, content, nil) }
