package journal

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// DefaultMaxFile is the size at which the next file is begun, in bytes.
const DefaultMaxFile = 64 << 20

// Journal appends to the journal of one folder. Several processes may: each takes the folder's lock for the moment of an append.
// Safe for concurrent use. Make it with Open.
type Journal struct {
	dir     string
	maxFile int64
	now     func() time.Time

	mu     sync.Mutex // of what follows
	lock   *os.File
	file   *os.File // the last one; nil until the first append, and after an error
	name   string
	size   int64  // of file, as this process left it
	last   Anchor // the last line
	closed bool

	queue chan *entry   // to write
	syncs chan []*entry // to bring
	done  chan struct{}
	stop  sync.Once
	quit  chan struct{}
}

// entry is one record on its way to the disk.
type entry struct {
	record  Record
	written chan error // the line is in the file: it outlives this process
	synced  chan error // it is on the disk: it outlives this host
}

// Open makes the folder (mode 0700) if it is missing and checks that it can be written. maxFile of zero means DefaultMaxFile.
func Open(dir string, maxFile int64) (*Journal, error) {
	if maxFile <= 0 {
		maxFile = DefaultMaxFile
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	j := &Journal{
		dir: dir, maxFile: maxFile, now: time.Now, lock: lock,
		queue: make(chan *entry, 64), syncs: make(chan []*entry, 16), done: make(chan struct{}), quit: make(chan struct{}),
	}
	if err := j.exclusively(j.attach); err != nil {
		_ = lock.Close()
		return nil, err
	}
	go j.write()
	go j.bring()
	return j, nil
}

// Close ends the writer. Appends that run are finished.
func (j *Journal) Close() error {
	j.stop.Do(func() { close(j.quit) })
	<-j.done
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil
	}
	j.closed = true
	return errors.Join(j.detach(), j.lock.Close())
}

// Head is the last line as this process knows it; number 0 and 64 zeros for an empty journal.
func (j *Journal) Head() Anchor {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.last
}

// ErrClosed is what Append returns after Close.
var ErrClosed = errors.New("the journal is closed")

// Append writes r, with number, chain and time filled in, and returns when the line is in the file; with durable, when it is on the disk.
// Without, it gets there right after: lines of several callers go to the disk together. On an error it must be assumed that
// nothing was recorded; the next Append tries anew.
func (j *Journal) Append(ctx context.Context, r Record, durable bool) error {
	e := &entry{record: r, written: make(chan error, 1), synced: make(chan error, 1)}
	select {
	case j.queue <- e:
	case <-j.quit:
		return ErrClosed
	case <-ctx.Done():
		return ctx.Err()
	}
	wait := e.written
	if durable {
		wait = e.synced
	}
	select {
	case err := <-wait:
		if err != nil {
			return fmt.Errorf("journal: %w", err)
		}
		return nil
	case <-j.done:
		select {
		case err := <-wait:
			return err
		default:
			return ErrClosed
		}
	}
}

// write is the one writer: it takes what waits, writes it, tells, and hands it on to bring.
func (j *Journal) write() {
	defer close(j.syncs)
	for {
		var batch []*entry
		select {
		case e := <-j.queue:
			batch = append(batch, e)
		case <-j.quit:
			select { // what was queued before the end
			case e := <-j.queue:
				batch = append(batch, e)
			default:
				return
			}
		}
	more:
		for len(batch) < cap(j.queue) {
			select {
			case e := <-j.queue:
				batch = append(batch, e)
			default:
				break more
			}
		}
		written := 0
		err := j.exclusively(func() error {
			if err := j.attach(); err != nil {
				return err
			}
			for _, e := range batch {
				if err := j.append(e.record); err != nil {
					return err
				}
				written++
				e.written <- nil
			}
			return nil
		})
		for _, e := range batch[written:] {
			e.written <- err
			e.synced <- err
		}
		if written > 0 {
			j.syncs <- batch[:written]
		}
	}
}

// bring brings what was written to the disk and tells: while it waits for the disk more is written, which goes with the next time.
func (j *Journal) bring() {
	defer close(j.done)
	for batch := range j.syncs {
	more:
		for {
			select {
			case next, ok := <-j.syncs:
				if !ok {
					break more
				}
				batch = append(batch, next...)
			default:
				break more
			}
		}
		err := j.flush()
		for _, e := range batch {
			e.synced <- err
		}
	}
}

// flush brings the lines so far to the disk, then the head. The files before the last one are there since it was begun.
func (j *Journal) flush() error {
	j.mu.Lock()
	name, last := j.name, j.last
	j.mu.Unlock()
	if err := syncFile(filepath.Join(j.dir, name)); err != nil {
		return err
	}
	return j.exclusively(func() error {
		head, there, err := readHead(j.dir)
		switch {
		case err != nil:
			return err
		case !there:
			return errNoHead
		case head.Seq >= last.Seq: // another process was faster
			return nil
		}
		return writeHead(j.dir, last)
	})
}

