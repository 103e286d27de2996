package journal

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
)

// Break is the first place where a journal does not hold together.
type Break struct {
	File string `json:"file"`
	Line int    `json:"line"` // of File, from 1; 0 when it is about the file itself
	Seq  uint64 `json:"seq"`  // of the record that should stand there
	What string `json:"what"`
}

// String is `file:line: record n: what`.
func (b Break) String() string {
	if b.Line == 0 {
		return fmt.Sprintf("%s: record %d: %s", b.File, b.Seq, b.What)
	}
	return fmt.Sprintf("%s:%d: record %d: %s", b.File, b.Line, b.Seq, b.What)
}

// Report is what Verify found.
type Report struct {
	OK      bool   `json:"ok"`
	Records uint64 `json:"records"` // that hold together, from the first
	Files   int    `json:"files"`
	// Last is the last of these records: keep it elsewhere, and a later Verify can be asked whether it is still there.
	Last      Anchor `json:"last"`
	Recovered int    `json:"recovered"` // unfinished lines that were taken out after a crash
	// Unfinished is true when the last line has no end: a crash, or a runner that is writing it; the next append mends it.
	Unfinished bool   `json:"unfinished"`
	Break      *Break `json:"break,omitempty"`
}

// VerifyOptions are what is known of a journal from elsewhere. Zero values are not asked for.
type VerifyOptions struct {
	// After is the last record of files that were moved away: the journal must go on from it.
	After Anchor
	// Expect must be one of the records.
	Expect Anchor
}

// Verify reads a whole journal and tells whether every line is as it was written, in order, with none missing, put in, or cut off. The
// error is about reading; a journal that is damaged is a Report with a Break. A runner may write meanwhile: what it adds is left
// out.
func Verify(dir string, o VerifyOptions) (Report, error) {
	s, err := snap(dir)
	if err != nil {
		return Report{}, err
	}
	return verify(context.Background(), dir, s, o)
}

// Check is Verify of what is there: files before the first one are taken to have been moved away. It ends with ctx, and its error.
func Check(ctx context.Context, dir string) (Report, error) {
	s, err := snap(dir)
	if err != nil {
		return Report{}, err
	}
	o := VerifyOptions{}
	if len(s.files) > 0 {
		if o.After, err = before(dir, s.files[0]); err != nil {
			return Report{}, err
		}
	}
	return verify(ctx, dir, s, o)
}

// before is the record that the first one of a file says it follows; zero if it is the very first, or can't be read.
func before(dir string, f sized) (a Anchor, err error) {
	_, err = lines(dir, f, func(_ int, line []byte) error {
		if r, _, err := decode(line); err == nil && r.Seq > 1 && r.Seq == firstOf(f.name) {
			a = Anchor{Seq: r.Seq - 1, Hash: r.Prev}
		}
		return errBroken // one is enough
	})
	if errors.Is(err, errBroken) {
		err = nil
	}
	return a, err
}

func verify(ctx context.Context, dir string, s snapshot, o VerifyOptions) (Report, error) {
	v := &verifier{ctx: ctx, o: o, head: s.head, prev: Anchor{Hash: zeroHash}}
	if o.After.Seq > 0 {
		v.prev = o.After
	}
	v.report.Files = len(s.files)
	for i, f := range s.files {
		if err := v.file(dir, f, i == len(s.files)-1); err != nil {
			return Report{}, err
		}
		if v.report.Break != nil {
			break
		}
	}
	v.end(s)
	v.report.OK = v.report.Break == nil
	return v.report, nil
}

