package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/mattn/go-isatty"
	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/process"
)

// show prints rows: as a table, or with --json as an array.
func show[T any](c *cli.Context, rows []T, header []string, cells func(T) []any) error {
	if c.Bool("json") {
		if rows == nil {
			rows = []T{}
		}
		return printJSON(c.App.Writer, rows)
	}
	t := newTable(c.App.Writer, header)
	for _, r := range rows {
		row := cells(r)
		for i, v := range row {
			if text, ok := v.(string); ok {
				row[i] = oneLine(text)
			}
		}
		t.AppendRow(row)
	}
	t.Render()
	return nil
}

// say prints one thing: as a sentence, or with --json as an object.
func say(c *cli.Context, v any, format string, args ...any) error {
	if c.Bool("json") {
		return printJSON(c.App.Writer, v)
	}
	_, err := fmt.Fprintln(c.App.Writer, process.Printable(fmt.Sprintf(format, args...)))
	return err
}

func printJSON(w io.Writer, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return err
	}
	_, err := w.Write(process.EscapeControls(b.Bytes()))
	return err
}

// oneLine is text for one cell of a table.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if process.Steers(r) {
			return '·'
		}
		return r
	}, text)
}

func newTable(w io.Writer, header []string) table.Writer {
	t := table.NewWriter()
	t.SetOutputMirror(w)
	style := table.StyleLight
	style.Options = table.OptionsNoBordersAndSeparators
	style.Format.Header = text.FormatDefault // a column's name is shown as it is
	t.SetStyle(style)
	row := make(table.Row, len(header))
	for i, h := range header {
		row[i] = oneLine(h)
	}
	t.AppendHeader(row)
	return t
}

func isTerminal(f *os.File) bool { return isatty.IsTerminal(f.Fd()) || isatty.IsCygwinTerminal(f.Fd()) }

// stamp is a moment for a cell or a sentence: by this host's clock, with its zone.
func stamp(at time.Time) string { return at.Local().Format(time.RFC3339) }

// ago is a time as a reader wants it.
func ago(at *time.Time, now time.Time) string {
	if at == nil || at.IsZero() {
		return "never"
	}
	d := now.Sub(*at)
	if d < time.Second {
		return "now"
	}
	return d.Round(time.Second).String() + " ago"
}

// size is a number of bytes as a reader wants it.
func size(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	value, suffix := float64(n)/unit, 0
	for value >= unit && suffix < 3 {
		value /= unit
		suffix++
	}
	return fmt.Sprintf("%.1f %ciB", value, "KMGT"[suffix])
}
