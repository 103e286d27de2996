package source

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/decimal128"
	"github.com/apache/arrow-go/v18/arrow/ipc"
)

// tag is an extension type over four bytes.
type tag struct{ arrow.ExtensionBase }

func newTag() *tag {
	return &tag{arrow.ExtensionBase{Storage: &arrow.FixedSizeBinaryType{ByteWidth: 4}}}
}

type tagArray struct{ array.ExtensionArrayBase }

func (*tag) ArrayType() reflect.Type { return reflect.TypeFor[tagArray]() }
func (*tag) ExtensionName() string   { return "runbus.test.tag" }
func (*tag) ExtensionEquals(o arrow.ExtensionType) bool {
	return o.ExtensionName() == "runbus.test.tag"
}
func (*tag) Serialize() string { return "" }
func (*tag) Deserialize(arrow.DataType, string) (arrow.ExtensionType, error) {
	return newTag(), nil
}

// everyType has a column for each way in which Arrow lays out values.
var everyType = arrow.NewSchema([]arrow.Field{
	{Name: "bool", Type: arrow.FixedWidthTypes.Boolean, Nullable: true},
	{Name: "i16", Type: arrow.PrimitiveTypes.Int16, Nullable: true},
	{Name: "dec", Type: &arrow.Decimal128Type{Precision: 20, Scale: 2}, Nullable: true},
	{Name: "str", Type: arrow.BinaryTypes.String, Nullable: true},
	{Name: "lbin", Type: arrow.BinaryTypes.LargeBinary, Nullable: true},
	{Name: "list", Type: arrow.ListOf(arrow.BinaryTypes.String), Nullable: true},
	{Name: "llist", Type: arrow.LargeListOf(arrow.PrimitiveTypes.Int32), Nullable: true},
	{Name: "fsl", Type: arrow.FixedSizeListOf(3, arrow.PrimitiveTypes.Int8), Nullable: true},
	{Name: "struct", Type: arrow.StructOf(arrow.Field{Name: "a", Type: arrow.PrimitiveTypes.Int64, Nullable: true}, arrow.Field{Name: "b", Type: arrow.BinaryTypes.String, Nullable: true}), Nullable: true},
	{Name: "map", Type: arrow.MapOf(arrow.BinaryTypes.String, arrow.PrimitiveTypes.Int32), Nullable: true},
	{Name: "dict", Type: &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}, Nullable: true},
	{Name: "ext", Type: newTag(), Nullable: true},
	{Name: "null", Type: arrow.Null, Nullable: true},
	{Name: "view", Type: arrow.BinaryTypes.StringView, Nullable: true},
}, nil)

func everyBatch(t *testing.T, rows int) arrow.RecordBatch {
	b := array.NewRecordBuilder(checked(t), everyType)
	defer b.Release()
	for i := range rows {
		if i%7 == 3 {
			for _, f := range b.Fields() {
				f.AppendNull()
			}
			continue
		}
		text := fmt.Sprintf("value %d", i*i)
		b.Field(0).(*array.BooleanBuilder).Append(i%2 == 0)
		b.Field(1).(*array.Int16Builder).Append(int16(i))
		b.Field(2).(*array.Decimal128Builder).Append(decimal128.FromI64(int64(i)))
		b.Field(3).(*array.StringBuilder).Append(text)
		b.Field(4).(*array.BinaryBuilder).Append([]byte(text))
		list := b.Field(5).(*array.ListBuilder)
		list.Append(true)
		large := b.Field(6).(*array.LargeListBuilder)
		large.Append(true)
		mapped := b.Field(9).(*array.MapBuilder)
		mapped.Append(true)
		for j := range i % 4 {
			list.ValueBuilder().(*array.StringBuilder).Append(text)
			large.ValueBuilder().(*array.Int32Builder).Append(int32(j))
			mapped.KeyBuilder().(*array.StringBuilder).Append(strconv.Itoa(j))
			mapped.ItemBuilder().(*array.Int32Builder).Append(int32(j))
		}
		fixed := b.Field(7).(*array.FixedSizeListBuilder)
		fixed.Append(true)
		fixed.ValueBuilder().(*array.Int8Builder).AppendValues([]int8{1, 2, int8(i)}, nil)
		st := b.Field(8).(*array.StructBuilder)
		st.Append(true)
		st.FieldBuilder(0).(*array.Int64Builder).Append(int64(i))
		st.FieldBuilder(1).(*array.StringBuilder).Append(text)
		if err := b.Field(10).(*array.BinaryDictionaryBuilder).AppendString(strconv.Itoa(i % 3)); err != nil {
			t.Fatal(err)
		}
		b.Field(11).(*array.ExtensionBuilder).StorageBuilder().(*array.FixedSizeBinaryBuilder).Append([]byte{byte(i), 1, 2, 3})
		b.Field(12).(*array.NullBuilder).AppendNull()
		b.Field(13).(*array.StringViewBuilder).Append(text)
	}
	batch := b.NewRecordBatch()
	t.Cleanup(batch.Release)
	return batch
}

