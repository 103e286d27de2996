// Package file reads files below the runner's roots (SPEC F1, RUNNER_FILE_ROOTS): CSV, JSON lines, JSON and Parquet.
//
// Setting path is one file or a pattern with * ? [ ] (`\` escapes); the files of a pattern are read in the order of their
// names and must have the same columns, in any order. union=true fills what a file lacks with nulls. The format comes from
// the ending (.csv .tsv .txt, .jsonl .ndjson, .json, .parquet .pq) or from setting format; a text may be compressed with gzip
// (.gz) or zstd (.zst), told by its ending. What the settings of texts mean, how their types come about and what happens to
// a value that does not fit says package tabular; Parquet is in parquet.go. There is no query.
//
// With scan=auto, texts of up to 64 MiB in all (16 MiB compressed) are read twice: first for the types, so that no later row
// can fail to fit. scan=all does so whatever the size, scan=sample never.
package file

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/tabular"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	// Kind is the name of this source.
	Kind = "file"
	// parquetFormat is the format that package tabular has no part in.
	parquetFormat tabular.Format = "parquet"
	// scanBytes is up to which size texts are read twice with scan=auto; a compressed byte counts as several.
	scanBytes        = 64 << 20
	compressedWeight = 4
)

var spec = source.Spec{
	Kind: Kind,
	Settings: append([]source.Setting{
		{Name: "path", Required: true},
		{Name: "format", Check: source.OneOf("csv", "jsonl", "ndjson", "json", "parquet")},
		{Name: "compression", Check: source.OneOf("none", "gzip", "zstd")},
		{Name: "union", Default: "false", Check: source.IsBool},
		{Name: "scan", Default: "auto", Check: source.OneOf("auto", "all", "sample")},
	}, tabular.Settings...),
}

type connector struct{}

// New returns the connector for files.
func New() source.Connector { return connector{} }

// Kind is `file`.
func (connector) Kind() string { return Kind }

