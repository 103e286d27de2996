package journal

import (
	"bytes"
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
	"syscall"
)

// tip is the end of the journal, as this process left it.
type tip struct {
	file *os.File // the last one; nil until the first append, and after an error
	name string
	stat syscall.Stat_t // of file; only what identifies it counts
	size int64          // of file
	last Anchor         // the last line
}

// exclusively runs do with the folder's lock. After an error the file is opened anew next time, from what is on the disk.
func (j *Journal) exclusively(do func() error) error {
	j.io.Lock()
	defer j.io.Unlock()
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
	if j.tip.file == nil {
		return nil
	}
	err := j.tip.file.Close()
	j.tip.file = nil
	return err
}

// hold takes an open file for the last one.
func (j *Journal) hold(f *os.File, name string) error {
	j.tip.file, j.tip.name = f, name
	return syscall.Fstat(int(f.Fd()), &j.tip.stat)
}

// untouched reports whether nobody else has written since: the file is where it was, as long as it was, and none follows it. The next
// one would have the number of the next line for its name.
func (j *Journal) untouched() bool {
	if j.tip.file == nil {
		return false
	}
	var now syscall.Stat_t
	if syscall.Stat(filepath.Join(j.dir, j.tip.name), &now) != nil ||
		now.Dev != j.tip.stat.Dev || now.Ino != j.tip.stat.Ino || now.Size != j.tip.size {
		return false
	}
	return errors.Is(syscall.Stat(filepath.Join(j.dir, fileName(j.tip.last.Seq+1)), &now), syscall.ENOENT)
}

// attach finds the end of the journal, unless nobody else has written since, and mends a line that a crash left unfinished. The
// lock is held.
func (j *Journal) attach() error {
	if j.untouched() {
		return nil
	}
	_ = j.detach() // it was only appended to, and that was checked
	names, err := files(j.dir)
	if err != nil {
		return err
	}
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
		j.tip.last = head // not zero: the files are gone; the chain goes on from what was there, and Verify tells
		return nil
	}
	if !there {
		return errNoHead
	}
	name := names[len(names)-1]
	f, err := os.OpenFile(filepath.Join(j.dir, name), os.O_RDWR|os.O_APPEND|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	if err := j.hold(f, name); err != nil {
		return err
	}
	if j.tip.stat.Mode&syscall.S_IFMT != syscall.S_IFREG {
		return fmt.Errorf("%s is not a regular file", name)
	}
	j.tip.size = j.tip.stat.Size
	rest, line, err := lastLines(f, j.tip.size)
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
	if err := f.Truncate(j.tip.size - int64(len(rest))); err != nil {
		return fmt.Errorf("take out an unfinished line: %w", err)
	}
	j.tip.size -= int64(len(rest))
	mended := &entry{record: Record{Event: EventRecovered, DroppedBytes: int64(len(rest)), DroppedSHA256: hex.EncodeToString(sum[:])}}
	if err := errors.Join(j.write([]*entry{mended}), mended.err); err != nil {
		return err
	}
	if err := j.tip.file.Sync(); err != nil {
		return err
	}
	return writeHead(j.dir, j.tip.last)
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
	j.tip.last = last
	return nil
}

// maxGroup is the most that is written at once, in bytes, unless it is one line.
const maxGroup = 256 << 10

// write appends the lines of a batch in as few writes as may be, and marks the entries that are in the file, or can't be. The lock is
// held and the journal attached. An error is about all that are not marked.
func (j *Journal) write(batch []*entry) error {
	for len(batch) > 0 {
		n, err := j.writeSome(batch)
		if err != nil {
			return err
		}
		batch = batch[n:]
	}
	return nil
}

// writeSome writes the first lines of a batch with one write, into a new file if the last one is full. It returns how many entries it
// dealt with.
func (j *Journal) writeSome(batch []*entry) (n int, err error) {
	text := j.text[:0]
	defer func() { j.text = text[:0] }()
	last := j.tip.last.Seq
	prev := []byte(j.tip.last.Hash)
	for ; n < len(batch) && len(text) < maxGroup; n++ {
		e, start := batch[n], len(text)
		e.record.Seq = last + 1
		if e.record.At.IsZero() {
			e.record.At = j.now()
		}
		e.record.At = e.record.At.UTC().Round(0)
		more, err := appendLine(text, &e.record, prev)
		if err != nil {
			e.err = err
			continue
		}
		if j.tip.file == nil || j.tip.size > 0 && j.tip.size+int64(len(more)) > j.maxFile {
			if start > 0 { // with the next write, into the next file
				break
			}
			if err := j.begin(last + 1); err != nil {
				return 0, err
			}
		}
		text = more
		last++
		prev = hashOf(text)
	}
	if len(text) == 0 { // none of them can be written
		return n, nil
	}
	written, err := j.tip.file.Write(text)
	whole := bytes.LastIndexByte(text[:written], '\n') + 1
	j.tip.size += int64(written)
	if written > whole && j.tip.file.Truncate(j.tip.size-int64(written-whole)) == nil {
		// A part of a line would be mended at the next attach; a full disk that has room again needs no record of it.
		j.tip.size -= int64(written - whole)
	}
	if whole > 0 {
		j.tip.last = Anchor{Seq: j.tip.last.Seq + uint64(bytes.Count(text[:whole], []byte{'\n'})), Hash: string(hashOf(text[:whole]))}
	}
	for _, e := range batch[:n] {
		e.written = e.err == nil && e.record.Seq <= j.tip.last.Seq
	}
	return n, err
}

// begin starts the file of the line seq; what was written to the one before is on the disk then.
func (j *Journal) begin(seq uint64) error {
	if j.tip.file != nil {
		if err := errors.Join(j.tip.file.Sync(), j.detach()); err != nil {
			return err
		}
	}
	name := fileName(seq)
	f, err := os.OpenFile(filepath.Join(j.dir, name), os.O_CREATE|os.O_EXCL|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	if err := j.hold(f, name); err != nil {
		return err
	}
	j.tip.size = 0
	return syncFile(j.dir)
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
