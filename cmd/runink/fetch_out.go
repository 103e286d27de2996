package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v2"
)

// output is where the rows go, and in which form.
type output struct {
	c      *cli.Context
	format string
	file   *os.File // nil: standard output
	target string   // what file becomes when the result is whole; empty: file is written as it is
	buf    *bufio.Writer
	w      io.Writer
	rows   rowSink
	json   *jsonRows
}

func (o *output) open() error {
	o.format, o.w = o.c.String("format"), o.c.App.Writer
	name := o.c.String("out")
	asJSON := o.c.Bool("json")
	switch o.format {
	case "table", "json", "csv", "arrow":
	default:
		return usagef("--format %s: use table, json, csv or arrow", o.format)
	}
	if asJSON && name == "" {
		if o.c.IsSet("format") && o.format != "json" {
			return usagef("--json puts the rows into its own object: leave --format away, or name a file with --out")
		}
		o.format = "json"
	}
	if o.format == "arrow" && name == "" && isTerminal(os.Stdout) {
		return usagef("Arrow is binary: name a file with --out, or pipe it")
	}
	if name != "" {
		if err := o.openFile(name); err != nil {
			return usagef("--out: %w", err)
		}
		o.buf = newBuffer(o.file)
		o.w = o.buf
	}
	switch o.format {
	case "json":
		o.json = &jsonRows{w: o.w, keep: asJSON && name == ""}
		o.rows = o.json
	case "table":
		o.rows = newTableRows(o.w, tableRows)
	}
	return nil
}

func newBuffer(f *os.File) *bufio.Writer { return bufio.NewWriterSize(f, 1<<20) }

// openFile opens a file beside name, which takes its place when the result is whole: the old one stays until then. A device or a
// FIFO is written to as it is, and what a link names is replaced, not the link.
func (o *output) openFile(name string) (err error) {
	if target, err := filepath.EvalSymlinks(name); err == nil {
		name = target
	}
	info, err := os.Stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	case info.IsDir():
		return errors.New(name + " is a folder")
	case !info.Mode().IsRegular():
		o.file, err = os.OpenFile(name, os.O_WRONLY, 0)
		return err
	}
	o.file, err = os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+"-*.part")
	o.target = name
	var failed *fs.PathError
	if errors.As(err, &failed) { // its path is of the file beside name
		return fmt.Errorf("a file in %s: %w", filepath.Dir(name), failed.Err)
	}
	return err
}

// finish completes the file, or removes it when the fetch failed.
func (o *output) finish(err error) error {
	if o.file == nil {
		return err
	}
	if err == nil {
		err = o.buf.Flush()
	}
	err = errors.Join(err, o.file.Close())
	if o.target == "" {
		return err
	}
	if err == nil {
		err = os.Rename(o.file.Name(), o.target)
	}
	if err != nil {
		_ = os.Remove(o.file.Name()) // the error that counts is err
	}
	return err
}

func (o *output) data() json.RawMessage {
	if o.json == nil || !o.json.keep {
		return nil
	}
	return o.json.kept.Bytes()
}