// List calls fn for each record that can be read, in order, without checking the chain: that is Verify's. It stops at fn's error.
func List(dir string, fn func(Record, Anchor) error) error {
	s, err := snap(dir)
	if err != nil {
		return err
	}
	for _, f := range s.files {
		_, err := lines(dir, f, func(_ int, line []byte) error {
			if r, hash, err := decode(line); err == nil { // else Verify tells
				return fn(r, Anchor{Seq: r.Seq, Hash: hash})
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// snapshot is a journal between two appends.
type snapshot struct {
	files []sized
	head  Anchor
	there bool // a head
	bad   error
}

type sized struct {
	name string
	size int64
}

func snap(dir string) (snapshot, error) {
	var s snapshot
	lock, err := os.Open(filepath.Join(dir, "lock"))
	switch {
	case errors.Is(err, os.ErrNotExist): // a copy, perhaps
		if _, err := os.Stat(dir); err != nil {
			return s, err
		}
	case err != nil:
		return s, err
	default:
		defer lock.Close()
		if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_SH); err != nil {
			return s, fmt.Errorf("lock: %w", err)
		}
	}
	names, err := files(dir)
	if err != nil {
		return s, err
	}
	for _, name := range names {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			return s, err
		}
		s.files = append(s.files, sized{name, info.Size()})
	}
	s.head, s.there, s.bad = readHead(dir)
	var path *os.PathError
	if errors.As(s.bad, &path) {
		return s, s.bad
	}
	return s, nil
}

// lines calls fn for each whole line of a file, numbered from 1, and returns what stands behind the last one. fn's error ends it.
func lines(dir string, f sized, fn func(number int, line []byte) error) (rest []byte, err error) {
	file, err := os.Open(filepath.Join(dir, f.name))
	if err != nil {
		return nil, err
	}
	defer file.Close()
	in := bufio.NewReaderSize(io.LimitReader(file, f.size), maxLine)
	for number := 1; ; number++ {
		line, err := in.ReadSlice('\n')
		switch {
		case errors.Is(err, io.EOF):
			return bytes.Clone(line), nil
		case errors.Is(err, bufio.ErrBufferFull):
			line = bytes.Clone(line)
			for errors.Is(err, bufio.ErrBufferFull) { // skip what can't be a line of ours
				_, err = in.ReadSlice('\n')
			}
			if err != nil && !errors.Is(err, io.EOF) {
				return nil, err
			}
		case err != nil:
			return nil, err
		default:
			line = line[:len(line)-1]
		}
		if err := fn(number, line); err != nil {
			return nil, err
		}
	}
}

type verifier struct {
	ctx      context.Context //nolint:containedctx // it lives as long as one call
	o        VerifyOptions
	head     Anchor // of the folder
	prev     Anchor // the record before
	expected bool   // o.Expect was seen
	report   Report
}

var errBroken = errors.New("broken")

func (v *verifier) fail(file string, line int, format string, args ...any) error {
	v.report.Break = &Break{File: file, Line: line, Seq: v.prev.Seq + 1, What: fmt.Sprintf(format, args...)}
	return errBroken
}

func (v *verifier) file(dir string, f sized, last bool) error {
	if first := firstOf(f.name); first != v.prev.Seq+1 && v.report.Records == 0 {
		_ = v.fail(f.name, 0, "the journal begins with record %d: the files before it are missing (if they were moved away, name the last record of them: --after)", first)
		return nil
	} else if first != v.prev.Seq+1 {
		_ = v.fail(f.name, 0, "its name says that it begins with record %d", first)
		return nil
	}
	rest, err := lines(dir, f, func(number int, line []byte) error { return v.line(f.name, number, line) })
	switch {
	case errors.Is(err, errBroken):
		return nil
	case err != nil:
		return err
	case len(rest) > 0 && !last:
		_ = v.fail(f.name, 0, "its last line has no end, and another file follows: it was cut off or changed")
	case len(rest) > 0:
		v.report.Unfinished = true
	case f.size == 0 && !last:
		_ = v.fail(f.name, 0, "it is empty, and another file follows")
	}
	return nil
}

func (v *verifier) line(file string, number int, line []byte) error {
	if err := v.ctx.Err(); err != nil {
		return err
	}
	r, hash, err := decode(line)
	switch {
	case err != nil:
		return v.fail(file, number, "%v", err)
	case r.Seq > v.prev.Seq+1:
		return v.fail(file, number, "record %d stands here: %d before it were removed", r.Seq, r.Seq-v.prev.Seq-1)
	case r.Seq <= v.prev.Seq:
		return v.fail(file, number, "record %d stands here a second time, or out of order: it was put in", r.Seq)
	case r.Prev != v.prev.Hash:
		return v.fail(file, number, "it does not follow from the record before: one of the two was replaced")
	}
	if r.Seq == v.head.Seq && hash != v.head.Hash {
		return v.fail(file, number, "it is not the record that the file %s names: it was replaced", headFile)
	}
	v.prev = Anchor{Seq: r.Seq, Hash: hash}
	v.report.Records++
	v.report.Last = v.prev
	if r.Event == EventRecovered {
		v.report.Recovered++
	}
	if r.Seq == v.o.Expect.Seq {
		if hash != v.o.Expect.Hash {
			return v.fail(file, number, "record %d is not the one that was expected: the journal was made anew", r.Seq)
		}
		v.expected = true
	}
	return nil
}

// end checks what stands beside the lines.
func (v *verifier) end(s snapshot) {
	if v.report.Break != nil {
		return
	}
	switch {
	case s.bad != nil:
		_ = v.fail(headFile, 0, "%v: whether the end was cut off can't be told", s.bad)
	case !s.there:
		_ = v.fail(headFile, 0, "the file is missing: whether the end was cut off can't be told")
	case s.head.Seq > v.prev.Seq:
		_ = v.fail(headFile, 0, "the end was cut off: records up to %d were written", s.head.Seq)
	case v.o.Expect.Seq > 0 && !v.expected:
		_ = v.fail(headFile, 0, "record %d was expected and is not there", v.o.Expect.Seq)
	}
}
