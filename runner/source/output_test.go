package source

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// checked is an allocator that fails the test when something is not released.
func checked(t *testing.T) *memory.CheckedAllocator {
	mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
	t.Cleanup(func() { mem.AssertSize(t, 0) })
	return mem
}

var pairSchema = arrow.NewSchema([]arrow.Field{
	{Name: "n", Type: arrow.PrimitiveTypes.Int64},
	{Name: "s", Type: arrow.BinaryTypes.String, Nullable: true},
}, nil)

// pairs is a batch of rows from, from+1, …: 8 bytes of number and 4 of offset each, as many bytes of text as said, one more offset.
func pairs(mem memory.Allocator, from, rows, text int) arrow.RecordBatch {
	b := array.NewRecordBuilder(mem, pairSchema)
	defer b.Release()
	for i := range rows {
		b.Field(0).(*array.Int64Builder).Append(int64(from + i))
		b.Field(1).(*array.StringBuilder).Append(strings.Repeat("x", text))
	}
	return b.NewRecordBatch()
}

func write(t *testing.T, o *Output, batch arrow.RecordBatch) error {
	t.Helper()
	defer batch.Release()
	return o.Write(batch)
}

// decode reads a whole stream back: its schema and the numbers of its first column.
func decode(t *testing.T, stream []byte) (*arrow.Schema, []int64) {
	t.Helper()
	mem := checked(t)
	r, err := ipc.NewReader(bytes.NewReader(stream), ipc.WithAllocator(mem))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	var numbers []int64
	for r.Next() {
		numbers = append(numbers, r.RecordBatch().Column(0).(*array.Int64).Int64Values()...)
	}
	if err := r.Err(); err != nil {
		t.Fatal(err)
	}
	return r.Schema(), numbers
}

func TestOutputRoundTrip(t *testing.T) {
	mem := checked(t)
	var w bytes.Buffer
	o := NewOutput(&w, Limits{}, nil)
	if o.Limits() != (Limits{DefaultMaxRows, DefaultMaxBytes}) {
		t.Errorf("%+v", o.Limits())
	}
	if err := o.Start(pairSchema); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		if err := write(t, o, pairs(mem, i*10, 10, 5)); err != nil {
			t.Fatal(err)
		}
		if w.Len() == 0 {
			t.Error("the batch is not with the writer yet")
		}
	}
	if err := errors.Join(o.Close(), o.Close()); err != nil {
		t.Fatal(err)
	}
	schema, numbers := decode(t, w.Bytes())
	if !schema.Equal(pairSchema) || len(numbers) != 30 || numbers[29] != 29 {
		t.Errorf("%s %v", schema, numbers)
	}
	if want := int64(3 * (10*8 + 11*4 + 10*5)); o.Rows() != 30 || o.Bytes() != want || len(o.Notices()) != 0 {
		t.Errorf("%d rows, %d bytes, want %d; %v", o.Rows(), o.Bytes(), want, o.Notices())
	}
	if err := write(t, o, pairs(mem, 0, 1, 1)); err == nil {
		t.Error("a write after close is accepted")
	}
}

func TestOutputWithoutRows(t *testing.T) {
	var w bytes.Buffer
	o := NewOutput(&w, Limits{}, nil)
	if err := errors.Join(o.Start(pairSchema), o.Close()); err != nil {
		t.Fatal(err)
	}
	if schema, numbers := decode(t, w.Bytes()); !schema.Equal(pairSchema) || len(numbers) != 0 {
		t.Errorf("%s %v", schema, numbers)
	}
}