// Fetch reads the files.
func (connector) Fetch(ctx context.Context, env source.Env, req source.Request, out *source.Output) error {
	v, err := spec.Read(req)
	if err != nil {
		return err
	}
	job := &job{env: env, out: out, v: v, union: v.Bool("union")}
	if err := job.prepare(); err != nil {
		return err
	}
	out.Phase(runbusv1.Phase_PHASE_CONNECTING, job.say("opening"))
	if job.files, err = job.list(v.Text("path")); err != nil {
		return err
	}
	if err := job.formats(); err != nil {
		return err
	}
	if job.format == parquetFormat {
		err = job.parquet(ctx)
	} else {
		err = job.texts(ctx)
	}
	switch {
	case err == nil, errors.Is(err, source.ErrLimit):
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return err // coded, or what writing the result failed with
}

// job is one fetch.
type job struct {
	env     source.Env
	out     *source.Output
	v       *source.Values
	union   bool
	files   []string
	format  tabular.Format
	options tabular.Options
}

// prepare checks what can be checked before a file is touched.
func (j *job) prepare() error {
	if strings.ContainsRune(j.v.Text("path"), 0) {
		return schemas.Errorf(schemas.CodeBadSource, "setting \"path\" of source file has a NUL byte")
	}
	if f := j.v.Text("format"); f != "" {
		return j.setFormat(formatNamed(f), "")
	}
	if f, _ := formatOf(j.v.Text("path")); f != "" {
		return j.setFormat(f, j.v.Text("path"))
	}
	return nil
}

func formatNamed(name string) tabular.Format {
	if name == "ndjson" {
		return tabular.JSONLines
	}
	return tabular.Format(name)
}

// formatOf tells format and compression by the ending of a name; empty if it tells nothing.
func formatOf(name string) (f tabular.Format, compression string) {
	name = strings.ToLower(name)
	switch filepath.Ext(name) {
	case ".gz":
		compression, name = "gzip", strings.TrimSuffix(name, ".gz")
	case ".zst":
		compression, name = "zstd", strings.TrimSuffix(name, ".zst")
	}
	switch filepath.Ext(name) {
	case ".csv", ".tsv", ".txt":
		f = tabular.CSV
	case ".jsonl", ".ndjson":
		f = tabular.JSONLines
	case ".json":
		f = tabular.JSON
	case ".parquet", ".pq":
		f = parquetFormat
	}
	return f, compression
}

// setFormat fixes the format and reads its options.
func (j *job) setFormat(f tabular.Format, name string) error {
	j.format = f
	var err error
	if f == parquetFormat {
		return j.parquetSettings()
	}
	if j.options, err = tabular.ReadOptions(j.v, f); err != nil {
		return err
	}
	j.options.Union = j.union
	bare := strings.TrimSuffix(strings.TrimSuffix(strings.ToLower(name), ".gz"), ".zst")
	if f == tabular.CSV && j.v.Text("delimiter") == "" && filepath.Ext(bare) == ".tsv" {
		j.options.Delimiter = '\t'
	}
	return nil
}

// list is the files that the path means.
func (j *job) list(path string) ([]string, error) {
	if !strings.ContainsAny(path, `*?[\`) {
		return []string{path}, nil
	}
	files, err := j.env.Roots.Glob(path)
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, schemas.Errorf(schemas.CodeSource, "no file matches %q", path).WithHint(j.env.Roots.Hints().NoMatch)
	}
	slices.Sort(files)
	return files, nil
}

// formats finds the one format of all files.
func (j *job) formats() error {
	if j.format != "" {
		return nil
	}
	var first tabular.Format
	for _, name := range j.files {
		f, _ := formatOf(name)
		switch {
		case f == "":
			return schemas.Errorf(schemas.CodeBadSource, "the ending of %q tells no format", name).WithHint("set format to csv, jsonl, json or parquet")
		case first != "" && f != first:
			return schemas.Errorf(schemas.CodeBadSource, "%q is %s and %q is %s: the files of a pattern must have one format", j.files[0], first, name, f)
		}
		first = f
	}
	return j.setFormat(first, j.files[0])
}

func (j *job) say(what string) string {
	switch len(j.files) {
	case 0:
		return what + " " + filepath.Base(j.v.Text("path"))
	case 1:
		return what + " " + filepath.Base(j.files[0])
	}
	return fmt.Sprintf("%s %d files", what, len(j.files))
}

// texts reads files of CSV, JSON lines or JSON.
func (j *job) texts(ctx context.Context) error {
	table := tabular.NewTable(j.options, j.out, j.env.Allocator())
	defer table.Release()
	twice, err := j.twice()
	if err != nil {
		return err
	}
	if j.format == tabular.CSV && j.union && !twice {
		// The columns of all files are known before the first row is written.
		for _, name := range j.files {
			if err := j.open(ctx, name, func(r io.Reader) error { return table.ReadCSVHeader(name, r) }); err != nil {
				return err
			}
		}
	}
	if twice {
		j.out.Phase(runbusv1.Phase_PHASE_QUERYING, j.say("reading the types of"))
		table.Scan()
		if err := j.read(ctx, table); err != nil {
			return err
		}
		if err := table.Decide(); err != nil {
			return err
		}
	}
	j.out.Phase(runbusv1.Phase_PHASE_STREAMING, j.say("reading"))
	if err := j.read(ctx, table); err != nil {
		return err
	}
	return table.Finish()
}

// read gives every file to the table, in order.
func (j *job) read(ctx context.Context, table *tabular.Table) error {
	for _, name := range j.files {
		err := j.open(ctx, name, func(r io.Reader) error {
			var err error
			switch j.format {
			case tabular.CSV:
				_, err = table.ReadCSV(ctx, name, r)
			case tabular.JSONLines:
				_, err = table.ReadJSONLines(ctx, name, r)
			default:
				_, err = table.ReadJSON(ctx, name, r)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// twice decides whether the files are read for their types first.
func (j *job) twice() (bool, error) {
	switch j.v.Text("scan") {
	case "all":
		return true, nil
	case "sample":
		return false, nil
	}
	if j.v.Text("sampleRows") != "" || j.options.AllText && j.format == tabular.CSV {
		return false, nil
	}
	var size int64
	for _, name := range j.files {
		f, err := j.env.Roots.Open(name)
		if err != nil {
			return false, err
		}
		info, err := f.Stat()
		_ = f.Close() // read only
		if err != nil {
			return false, readError(name, err)
		}
		weight := int64(1)
		if j.compression(name) != "" {
			weight = compressedWeight
		}
		if size += info.Size() * weight; size > scanBytes {
			return false, nil
		}
	}
	return true, nil
}

func (j *job) compression(name string) string {
	switch c := j.v.Text("compression"); c {
	case "none":
		return ""
	case "":
		_, c = formatOf(name)
		return c
	default:
		return c
	}
}

// open calls fn with the text of a file, decompressed.
func (j *job) open(ctx context.Context, name string, fn func(io.Reader) error) error {
	f, err := j.env.Roots.Open(name)
	if err != nil {
		return err
	}
	defer func(f *os.File) { _ = f.Close() }(f) // read only
	return decompressed(j.compression(name), name, &contextReader{ctx: ctx, name: name, r: f}, fn)
}

// contextReader ends reading when its context ends. Its errors are the source's.
type contextReader struct {
	ctx  context.Context //nolint:containedctx // an io.Reader has no other way to be cancelled
	name string
	r    io.Reader
}

func (c *contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := c.r.Read(p)
	if err != nil && err != io.EOF {
		err = readError(c.name, err)
	}
	return n, err
}

func readError(name string, err error) error {
	return schemas.Errorf(schemas.CodeSource, "%s: %w", name, err)
}
