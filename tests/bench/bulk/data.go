package main

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"strconv"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/org-runink/runbus/runner/source"
)

// The result: record batches of 1 MiB, 32 columns of 4,096 random numbers, which no compression makes smaller.
const (
	columns    = 32
	batchRows  = 4096
	batchBytes = columns * batchRows * 8
	// distinct is how many different batches there are; they come in turns.
	distinct = 16
	kind     = "random"
)

func newBatches() (*arrow.Schema, []arrow.RecordBatch) {
	fields := make([]arrow.Field, columns)
	for i := range fields {
		fields[i] = arrow.Field{Name: "c" + strconv.Itoa(i), Type: arrow.PrimitiveTypes.Uint64}
	}
	schema := arrow.NewSchema(fields, nil)
	batches := make([]arrow.RecordBatch, distinct)
	for i := range batches {
		arrays := make([]arrow.Array, columns)
		for c := range arrays {
			bytes := make([]byte, batchRows*8)
			_, _ = rand.Read(bytes) // does not fail
			data := array.NewData(arrow.PrimitiveTypes.Uint64, batchRows, []*memory.Buffer{nil, memory.NewBufferBytes(bytes)}, nil, 0, 0)
			arrays[c] = array.NewUint64Data(data)
			data.Release()
		}
		batches[i] = array.NewRecordBatch(schema, arrays, batchRows)
	}
	return schema, batches
}

// random is a connector that gives as many Arrow bytes as the query says, from memory.
type random struct {
	schema  *arrow.Schema
	batches []arrow.RecordBatch
}

func newRandom() *random {
	r := new(random)
	r.schema, r.batches = newBatches()
	return r
}

// Kind is the connector's name.
func (r *random) Kind() string { return kind }

// Fetch writes the batches.
func (r *random) Fetch(ctx context.Context, _ source.Env, req source.Request, out *source.Output) error {
	n, err := strconv.ParseInt(req.Query, 10, 64)
	if err != nil {
		return err
	}
	if err := out.Start(r.schema); err != nil {
		return err
	}
	for i := range n / batchBytes {
		if err := out.Write(r.batches[i%distinct]); err != nil {
			if errors.Is(err, source.ErrLimit) {
				return nil
			}
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

// addTo adds a batch's values to a checksum.
func addTo(sum hash.Hash, batch arrow.RecordBatch) error {
	if batch.NumCols() != columns {
		return fmt.Errorf("a batch of %d columns", batch.NumCols())
	}
	for _, c := range batch.Columns() {
		values, ok := c.(*array.Uint64)
		if !ok || values.NullN() > 0 {
			return errors.New("a column of other values")
		}
		var b [8]byte
		for _, v := range values.Values() {
			binary.LittleEndian.PutUint64(b[:], v)
			sum.Write(b[:])
		}
	}
	return nil
}
