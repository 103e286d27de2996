package file

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/parquet-go/parquet-go"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/tabular"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// maxFooter bounds the metadata of a Parquet file.
const maxFooter = 64 << 20

// parquetSettings refuses settings that are for texts.
func (j *job) parquetSettings() error {
	for _, s := range tabular.Settings {
		if v := j.v.Text(s.Name); s.Name != "columns" && v != s.Default {
			return schemas.Errorf(schemas.CodeBadSource, "setting %q is for texts, not for parquet", s.Name)
		}
	}
	if c := j.v.Text("compression"); c != "" && c != "none" {
		return schemas.Errorf(schemas.CodeBadSource, "setting \"compression\" is for texts: a Parquet file compresses inside")
	}
	return nil
}

// parquet reads Parquet files: one column of one page at a time, whatever the size of a row group.
func (j *job) parquet(ctx context.Context) error {
	wanted, err := tabular.ReadOptions(j.v, parquetFormat)
	if err != nil {
		return err
	}
	fields, err := j.parquetFields(wanted.Columns)
	if err != nil {
		return err
	}
	schema := arrow.NewSchema(fields, nil)
	j.out.Phase(runbusv1.Phase_PHASE_STREAMING, j.say("reading"))
	if err := j.out.Start(schema); err != nil {
		return err
	}
	for _, name := range j.files {
		if err := j.withParquet(name, func(f *parquet.File, top []*node) error {
			return j.readParquet(ctx, f, top, schema)
		}); err != nil {
			return err
		}
	}
	return nil
}

