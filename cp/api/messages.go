package api

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// A result is foreign bytes, and arrow's decoder allocates what lengths in them say: a damaged one would be more memory than
// there is, which no recover survives. These bound what one stream may ask for, far above what a runner sends.
const (
	maxMetadata = 16 << 20  // bytes of one message's metadata
	maxLive     = 256 << 20 // bytes of bodies and columns at a time
	maxFields   = 100_000   // columns and their children
	maxDepth    = 64        // of nested columns
	maxRows     = 10_000_000
)

const continuation = 0xffffffff

// The kinds of a message's header.
const (
	headerSchema     = 1
	headerDictionary = 2
	headerBatch      = 3
)

// messages reads the messages of an Arrow IPC stream, each checked before arrow looks at it: an ipc.MessageReader.
type messages struct {
	r    io.Reader
	mem  memory.Allocator
	last *ipc.Message
	refs atomic.Int64
}

func newMessages(r io.Reader, mem memory.Allocator) *messages {
	m := &messages{r: r, mem: mem}
	m.refs.Store(1)
	return m
}

func (m *messages) Retain() { m.refs.Add(1) }

func (m *messages) Release() {
	if m.refs.Add(-1) == 0 && m.last != nil {
		m.last.Release()
		m.last = nil
	}
}

// Message is the next one; io.EOF after the last. It is valid until the next call.
func (m *messages) Message() (*ipc.Message, error) {
	size, err := m.length()
	if err != nil {
		return nil, err
	}
	if size == continuation {
		size, err = m.length()
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return nil, err
		}
	}
	switch {
	case size == 0:
		return nil, io.EOF
	case size > maxMetadata:
		return nil, fmt.Errorf("metadata of %d bytes, over %d", size, maxMetadata)
	}
	meta := make([]byte, size)
	if err := m.fill(meta); err != nil {
		return nil, err
	}
	checked := &verifier{b: meta}
	length := checked.message()
	if checked.err != nil {
		return nil, checked.err
	}
	body := memory.NewResizableBuffer(m.mem)
	defer body.Release()
	body.Resize(int(length))
	if err := m.fill(body.Bytes()); err != nil {
		return nil, err
	}
	if err := checked.checkWindows(body.Bytes()); err != nil {
		return nil, err
	}
	if m.last != nil {
		m.last.Release()
	}
	m.last = ipc.NewMessage(memory.NewBufferBytes(meta), body)
	return m.last, nil
}

// length reads four bytes; io.EOF if there are none.
func (m *messages) length() (uint32, error) {
	var b [4]byte
	_, err := io.ReadFull(m.r, b[:])
	return binary.LittleEndian.Uint32(b[:]), err
}