// TestSizeOfEveryType: the size of a slice is the size of the same rows made afresh, it grows with the rows, and rows cut out
// of the middle come back equal through the stream.
func TestSizeOfEveryType(t *testing.T) {
	const rows = 50
	batch := everyBatch(t, rows)
	var c byteCounter
	last := int64(0)
	for n := range rows + 1 {
		size := c.size(batch, int64(n))
		if size < last || n > 0 && size == 0 {
			t.Errorf("%d rows: %d bytes after %d", n, size, last)
		}
		last = size
	}
	front := everyBatch(t, 20)
	for i, col := range batch.Columns() {
		if everyType.Field(i).Name == "view" {
			continue // proportional
		}
		cut, made := col.Data(), front.Column(i).Data()
		if got, want := sliceSize(cut, cut.Offset(), 20), sliceSize(made, made.Offset(), 20); got != want {
			t.Errorf("%s: %d bytes as a slice, %d on its own", everyType.Field(i).Name, got, want)
		}
		middle := array.NewSlice(col, 10, 30)
		if got, want := sliceSize(middle.Data(), middle.Data().Offset(), 0), int64(0); got != want {
			t.Errorf("%s: no rows have %d bytes", everyType.Field(i).Name, got)
		}
		whole := sliceSize(cut, cut.Offset(), rows)
		if got := sliceSize(middle.Data(), middle.Data().Offset(), 20); got <= 0 && everyType.Field(i).Name != "null" || got > whole {
			t.Errorf("%s: %d of %d bytes", everyType.Field(i).Name, got, whole)
		}
		middle.Release()
	}

	if err := arrow.RegisterExtensionType(newTag()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = arrow.UnregisterExtensionType("runbus.test.tag") })
	middle := batch.NewSlice(10, 40)
	defer middle.Release()
	var w bytes.Buffer
	o := NewOutput(&w, Limits{MaxRows: 20}, nil)
	if err := o.Start(everyType); err != nil {
		t.Fatal(err)
	}
	if err := o.Write(middle); !errors.Is(err, ErrLimit) {
		t.Fatal(err)
	}
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := ipc.NewReader(&w, ipc.WithAllocator(checked(t)))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	if !r.Next() {
		t.Fatal(r.Err())
	}
	want := batch.NewSlice(10, 30)
	defer want.Release()
	if !array.RecordEqual(r.RecordBatch(), want) {
		t.Errorf("%v\nwant %v", r.RecordBatch(), want)
	}
}

// TestSizeOfDictionary: one that batches share counts once.
func TestSizeOfDictionary(t *testing.T) {
	batch := everyBatch(t, 20)
	var c byteCounter
	first := c.size(batch, 10)
	c.sent(batch)
	if again := c.size(batch, 10); again >= first {
		t.Errorf("%d bytes, then %d", first, again)
	}
}
