package sqlite

import (
	"context"
	"slices"
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// maxKept bounds the cells of a result that is kept while its types are learnt, in bytes without their texts and blobs.
const maxKept = 8 << 20

// reader reads the result of one query.
type reader struct {
	ctx context.Context //nolint:containedctx // one reader is one fetch
	db  *db
	mem memory.Allocator
	out *source.Output

	stmt  *stmt
	cols  []column
	kinds []kind
	build *array.RecordBuilder
	rows  int // in build
	bytes int // in build, roughly
}

// read runs the query and writes its result. It looks at the values first and writes then: a result of one batch is kept
// meanwhile, a longer one is read a second time in the same transaction.
func (r *reader) read(query string) error {
	err := whenUnlocked(r.ctx, func() (err error) {
		r.stmt, err = r.db.query(query)
		return err
	})
	if err != nil {
		return err
	}
	defer r.stmt.close()
	r.cols = r.stmt.columns()
	kept, all, err := r.look()
	if err != nil {
		return err
	}
	if err := r.start(); err != nil {
		return err
	}
	defer r.build.Release()
	if all {
		for row := range slices.Chunk(kept, len(r.cols)) {
			if err := r.add(row); err != nil {
				return err
			}
		}
		return r.flush()
	}
	return r.again()
}

// look observes all values that can come into the result. It returns the rows, if all fit into one batch.
func (r *reader) look() (kept []cell, all bool, err error) {
	limits := r.out.Limits()
	row := make([]cell, len(r.cols))
	all = true
	var size, rows int64
	var memory int
	for rows <= limits.MaxRows && size <= limits.MaxBytes {
		if r.ctx.Err() != nil {
			return nil, false, r.ctx.Err()
		}
		more, err := r.next(rows == 0)
		if err != nil || !more {
			return kept, all, err
		}
		rows++
		if err := r.stmt.row(row); err != nil {
			return nil, false, err
		}
		for i := range row {
			r.cols[i].observe(row[i])
			size += int64(len(row[i].data))
		}
		if !all {
			continue
		}
		memory += len(row) * int(unsafe.Sizeof(cell{}))
		if rows > source.BatchRows || size > source.BatchBytes || memory > maxKept {
			kept, all = nil, false
			r.out.Phase(runbusv1.Phase_PHASE_QUERYING, "looking at the types of all values")
			continue
		}
		for _, c := range row {
			c.data = slices.Clone(c.data)
			kept = append(kept, c)
		}
	}
	return kept, all, nil
}

// next steps to the next row. Only the first step of a reading can find the database locked.
func (r *reader) next(first bool) (more bool, err error) {
	if !first {
		return r.stmt.step()
	}
	err = whenUnlocked(r.ctx, func() error {
		if more, err = r.stmt.step(); locked(err) {
			r.stmt.reset()
		}
		return err
	})
	return more, err
}

// start writes the schema.
func (r *reader) start() error {
	fields := make([]arrow.Field, len(r.cols))
	r.kinds = make([]kind, len(r.cols))
	for i := range r.cols {
		c := &r.cols[i]
		r.kinds[i] = c.kind()
		fields[i] = arrow.Field{Name: c.name, Type: arrowTypes[r.kinds[i]], Nullable: true}
		if text := c.mixture(); text != "" {
			r.out.Notice(runbusv1.NoticeCode_NOTICE_CODE_SOURCE, text)
		}
	}
	schema := arrow.NewSchema(fields, nil)
	r.build = array.NewRecordBuilder(r.mem, schema)
	return r.out.Start(schema)
}

// again reads the result from its start and writes it.
func (r *reader) again() error {
	r.stmt.reset()
	row := make([]cell, len(r.cols))
	for {
		if r.ctx.Err() != nil {
			return r.ctx.Err()
		}
		more, err := r.stmt.step()
		if err != nil {
			return err
		}
		if !more {
			return r.flush()
		}
		if err := r.stmt.row(row); err != nil {
			return err
		}
		if err := r.add(row); err != nil {
			return err
		}
	}
}

// add appends a row, and hands the batch over when it is full.
func (r *reader) add(row []cell) error {
	for i, v := range row {
		if !r.kinds[i].add(r.build.Field(i), v) {
			return schemas.Errorf(schemas.CodeSource, "column %q has a value of another type when it is read again: the query does not give the same result twice", r.cols[i].name).
				WithHint("give the column a type in the query, as in CAST(… AS TEXT)")
		}
		r.bytes += 8 + len(v.data)
	}
	if r.rows++; r.rows < source.BatchRows && r.bytes < source.BatchBytes {
		return nil
	}
	return r.flush()
}

// flush writes the batch.
func (r *reader) flush() error {
	batch := r.build.NewRecordBatch()
	defer batch.Release()
	r.rows, r.bytes = 0, 0
	return r.out.Write(batch)
}