// parquetFields is the fields of the result, from the footers of all files.
func (j *job) parquetFields(wanted []string) ([]arrow.Field, error) {
	var fields []arrow.Field
	var names []string
	types := map[string]arrow.Field{}
	for n, name := range j.files {
		err := j.withParquet(name, func(_ *parquet.File, top []*node) error {
			var have []string
			for _, c := range top {
				f := c.field()
				f.Nullable = true
				have = append(have, f.Name)
				known, ok := types[f.Name]
				if ok && (!arrow.TypeEqual(known.Type, f.Type, arrow.CheckMetadata()) || !known.Metadata.Equal(f.Metadata)) {
					return schemas.Errorf(schemas.CodeSource, "%s: column %q is %s there and %s in the files before it", name, f.Name, f.Type, known.Type)
				}
				if !ok && (n == 0 || j.union) {
					types[f.Name] = f
					names = append(names, f.Name)
				}
			}
			if !j.union {
				return tabular.SameColumns(j.files[0], names, name, have)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	if len(wanted) == 0 {
		wanted = names
	}
	for _, name := range wanted {
		f, ok := types[name]
		if !ok {
			return nil, schemas.Errorf(schemas.CodeBadSource, "there is no column %q", name).WithHint(fmt.Sprintf("the columns are %q", names))
		}
		fields = append(fields, f)
	}
	return fields, nil
}

// withParquet opens a file and calls fn with its top-level columns. A panic of the library on damaged bytes is an error.
func (j *job) withParquet(name string, fn func(*parquet.File, []*node) error) error {
	f, err := j.env.Roots.Open(name)
	if err != nil {
		return err
	}
	defer func(f *os.File) { _ = f.Close() }(f) // read only
	info, err := f.Stat()
	if err != nil {
		return readError(name, err)
	}
	return openParquet(name, f, info.Size(), j.env, fn)
}

func openParquet(name string, r io.ReaderAt, size int64, env source.Env, fn func(*parquet.File, []*node) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			env.Logger().Warn("the Parquet library panicked on a file", "file", name, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = schemas.Errorf(schemas.CodeSource, "%s: the Parquet file is damaged: %v", name, p)
		}
	}()
	if err := checkFooter(name, r, size); err != nil {
		return err
	}
	file, err := parquet.OpenFile(r, size, parquet.SkipPageIndex(true), parquet.SkipBloomFilters(true), parquet.FileReadMode(parquet.ReadModeSync))
	if err != nil {
		return parquetError(name, err)
	}
	top, err := columnsOf(file)
	if err != nil {
		return parquetError(name, err)
	}
	return parquetError(name, fn(file, top))
}

// parquetError gives an error that has no code yet the name of the file.
func parquetError(name string, err error) error {
	if err == nil || err == source.ErrLimit || schemas.CodeOf(err) != schemas.CodeFailed {
		return err
	}
	var content fileError
	var write undelivered
	switch {
	case errors.As(err, &content):
		return schemas.Errorf(schemas.CodeSource, "%s: %s", name, content.Error())
	case errors.As(err, &write):
		return write.error
	}
	return schemas.Errorf(schemas.CodeSource, "%s: can't read it as Parquet: %w", name, err)
}

// undelivered is an error of writing the result, which is not the file's fault.
type undelivered struct{ error }

// fileError is an error about the content of a file.
type fileError string

func (e fileError) Error() string { return string(e) }

func faultf(format string, args ...any) error { return fileError(fmt.Sprintf(format, args...)) }

// checkFooter looks at the ends of the file before the library allocates by what they say.
func checkFooter(name string, r io.ReaderAt, size int64) error {
	no := func(why string) error {
		return schemas.Errorf(schemas.CodeSource, "%s is not a Parquet file: %s", name, why)
	}
	if size < 12 {
		return no(fmt.Sprintf("it has %d bytes", size))
	}
	var head [4]byte
	var tail [8]byte
	if _, err := r.ReadAt(head[:], 0); err != nil {
		return readError(name, err)
	}
	if _, err := r.ReadAt(tail[:], size-8); err != nil && err != io.EOF {
		return readError(name, err)
	}
	switch {
	case string(head[:]) == "PARE" || string(tail[4:]) == "PARE":
		return no("it is encrypted")
	case string(head[:]) != "PAR1":
		return no("it does not begin with PAR1")
	case string(tail[4:]) != "PAR1":
		return no("it does not end with PAR1: is it complete?")
	}
	if n := int64(binary.LittleEndian.Uint32(tail[:4])); n > size-12 || n > maxFooter {
		return no(fmt.Sprintf("its footer would have %d bytes", n))
	}
	return nil
}

// readParquet writes the rows of one file.
func (j *job) readParquet(ctx context.Context, f *parquet.File, top []*node, schema *arrow.Schema) error {
	b := &batch{RecordBuilder: array.NewRecordBuilder(j.env.Allocator(), schema), out: j.out}
	defer b.Release()
	columns := make([]*node, schema.NumFields()) // nil: the file lacks it
	var leaves []*cursor
	for i, field := range schema.Fields() {
		if k := slices.IndexFunc(top, func(n *node) bool { return n.name == field.Name }); k >= 0 {
			columns[i] = top[k]
			leaves = append(leaves, top[k].leaves...)
		}
	}
	for g, group := range f.RowGroups() {
		if err := readGroup(ctx, group, columns, leaves, b); err != nil {
			var content fileError
			if errors.As(err, &content) {
				return faultf("row group %d: %s", g+1, string(content))
			}
			return err
		}
	}
	return b.flush()
}

func readGroup(ctx context.Context, group parquet.RowGroup, columns []*node, leaves []*cursor, b *batch) error {
	defer func() {
		for _, c := range leaves {
			c.close()
		}
	}()
	chunks := group.ColumnChunks()
	for _, c := range leaves {
		if c.column >= len(chunks) {
			return faultf("column %d of %d is missing", c.column+1, len(chunks))
		}
		c.open(chunks[c.column])
	}
	total := group.NumRows()
	for row := range total {
		if row%256 == 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
		}
		for i, n := range columns {
			if n == nil {
				b.Field(i).AppendNull()
				continue
			}
			if err := n.startRow(); err != nil {
				return faultf("column %q, row %d of the group: %v", n.name, row+1, err)
			}
			grown, err := n.read(b.Field(i))
			if err != nil {
				return faultf("column %q, row %d of the group: %v", n.name, row+1, err)
			}
			b.size += grown
		}
		if b.rows++; b.rows >= source.BatchRows || b.size >= source.BatchBytes {
			if err := b.flush(); err != nil {
				return err
			}
		}
	}
	for _, c := range leaves {
		if _, more, err := c.peek(); err != nil || more {
			return faultf("column %d has more values than the %d rows of the group", c.column+1, total)
		}
	}
	return nil
}

// batch is the record batch in the making.
type batch struct {
	*array.RecordBuilder
	out        *source.Output
	rows, size int64
}

// flush writes the batch.
func (b *batch) flush() error {
	if b.rows == 0 {
		return nil
	}
	b.rows, b.size = 0, 0
	done := b.NewRecordBatch()
	defer done.Release()
	if err := b.out.Write(done); err != nil && err != source.ErrLimit {
		return undelivered{err}
	} else if err != nil {
		return err
	}
	return nil
}