func TestOutputRowLimit(t *testing.T) {
	for _, c := range []struct {
		batches []int
		cut     bool
	}{
		{[]int{10, 15, 1}, true}, {[]int{26}, true}, {[]int{25, 0}, false}, {[]int{25, 0, 1}, true}, {[]int{25}, false}, {[]int{1000}, true},
	} {
		mem := checked(t)
		var w bytes.Buffer
		o := NewOutput(&w, Limits{MaxRows: 25}, nil)
		if err := o.Start(pairSchema); err != nil {
			t.Fatal(err)
		}
		var err error
		from := 0
		for _, n := range c.batches {
			err = write(t, o, pairs(mem, from, n, 3))
			from += n
		}
		if errors.Is(err, ErrLimit) != c.cut || !c.cut && err != nil {
			t.Errorf("%v: %v", c.batches, err)
		}
		if c.cut {
			if again := write(t, o, pairs(mem, 0, 1, 1)); !errors.Is(again, ErrLimit) {
				t.Errorf("a write after the limit: %v", again)
			}
		}
		if err := o.Close(); err != nil {
			t.Fatal(err)
		}
		if _, numbers := decode(t, w.Bytes()); len(numbers) != 25 || numbers[24] != 24 || o.Rows() != 25 {
			t.Errorf("%v: %v", c.batches, numbers)
		}
		checkNotice(t, o, c.cut, runbusv1.NoticeCode_NOTICE_CODE_ROW_LIMIT)
	}
}

func TestOutputByteLimit(t *testing.T) {
	// n rows of 100 bytes of text need n*8 + (n+1)*4 + n*100 bytes.
	for _, c := range []struct {
		limit    int64
		batch, n int
		rows     int64
	}{
		{4 + 112*7, 100, 1, 7}, {4 + 112*7 - 1, 100, 1, 6}, {4 + 112*100, 100, 1, 100}, {2*(4+112*10) + 50, 10, 3, 20}, {1, 10, 1, 0},
	} {
		mem := checked(t)
		var w bytes.Buffer
		o := NewOutput(&w, Limits{MaxBytes: c.limit}, nil)
		if err := o.Start(pairSchema); err != nil {
			t.Fatal(err)
		}
		var err error
		for i := range c.n {
			err = write(t, o, pairs(mem, i*c.batch, c.batch, 100))
		}
		cut := c.rows < int64(c.n*c.batch)
		if errors.Is(err, ErrLimit) != cut || !cut && err != nil {
			t.Errorf("%+v: %v", c, err)
		}
		if err := o.Close(); err != nil {
			t.Fatal(err)
		}
		if _, numbers := decode(t, w.Bytes()); int64(len(numbers)) != c.rows || o.Rows() != c.rows || o.Bytes() > c.limit {
			t.Errorf("%+v: %d rows, %d bytes", c, len(numbers), o.Bytes())
		}
		checkNotice(t, o, cut, runbusv1.NoticeCode_NOTICE_CODE_BYTE_LIMIT)
	}
}

func checkNotice(t *testing.T, o *Output, want bool, code runbusv1.NoticeCode) {
	t.Helper()
	if got := o.Notices(); want && (len(got) != 1 || got[0].GetCode() != code) || !want && len(got) != 0 {
		t.Errorf("notices: %v", got)
	}
}

// TestOutputCountsSlices: a slice costs what its own rows need, not what the buffers under it hold.
func TestOutputCountsSlices(t *testing.T) {
	mem := checked(t)
	whole := pairs(mem, 0, 1000, 50)
	defer whole.Release()
	o := NewOutput(io.Discard, Limits{}, nil)
	if err := o.Start(pairSchema); err != nil {
		t.Fatal(err)
	}
	if err := write(t, o, whole.NewSlice(500, 510)); err != nil {
		t.Fatal(err)
	}
	if want := int64(10*8 + 11*4 + 10*50); o.Bytes() != want {
		t.Errorf("%d bytes, want %d", o.Bytes(), want)
	}
}

