package source

import (
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/bitutil"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// byteCounter measures batches: the Arrow bytes that the rows of a batch need, whatever larger buffers they are slices of.
// A dictionary counts once for as long as batches share it.
type byteCounter struct {
	dictionaries map[int]uintptr // column → address of the last dictionary sent
}

// size is the number of Arrow bytes of the first rows of batch.
func (c *byteCounter) size(batch arrow.RecordBatch, rows int64) int64 {
	if rows <= 0 {
		return 0
	}
	var n int64
	for i, col := range batch.Columns() {
		data := col.Data()
		n += sliceSize(data, data.Offset(), int(rows))
		if d, ok := col.(*array.Dictionary); ok && c.dictionaries[i] != identity(d) {
			dict := d.Dictionary().Data()
			n += sliceSize(dict, dict.Offset(), dict.Len())
		}
	}
	return n
}

// sent notes the dictionaries of a batch that was written.
func (c *byteCounter) sent(batch arrow.RecordBatch) {
	for i, col := range batch.Columns() {
		if d, ok := col.(*array.Dictionary); ok {
			if c.dictionaries == nil {
				c.dictionaries = map[int]uintptr{}
			}
			c.dictionaries[i] = identity(d)
		}
	}
}

func identity(d *array.Dictionary) uintptr {
	return uintptr(unsafe.Pointer(d.Dictionary().Data().(*array.Data))) //nolint:gosec // compared, never followed
}

// sliceSize is the size of n values from offset, which counts from the start of the buffers.
func sliceSize(data arrow.ArrayData, offset, n int) int64 {
	if n <= 0 {
		return 0
	}
	buffers, children := data.Buffers(), data.Children()
	var size int64
	if data.NullN() != 0 && len(buffers) > 0 && buffers[0] != nil && data.DataType().ID() != arrow.DENSE_UNION && data.DataType().ID() != arrow.SPARSE_UNION {
		size = bitutil.BytesForBits(int64(n))
	}
	switch t := data.DataType().(type) {
	case arrow.ExtensionType:
		storage := array.NewData(t.StorageType(), data.Len(), buffers, children, data.NullN(), data.Offset())
		defer storage.Release()
		return sliceSize(storage, offset, n)
	case *arrow.DictionaryType:
		return size + int64(n)*int64(t.IndexType.(arrow.FixedWidthDataType).Bytes())
	case *arrow.StructType:
		for _, child := range children {
			size += sliceSize(child, child.Offset()+offset, n)
		}
		return size
	case *arrow.FixedSizeListType:
		width := int(t.Len())
		return size + sliceSize(children[0], children[0].Offset()+offset*width, n*width)
	case *arrow.ListType, *arrow.MapType:
		from, to := offsets[int32](buffers, offset, n)
		return size + 4*int64(n+1) + sliceSize(children[0], children[0].Offset()+int(from), int(to-from))
	case *arrow.LargeListType:
		from, to := offsets[int64](buffers, offset, n)
		return size + 8*int64(n+1) + sliceSize(children[0], children[0].Offset()+int(from), int(to-from))
	case *arrow.StringType, *arrow.BinaryType:
		from, to := offsets[int32](buffers, offset, n)
		return size + 4*int64(n+1) + int64(to-from)
	case *arrow.LargeStringType, *arrow.LargeBinaryType:
		from, to := offsets[int64](buffers, offset, n)
		return size + 8*int64(n+1) + to - from
	case *arrow.SparseUnionType:
		size = int64(n) // type codes
		for _, child := range children {
			size += sliceSize(child, child.Offset()+offset, n)
		}
		return size
	case arrow.FixedWidthDataType:
		return size + bitutil.BytesForBits(int64(n)*int64(t.BitWidth()))
	}
	// Views, dense unions and run-ends share their buffers in ways that don't follow the rows: the proportional part.
	whole := int64(data.SizeInBytes())
	if data.Len() == 0 {
		return size
	}
	return whole * int64(n) / int64(data.Len())
}

// offsets are the first and last offset of n variable-length values.
func offsets[T int32 | int64](buffers []*memory.Buffer, offset, n int) (from, to T) {
	if len(buffers) < 2 || buffers[1] == nil || buffers[1].Len() == 0 {
		return 0, 0
	}
	all := arrow.GetData[T](buffers[1].Bytes())
	return all[offset], all[offset+n]
}