func (m *messages) fill(b []byte) error {
	_, err := io.ReadFull(m.r, b)
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// bounded is an allocator that has maxLive bytes. A request over it is a panic: decodeRows makes an error of it.
type bounded struct {
	memory.Allocator
	live int
}

// Allocate implements memory.Allocator.
func (b *bounded) Allocate(size int) []byte {
	b.take(size)
	return b.Allocator.Allocate(size)
}

// Reallocate implements memory.Allocator.
func (b *bounded) Reallocate(size int, old []byte) []byte {
	b.take(size - cap(old))
	return b.Allocator.Reallocate(size, old)
}

// Free implements memory.Allocator.
func (b *bounded) Free(old []byte) {
	b.live -= cap(old)
	b.Allocator.Free(old)
}

func (b *bounded) take(size int) {
	if size > maxLive-b.live {
		panic(fmt.Errorf("more than %d bytes in memory at a time", maxLive))
	}
	b.live += size
}

// message checks the lengths in a message's metadata (a flatbuffer) and returns the length of its body. What it doesn't look at
// can't make the decoder allocate: at worst it panics.
func (v *verifier) message() (body int64) {
	message := v.table(v.ref(0))
	header := message.ref(2)
	switch message.byte(1) {
	case headerSchema:
		schema := v.table(header)
		for _, field := range schema.refs(1) {
			v.field(field, 0)
		}
		v.keyValues(schema, 2)
		schema.vector(3, 8)
	case headerDictionary:
		v.batch(v.table(header).ref(1))
	case headerBatch:
		v.batch(header)
	default:
		v.fail("a message of an unknown kind")
	}
	v.keyValues(message, 4)
	body = message.int64(3)
	if body < 0 || body > maxLive {
		v.fail("a body of %d bytes", body)
	}
	return body
}

// verifier reads a flatbuffer that may be anything. The first fault stays; after it everything is empty.
type verifier struct {
	b      []byte
	fields int
	err    error

	buffers, packed int // where those of a compressed batch are told, and how many there are
}

func (v *verifier) fail(format string, args ...any) {
	if v.err == nil {
		v.err = fmt.Errorf("metadata: "+format, args...)
	}
}

// at reports whether n bytes are there at pos.
func (v *verifier) at(pos, n int) bool {
	if v.err == nil && (pos < 0 || n < 0 || n > len(v.b)-pos) {
		v.fail("%d bytes at %d of %d", n, pos, len(v.b))
	}
	return v.err == nil
}

// ref follows the offset at pos.
func (v *verifier) ref(pos int) int {
	if !v.at(pos, 4) {
		return 0
	}
	return pos + int(binary.LittleEndian.Uint32(v.b[pos:]))
}

func (v *verifier) field(pos, depth int) {
	if v.fields++; v.fields > maxFields || depth > maxDepth {
		v.fail("more than %d fields, or %d levels", maxFields, maxDepth)
	}
	f := v.table(pos)
	f.vector(0, 1)
	if kind := f.ref(3); kind != 0 && f.byte(2) == typeUnion {
		v.table(kind).vector(1, 4)
	}
	for _, child := range f.refs(5) {
		v.field(child, depth+1)
	}
	v.keyValues(f, 6)
}

const typeUnion = 14

func (v *verifier) batch(pos int) {
	t := v.table(pos)
	if rows := t.int64(0); rows < 0 || rows > maxRows {
		v.fail("a batch of %d rows", rows)
	}
	t.vector(1, 16)
	at, buffers := t.vector(2, 16)
	if compression := t.ref(3); compression != 0 {
		if codec := v.table(compression).byte(0); codec != codecZstd {
			v.fail("a batch compressed with codec %d: a runner's are in Zstandard", codec)
		}
		v.buffers, v.packed = at, buffers
	}
	counts, n := t.vector(4, 8)
	for i := range n {
		if c := binary.LittleEndian.Uint64(v.b[counts+8*i:]); c > uint64(buffers) { // arrow makes room for as many
			v.fail("a column of %d buffers", c)
		}
	}
}

func (v *verifier) keyValues(t table, slot int) {
	for _, pos := range t.refs(slot) {
		pair := v.table(pos)
		pair.vector(0, 1)
		pair.vector(1, 1)
	}
}

// table is one table of the flatbuffer.
type table struct {
	*verifier
	pos, vtable, slots int
}

func (v *verifier) table(pos int) table {
	t := table{verifier: v, pos: pos}
	if !v.at(pos, 4) {
		return t
	}
	t.vtable = pos - int(int32(binary.LittleEndian.Uint32(v.b[pos:]))) // it is signed
	if !v.at(t.vtable, 4) {
		return t
	}
	size := int(binary.LittleEndian.Uint16(v.b[t.vtable:]))
	if size < 4 || size%2 != 0 { // arrow reads a slot of which only the first byte belongs to it
		v.fail("a table with a table of contents of %d bytes", size)
	}
	if v.at(t.vtable, size) {
		t.slots = (size - 4) / 2
	}
	return t
}

// slot is where the value of a field is, of n bytes; 0 if the table has none.
func (t table) slot(i, n int) int {
	if t.err != nil || i >= t.slots {
		return 0
	}
	offset := int(binary.LittleEndian.Uint16(t.b[t.vtable+4+2*i:]))
	if offset == 0 || !t.at(t.pos+offset, n) {
		return 0
	}
	return t.pos + offset
}

func (t table) byte(i int) byte {
	if p := t.slot(i, 1); p != 0 {
		return t.b[p]
	}
	return 0
}

func (t table) int64(i int) int64 {
	if p := t.slot(i, 8); p != 0 {
		return int64(binary.LittleEndian.Uint64(t.b[p:])) // it is signed
	}
	return 0
}

// ref is where a table begins; 0 if there is none.
func (t table) ref(i int) int {
	if p := t.slot(i, 4); p != 0 {
		return t.verifier.ref(p)
	}
	return 0
}

// vector is where the elements of a vector, or the bytes of a string, begin, and how many there are.
func (t table) vector(i, size int) (pos, n int) {
	p := t.ref(i)
	if p == 0 || !t.at(p, 4) {
		return 0, 0
	}
	n = int(binary.LittleEndian.Uint32(t.b[p:]))
	if !t.at(p+4, n*size) {
		return 0, 0
	}
	return p + 4, n
}

// refs are the tables of a vector.
func (t table) refs(i int) []int {
	pos, n := t.vector(i, 4)
	all := make([]int, n)
	for i := range all {
		all[i] = t.verifier.ref(pos + 4*i)
	}
	return all
}