func TestOutputProgress(t *testing.T) {
	mem := checked(t)
	var seen []string
	o := NewOutput(io.Discard, Limits{}, func(p runbusv1.Phase, msg string, rows, _ int64) {
		seen = append(seen, fmt.Sprintf("%s %q %d", strings.TrimPrefix(p.String(), "PHASE_"), msg, rows))
	})
	now := time.Duration(0)
	o.now = func() time.Duration { return now }
	o.Phase(runbusv1.Phase_PHASE_CONNECTING, "to db")
	o.Phase(runbusv1.Phase_PHASE_QUERYING, "")
	o.Phase(runbusv1.Phase_PHASE_CONNECTING, "back") // ignored
	o.Phase(runbusv1.Phase_PHASE_QUERYING, "")       // nothing new
	if err := o.Start(pairSchema); err != nil {
		t.Fatal(err)
	}
	for range 20 { // 100 ms apart: every third is reported
		if err := write(t, o, pairs(mem, 0, 1, 1)); err != nil {
			t.Fatal(err)
		}
		now += 100 * time.Millisecond
	}
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	want := []string{`CONNECTING "to db" 0`, `QUERYING "" 0`, `STREAMING "" 1`, `STREAMING "" 4`, `STREAMING "" 7`, `STREAMING "" 10`, `STREAMING "" 13`, `STREAMING "" 16`, `STREAMING "" 19`, `DONE "" 20`}
	if strings.Join(seen, "\n") != strings.Join(want, "\n") {
		t.Errorf("%s", strings.Join(seen, "\n"))
	}
}

func TestOutputNotices(t *testing.T) {
	o := NewOutput(io.Discard, Limits{}, nil)
	for i := range maxNotices + 20 {
		o.Notice(runbusv1.NoticeCode_NOTICE_CODE_SOURCE, strconv.Itoa(i))
		o.Notice(runbusv1.NoticeCode_NOTICE_CODE_SOURCE, strconv.Itoa(i))
	}
	o.Notice(runbusv1.NoticeCode_NOTICE_CODE_ROW_LIMIT, "never left out")
	got := o.Notices()
	if len(got) != maxNotices+2 || got[maxNotices].GetMessage() != "never left out" || !strings.Contains(got[maxNotices+1].GetMessage(), "more notices") {
		t.Errorf("%d notices: %v", len(got), got[len(got)-2:])
	}
	o = NewOutput(io.Discard, Limits{}, nil)
	o.Notice(runbusv1.NoticeCode_NOTICE_CODE_SOURCE, "\xff"+strings.Repeat("é", maxNoticeText))
	if msg := o.Notices()[0].GetMessage(); !utf8.ValidString(msg) || len(msg) > maxNoticeText+40 {
		t.Errorf("%q", msg)
	}
	if _, err := proto.Marshal(o.Notices()[0]); err != nil {
		t.Error(err)
	}
}

type brokenWriter struct{ after int }

var errBroken = errors.New("the caller has gone")

func (w *brokenWriter) Write(p []byte) (int, error) {
	if w.after -= len(p); w.after < 0 {
		return 0, errBroken
	}
	return len(p), nil
}

func TestOutputFails(t *testing.T) {
	mem := checked(t)
	o := NewOutput(&brokenWriter{after: 1000}, Limits{}, nil)
	if err := o.Start(pairSchema); err != nil {
		t.Fatal(err)
	}
	var err error
	for range 10_000 {
		if err = write(t, o, pairs(mem, 0, 100, 20)); err != nil {
			break
		}
	}
	if !errors.Is(err, errBroken) || !errors.Is(write(t, o, pairs(mem, 0, 1, 1)), errBroken) || !errors.Is(o.Close(), errBroken) {
		t.Errorf("%v", err)
	}
	if err := NewOutput(io.Discard, Limits{}, nil).Close(); schemas.CodeOf(err) != schemas.CodeFailed || !strings.Contains(err.Error(), "schema") {
		t.Errorf("no schema: %v", err)
	}
	if err := write(t, NewOutput(io.Discard, Limits{}, nil), pairs(mem, 0, 1, 1)); err == nil {
		t.Error("a write before start is accepted")
	}
	o = NewOutput(io.Discard, Limits{}, nil)
	if err := o.Start(pairSchema); err != nil {
		t.Fatal(err)
	}
	if err := o.Start(pairSchema); err == nil {
		t.Error("a second start is accepted")
	}
	o = NewOutput(io.Discard, Limits{}, nil)
	if err := o.Start(arrow.NewSchema(nil, nil)); err != nil {
		t.Fatal(err)
	}
	if err := write(t, o, pairs(mem, 0, 1, 1)); err == nil {
		t.Error("a batch of another schema is accepted")
	}
}
