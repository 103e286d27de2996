package source

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	// progressEvery is the least time between two progress reports of the same phase.
	progressEvery = 250 * time.Millisecond
	// maxNotices bounds the notices of one fetch, and maxNoticeText each text in bytes: they travel in one message.
	maxNotices    = 100
	maxNoticeText = 2000
	// writeBuffer gathers the many small writes of an Arrow message.
	writeBuffer = 16 << 10
)

// Output encodes the batches of one fetch as an Arrow IPC stream with zstd (fastest level), and enforces the fetch's limits (SPEC D15). The
// stream has a schema even when there are no rows. It is used by one goroutine at a time.
type Output struct {
	limits     Limits
	onProgress func(phase runbusv1.Phase, msg string, rows, bytes int64)
	now        func() time.Duration // since any moment

	w       *bufio.Writer
	take    func(arrow.RecordBatch) error // instead of w
	schema  *arrow.Schema
	stream  *zstdStream
	counter byteCounter

	rows, bytes atomic.Int64 // written by one goroutine, read by any
	notices     []*runbusv1.Notice
	more        int   // notices over maxNotices
	err         error // sticky: ErrLimit, or what failed
	closed      bool

	phase    runbusv1.Phase
	message  string
	reported time.Duration
}

// NewOutput returns an Output that writes to w. onProgress may be nil; it is called on the goroutine that uses the Output,
// for each change of phase and else at most four times a second, and must not block for long. w gets each record batch in
// as few writes as possible, all of it before Write returns; where w blocks, Write blocks.
func NewOutput(w io.Writer, l Limits, onProgress func(phase runbusv1.Phase, msg string, rows, bytes int64)) *Output {
	o := &Output{}
	o.Open(w, l, onProgress)
	return o
}

// Open is NewOutput in memory of the caller's, an Output that was never used.
func (o *Output) Open(w io.Writer, l Limits, onProgress func(phase runbusv1.Phase, msg string, rows, bytes int64)) {
	if onProgress == nil {
		onProgress = unheard
	}
	o.limits, o.onProgress, o.now, o.w = l.Clamped(), onProgress, sinceStart, newWriter(w)
}

var start = time.Now()

// sinceStart is what the monotonic clock says alone: time.Now reads two.
func sinceStart() time.Duration { return time.Since(start) }

// unheard is the progress that nobody wants.
func unheard(runbusv1.Phase, string, int64, int64) {}

// writers keeps buffers of outputs that were closed.
var writers = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, writeBuffer) }}

func newWriter(w io.Writer) *bufio.Writer {
	b, ok := writers.Get().(*bufio.Writer)
	if !ok {
		b = bufio.NewWriterSize(nil, writeBuffer)
	}
	b.Reset(w)
	return b
}

// NewBatchOutput returns an Output that encodes nothing: it hands each batch to take, cut at the limits. The batch is the
// connector's again when take returns.
func NewBatchOutput(take func(arrow.RecordBatch) error, l Limits, onProgress func(phase runbusv1.Phase, msg string, rows, bytes int64)) *Output {
	o := NewOutput(io.Discard, l, onProgress)
	o.take = take
	return o
}

// Limits are the limits in force. A source that can limit on its own side asks for one row more than MaxRows, so that a cut
// is noticed.
func (o *Output) Limits() Limits { return o.limits }

// Phase reports where the fetch stands. Phases only go forward: an earlier one is ignored, the same one with another text is
// reported.
func (o *Output) Phase(p runbusv1.Phase, msg string) {
	if p < o.phase || p == o.phase && msg == o.message {
		return
	}
	o.phase, o.message = p, clip(msg, maxNoticeText)
	o.report()
}

func (o *Output) report() {
	o.reported = o.now()
	o.onProgress(o.phase, o.message, o.Rows(), o.Bytes())
}

// Start writes the schema. It must be called exactly once, before the first Write.
func (o *Output) Start(schema *arrow.Schema) error {
	switch {
	case o.err != nil:
		return o.err
	case o.closed:
		return o.fail(errors.New("source: start after close"))
	case o.schema != nil:
		return o.fail(errors.New("source: the output was started twice"))
	}
	o.schema = schema
	if o.take != nil {
		return nil
	}
	stream, err := newZstdStream(o.w)
	if err == nil {
		err = stream.begin(schema)
	}
	if err != nil {
		return o.fail(err)
	}
	o.stream = stream
	return nil
}