// exclusively runs do with the folder's lock. After an error the file is opened anew next time, from what is on the disk.
func (j *Journal) exclusively(do func() error) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := syscall.Flock(int(j.lock.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	defer syscall.Flock(int(j.lock.Fd()), syscall.LOCK_UN) //nolint:errcheck // it ends with the file at the latest
	err := do()
	if err != nil {
		_ = j.detach() // the error that counts is err
	}
	return err
}

func (j *Journal) detach() error {
	if j.file == nil {
		return nil
	}
	err := j.file.Close()
	j.file = nil
	return err
}

// attach finds the end of the journal, unless nobody else has written since, and mends a line that a crash left unfinished. The
// lock is held.
func (j *Journal) attach() error {
	names, err := files(j.dir)
	if err != nil {
		return err
	}
	if j.file != nil && len(names) > 0 && names[len(names)-1] == j.name {
		info, err := os.Stat(filepath.Join(j.dir, j.name))
		mine, err2 := j.file.Stat()
		if err == nil && err2 == nil && os.SameFile(info, mine) && info.Size() == j.size {
			return nil
		}
	}
	_ = j.detach() // it was only appended to, and that was checked
	head, there, err := readHead(j.dir)
	if err != nil {
		return err
	}
	if len(names) == 0 {
		if !there {
			head = Anchor{Hash: zeroHash}
			if err := writeHead(j.dir, head); err != nil { // from now on there is one: without, somebody took it
				return err
			}
			if err := syncFile(filepath.Join(j.dir, headFile)); err != nil {
				return err
			}
		}
		j.last = head // not zero: the files are gone; the chain goes on from what was there, and Verify tells
		return nil
	}
	if !there {
		return errNoHead
	}
	j.name = names[len(names)-1]
	if j.file, err = os.OpenFile(filepath.Join(j.dir, j.name), os.O_RDWR|os.O_APPEND|syscall.O_NOFOLLOW, 0o600); err != nil {
		return err
	}
	info, err := j.file.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", j.name)
	}
	j.size = info.Size()
	rest, line, err := lastLines(j.file, j.size)
	if err != nil {
		return err
	}
	if err := j.resume(names, line, head); err != nil {
		return err
	}
	if len(rest) == 0 {
		return nil
	}
	sum := sha256.Sum256(rest)
	if err := j.file.Truncate(j.size - int64(len(rest))); err != nil {
		return fmt.Errorf("take out an unfinished line: %w", err)
	}
	j.size -= int64(len(rest))
	if err := j.append(Record{Event: EventRecovered, DroppedBytes: int64(len(rest)), DroppedSHA256: hex.EncodeToString(sum[:])}); err != nil {
		return err
	}
	return j.sync()
}

// resume takes the chain up: from the last line, or from the head where that knows of a later one, or the line is none. What is
// missing in between then shows as a break.
func (j *Journal) resume(names []string, line []byte, head Anchor) error {
	var last Anchor
	if len(line) > 0 {
		if r, hash, err := decode(line); err == nil {
			last = Anchor{Seq: r.Seq, Hash: hash}
		}
	} else if len(names) > 1 { // the last file was just begun
		f, err := os.Open(filepath.Join(j.dir, names[len(names)-2]))
		if err != nil {
			return err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return err
		}
		_, before, err := lastLines(f, info.Size())
		if err != nil {
			return err
		}
		if r, hash, err := decode(before); err == nil {
			last = Anchor{Seq: r.Seq, Hash: hash}
		}
	}
	if head.Seq >= last.Seq || last.Hash == "" {
		last = head
	}
	if last.Hash == "" {
		last.Hash = zeroHash
	}
	j.last = last
	return nil
}

// append writes one line; the lock is held and the journal attached.
func (j *Journal) append(r Record) error {
	r.Seq, r.Prev = j.last.Seq+1, j.last.Hash
	if r.At.IsZero() {
		r.At = j.now()
	}
	r.At = r.At.UTC().Round(0)
	line, hash, err := encode(r)
	if err != nil {
		return err
	}
	if j.file == nil || j.size > 0 && j.size+int64(len(line)) > j.maxFile {
		if err := j.begin(r.Seq); err != nil {
			return err
		}
	}
	n, err := j.file.Write(line)
	j.size += int64(n)
	if err != nil {
		// A part of a line would be mended at the next attach; a full disk that has room again needs no record of it.
		if n > 0 && j.file.Truncate(j.size-int64(n)) == nil {
			j.size -= int64(n)
		}
		return err
	}
	j.last = Anchor{Seq: r.Seq, Hash: hash}
	return nil
}

// begin starts the file of the line seq; what was written to the one before is on the disk then.
func (j *Journal) begin(seq uint64) error {
	if j.file != nil {
		if err := errors.Join(j.file.Sync(), j.detach()); err != nil {
			return err
		}
	}
	name := fileName(seq)
	f, err := os.OpenFile(filepath.Join(j.dir, name), os.O_CREATE|os.O_EXCL|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	j.file, j.name, j.size = f, name, 0
	return syncFile(j.dir)
}

// sync brings the lines to the disk, then the head, which thus never knows of a line that may be lost.
func (j *Journal) sync() error {
	if j.file == nil {
		return nil
	}
	if err := j.file.Sync(); err != nil {
		return err
	}
	return writeHead(j.dir, j.last)
}

const suffix = ".jsonl"

func fileName(seq uint64) string { return fmt.Sprintf("%020d%s", seq, suffix) }

// firstOf is the number in a file's name, 0 if it is none of ours.
func firstOf(name string) uint64 {
	digits, ok := strings.CutSuffix(name, suffix)
	seq, err := strconv.ParseUint(digits, 10, 64)
	if !ok || err != nil || fileName(seq) != name {
		return 0
	}
	return seq
}

// files are the names of the journal's files in order.
func files(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if firstOf(e.Name()) > 0 {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}

// lastLines is what stands behind the last line feed, and the last line before it.
func lastLines(f *os.File, size int64) (rest, line []byte, err error) {
	from := max(0, size-2*maxLine)
	end := make([]byte, size-from)
	if _, err := f.ReadAt(end, from); err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, err
	}
	cut := bytes.LastIndexByte(end, '\n')
	if cut < 0 && from > 0 {
		return nil, nil, fmt.Errorf("%s ends in more than %d bytes without a line: it is no journal any more; move it away", filepath.Base(f.Name()), maxLine)
	}
	rest, end = end[cut+1:], end[:max(cut, 0)]
	return rest, end[bytes.LastIndexByte(end, '\n')+1:], nil
}

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
