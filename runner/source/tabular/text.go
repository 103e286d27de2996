package tabular

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/org-runink/runbus/schemas"
)

const readBuffer = 64 << 10

// lines reads a text line by line, with a bound on the line.
type lines struct {
	r    *bufio.Reader
	most int
	long []byte
	no   int64 // of the line that was read last
}

var errLong = errors.New("tabular: line too long")

// newLines drops a byte order mark and refuses UTF-16 and UTF-32.
func newLines(r io.Reader, most int) (*lines, error) {
	b := bufio.NewReaderSize(r, readBuffer)
	if err := dropMark(b); err != nil {
		return nil, err
	}
	return &lines{r: b, most: most}, nil
}

func dropMark(b *bufio.Reader) error {
	head, _ := b.Peek(3) // a shorter text has no mark; its error comes with the next read
	switch {
	case bytes.HasPrefix(head, []byte("\xef\xbb\xbf")):
		_, _ = b.Discard(3) // it was peeked
	case bytes.HasPrefix(head, []byte("\xff\xfe")), bytes.HasPrefix(head, []byte("\xfe\xff")):
		return errors.New("the text is UTF-16, not UTF-8")
	}
	return nil
}

// next is the next line with its end; it is valid until the next call. The last line may have no end. io.EOF: no more.
func (l *lines) next() ([]byte, error) {
	line, err := l.r.ReadSlice('\n')
	if err != io.EOF || len(line) > 0 {
		l.no++
	}
	if err == bufio.ErrBufferFull {
		l.long = append(l.long[:0], line...)
		for err == bufio.ErrBufferFull {
			if len(l.long) > l.most {
				return nil, errLong
			}
			line, err = l.r.ReadSlice('\n')
			l.long = append(l.long, line...)
		}
		line = l.long
	}
	if err != nil && (err != io.EOF || len(line) == 0) {
		return nil, err
	}
	if len(line) > l.most {
		return nil, errLong
	}
	return line, nil
}

// fault is an error of the text at a line. Errors of reading stay what they are.
func (t *Table) fault(line int64, format string, args ...any) error {
	return schemas.Errorf(schemas.CodeSource, "%s, %s %d: %s", t.part, t.unit, line, fmt.Sprintf(format, args...))
}

// trimEnd removes LF or CRLF.
func trimEnd(line []byte) []byte {
	if n := len(line); n > 0 && line[n-1] == '\n' {
		line = line[:n-1]
		if n > 1 && line[n-2] == '\r' {
			line = line[:n-2]
		}
	}
	return line
}

// badUTF8 is where s stops being UTF-8, −1 if it never does.
func badUTF8(s []byte) int {
	if utf8.Valid(s) {
		return -1
	}
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRune(s[i:])
		if r == utf8.RuneError && n == 1 {
			return i
		}
		i += n
	}
	return -1
}