// Write appends a batch; the batch stays the caller's to release. Of a batch that does not fit the limits it takes the rows
// that do, adds the notice and returns ErrLimit, as does every later Write; an empty batch always fits. Any other error means
// that the result can't be delivered: the connector returns it.
func (o *Output) Write(batch arrow.RecordBatch) error {
	switch {
	case o.err != nil:
		return o.err
	case o.closed || o.schema == nil:
		return o.fail(errors.New("source: write outside of start and close"))
	}
	total := batch.NumRows()
	if total == 0 {
		return nil
	}
	rows, code := total, runbusv1.NoticeCode_NOTICE_CODE_UNSPECIFIED
	if left := o.limits.MaxRows - o.Rows(); rows > left {
		rows, code = left, runbusv1.NoticeCode_NOTICE_CODE_ROW_LIMIT
	}
	size := o.counter.size(batch, rows)
	if left := o.limits.MaxBytes - o.Bytes(); size > left {
		// The most rows that fit: size grows with the number of rows.
		rows = int64(sort.Search(int(rows), func(n int) bool { return o.counter.size(batch, int64(n)+1) > left }))
		size, code = o.counter.size(batch, rows), runbusv1.NoticeCode_NOTICE_CODE_BYTE_LIMIT
	}
	if rows > 0 {
		o.rows.Add(rows) // before they are written: who takes them off the writer may ask for the count
		o.bytes.Add(size)
		if err := o.encode(batch, rows); err != nil {
			return o.fail(err)
		}
		o.counter.sent(batch)
		if o.phase < runbusv1.Phase_PHASE_STREAMING {
			o.Phase(runbusv1.Phase_PHASE_STREAMING, "")
		} else if o.now()-o.reported >= progressEvery {
			o.report()
		}
	}
	if rows == total {
		return nil
	}
	if code == runbusv1.NoticeCode_NOTICE_CODE_ROW_LIMIT {
		o.Notice(code, fmt.Sprintf("the result was cut at %d rows: the source has more", o.Rows()))
	} else {
		o.Notice(code, fmt.Sprintf("the result was cut after %d rows at %d of at most %d Arrow bytes: the source has more", o.Rows(), o.Bytes(), o.limits.MaxBytes))
	}
	o.err = ErrLimit
	return o.err
}

// encode writes the first rows of batch.
func (o *Output) encode(batch arrow.RecordBatch, rows int64) error {
	if rows < batch.NumRows() {
		batch = batch.NewSlice(0, rows)
		defer batch.Release()
	}
	if o.take != nil {
		return o.take(batch)
	}
	if err := o.stream.batch(batch); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return o.w.Flush()
}

func (o *Output) fail(err error) error {
	o.err = err
	return err
}

// Notice adds something the caller must know about the result. The same notice twice is one; over 100 they are counted only.
func (o *Output) Notice(code runbusv1.NoticeCode, msg string) {
	msg = clip(msg, maxNoticeText)
	for _, n := range o.notices {
		if n.GetCode() == code && n.GetMessage() == msg {
			return
		}
	}
	if len(o.notices) >= maxNotices && code == runbusv1.NoticeCode_NOTICE_CODE_SOURCE {
		o.more++
		return
	}
	o.notices = append(o.notices, &runbusv1.Notice{Code: code, Message: msg})
}

// Close ends the stream after a fetch that went well, cut at a limit or not; from then on neither the writer nor onProgress is called,
// whoever keeps the Output. After one that failed it may be left out: nothing is held open. It returns what the stream failed with, if it did. A second Close does nothing.
func (o *Output) Close() error {
	if o.closed {
		return nil
	}
	o.closed = true
	if o.err != nil && !errors.Is(o.err, ErrLimit) {
		return o.err
	}
	if o.schema == nil {
		return schemas.Errorf(schemas.CodeFailed, "the connector ended without a schema")
	}
	if stream := o.stream; stream != nil {
		o.stream = nil
		if err := errors.Join(stream.end(), o.w.Flush()); err != nil {
			return o.fail(fmt.Errorf("end the result: %w", err))
		}
	}
	o.w.Reset(nil)
	writers.Put(o.w)
	o.w = nil // nothing is written after Close
	o.Phase(runbusv1.Phase_PHASE_DONE, "")
	o.onProgress = unheard
	return nil
}

// Rows is the number of rows written, with those being written now. It may be called from any goroutine.
func (o *Output) Rows() int64 { return o.rows.Load() }

// Bytes is the number of Arrow bytes of these rows, before compression. It may be called from any goroutine.
func (o *Output) Bytes() int64 { return o.bytes.Load() }

// Notices are the notices so far.
func (o *Output) Notices() []*runbusv1.Notice {
	if o.more == 0 {
		return o.notices
	}
	last := &runbusv1.Notice{Code: runbusv1.NoticeCode_NOTICE_CODE_SOURCE, Message: fmt.Sprintf("%d more notices were left out", o.more)}
	return append(o.notices[:len(o.notices):len(o.notices)], last)
}
