package api

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/cp/dispatch"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// metadata is that of the n-th message of a stream, in the memory of the stream.
func metadata(t testing.TB, stream []byte, n int) []byte {
	t.Helper()
	for {
		size := int(binary.LittleEndian.Uint32(stream[4:]))
		meta := stream[8 : 8+size]
		if n == 0 {
			return meta
		}
		v := &verifier{b: meta}
		body := v.message()
		if v.err != nil {
			t.Fatal(v.err)
		}
		stream, n = stream[8+size+int(body):], n-1
	}
}

// header is the table that the metadata of a message is about.
func header(meta []byte) table {
	v := &verifier{b: meta}
	return v.table(v.table(v.ref(0)).ref(2))
}

func decoded(b []byte) error {
	rec := httptest.NewRecorder()
	return decodeRows(bytes.NewReader(b), &ndjsonRows{lines: &lineWriter{w: rec, control: http.NewResponseController(rec)}})
}

// What arrow reads of a message, and would follow or allocate beyond all bounds, is looked at before: each of these ended the process.
func TestMetadataThatLies(t *testing.T) {
	list := arrow.Field{Name: "v", Type: arrow.ListOf(arrow.PrimitiveTypes.Int64)}
	lists := column(t, list.Type, func(b array.Builder) { b.AppendEmptyValue() })
	defer lists.Release()
	view := arrow.Field{Name: "v", Type: arrow.BinaryTypes.StringView}
	views := column(t, view.Type, func(b array.Builder) {
		b.(*array.StringViewBuilder).Append("longer than twelve bytes")
	})
	defer views.Release()

	// A column that is its own child, by an offset that wraps, in a table that seems to end before it: its size is odd.
	endless := one(t, list, lists)
	schema := header(metadata(t, endless, 0))
	column := schema.refs(1)[0]
	at, _ := schema.table(column).vector(5, 4)
	binary.LittleEndian.PutUint32(schema.b[at:], uint32(column-at))
	binary.LittleEndian.PutUint16(schema.b[schema.vtable:], 4+2*2-1)

	many := one(t, view, views)
	batch := header(metadata(t, many, 1))
	at, n := batch.vector(4, 8)
	if n != 1 {
		t.Fatalf("%d counts of buffers", n)
	}
	binary.LittleEndian.PutUint64(batch.b[at:], 1<<40)

	for name, c := range map[string]struct {
		stream []byte
		want   string
	}{
		"a column that is its own child": {endless, "contents of 7 bytes"},
		"a trillion buffers":             {many, "a column of 1099511627776 buffers"},
	} {
		if err := decoded(c.stream); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A time that is none costs a runner's fetch nothing: it ended as cancelled, since its progress could not be told.
func TestProgressAtNoTime(t *testing.T) {
	rec := httptest.NewRecorder()
	n := newNDJSONAnswer(rec, http.NewResponseController(rec))
	if err := n.Accepted(dispatch.Accepted{}); err != nil {
		t.Fatal(err)
	}
	for _, at := range []*timestamppb.Timestamp{nil, {Seconds: math.MaxInt64}, {Seconds: math.MinInt64}, {Nanos: -1}} {
		if err := n.Progress(&runbusv1.RunFetchUpdate{At: at, Rows: 7}); err != nil {
			t.Errorf("%v: %v", at, err)
		}
	}
	if got := strings.Count(rec.Body.String(), `"rows":7`); got != 4 {
		t.Errorf("%d lines of progress", got)
	}
}

// A runner may send as many notices as fit into a message of the bus. To try which of them a trailer holds took hours.
func TestNoticesWithoutEnd(t *testing.T) {
	notices := make([]*runbusv1.Notice, 500_000)
	for i := range notices {
		notices[i] = &runbusv1.Notice{}
	}
	for _, n := range []int{1, mostNoticed, len(notices)} {
		text, err := noticesTrailer(notices[:n])
		var shown []noticeLine
		if err != nil || len(text) > maxTrailer || json.Unmarshal([]byte(text), &shown) != nil {
			t.Fatalf("%d: %v, %d bytes", n, err, len(text))
		}
		rest := 0
		if last := shown[len(shown)-1].Message; last != "" {
			if _, err := fmt.Sscanf(last, "%d more notices", &rest); err != nil {
				t.Fatal(err)
			}
			rest-- // that line
		}
		if len(shown)+rest != n || n > 1 && len(shown) < 10 {
			t.Errorf("%d: %d are shown, %d are not", n, len(shown), rest)
		}
	}
}

// A text that is quoted in pieces is quoted as in one piece, wherever it is cut.
func TestQuoted(t *testing.T) {
	for name, unit := range map[string]string{"plain": "x", "two bytes": "ä", "three": "€<", "four": "𝄞\n\x00", "no UTF-8": "\x80\xf0\x9d"} {
		for pad := range utf8.UTFMax {
			text := strings.Repeat("y", pad) + strings.Repeat(unit, 2*quotedAtOnce/len(unit)+1)
			want, err := json.Marshal(text)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := appendQuoted(nil, text); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s behind %d bytes: %v", name, pad, err)
			}
		}
	}
	for _, text := range []string{"", "x", strings.Repeat("x", quotedAtOnce)} {
		if got, err := appendQuoted([]byte("a"), text); err != nil || string(got) != `a"`+text+`"` {
			t.Errorf("%d bytes: %v", len(text), err)
		}
	}
}

// One row of few bytes may stand for more text than there is memory.
func TestARowWithoutBound(t *testing.T) {
	nulls := array.NewData(arrow.Null, math.MaxInt32, nil, nil, math.MaxInt32, 0)
	defer nulls.Release()
	offsets := binary.LittleEndian.AppendUint32(make([]byte, 4), math.MaxInt32)
	list := array.NewData(arrow.ListOf(arrow.Null), 1, []*memory.Buffer{nil, memory.NewBufferBytes(offsets)}, []arrow.ArrayData{nulls}, 0, 0)
	defer list.Release()
	many := array.MakeFromData(list)
	defer many.Release()
	long := column(t, arrow.BinaryTypes.String, func(b array.Builder) { b.(*array.StringBuilder).Append(strings.Repeat("\x00", 1000)) })
	defer long.Release()
	full := make([]byte, maxText-1000, maxText+1000)
	for name, a := range map[string]arrow.Array{"many values": many, "a long one": long} {
		if _, err := appendValue(full, arrow.Field{Type: a.DataType()}, a, 0); err == nil || err.Error() != "more than 268435456 bytes of text" {
			t.Errorf("%s: %v", name, err)
		}
	}
}
