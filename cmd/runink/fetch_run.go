package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/urfave/cli/v2"
)

func fetchCommand() *cli.Command {
	run := command("run", "run a fetch on a runner", "", []cli.Flag{
		&cli.StringFlag{Name: "runner", Usage: "id or name of the runner", EnvVars: []string{"RUNINK_RUNNER"}},
		&cli.StringFlag{Name: "source", Usage: "file, sqlite, postgres or http"},
		&cli.StringSliceFlag{Name: "set", Usage: "`KEY=VALUE` of the source's settings; may be repeated"},
		&cli.StringFlag{Name: "secrets-file", Usage: "`FILE` (mode 0600, or - for standard input) with the source's secrets: a JSON object, or KEY=VALUE lines"},
		&cli.StringFlag{Name: "query", Usage: "the read, for sources with a query language"},
		&cli.StringFlag{Name: "format", Value: "table", Usage: "table, json, csv or arrow"},
		&cli.StringFlag{Name: "out", Usage: "write the rows to `FILE` (the default is standard output)"},
		&cli.Int64Flag{Name: "max-rows", Usage: "rows at most"},
		&cli.Int64Flag{Name: "max-bytes", Usage: "Arrow bytes at most, before compression"},
		&cli.DurationFlag{Name: "timeout", Usage: "of the whole fetch"},
		&cli.BoolFlag{Name: "quiet", Usage: "no progress"},
	}, fetchRun)
	run.Description = `Settings by kind: file path, format; sqlite path; postgres host, port, database, username, sslMode (secret: password);
http url, format, jsonPath, paging (secrets by auth mode). docs/sources.md has them all. Ctrl-C cancels.

With --json the outcome is one object; the rows are in it under "data", unless --out puts them into a file.`
	return group("fetch", "fetches", run)
}

func fetchRun(c *cli.Context) error {
	if err := noArgs(c); err != nil {
		return err
	}
	body, err := fetchRequest(c)
	if err != nil {
		return err
	}
	_, api, err := connectAs(c, chosen)
	if err != nil {
		return err
	}
	ctx, stop := interruptible(c.Context)
	defer stop()
	run := &fetch{api: api, body: body, progress: newProgress(os.Stderr, c.Bool("quiet") || c.Bool("json"))}

	out := &output{c: c}
	if err := out.open(); err != nil {
		return err
	}
	var result resultLine
	switch out.format {
	case "arrow":
		result, err = run.copyRaw(ctx, "application/vnd.apache.arrow.stream", out.w)
	case "csv":
		result, err = run.copyRaw(ctx, "text/csv", out.w)
	default:
		run.rows = out.rows
		result, err = run.stream(ctx)
	}
	if err = out.close(err); err != nil {
		return err
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, struct {
			resultLine
			Data json.RawMessage `json:"data,omitempty"`
			Out  string          `json:"out,omitempty"`
		}{result, out.data(), c.String("out")})
	}
	for _, n := range result.Notices {
		fmt.Fprintf(os.Stderr, "notice: %s\n", n.Message)
	}
	if !c.Bool("quiet") && result.RunnerID != "" {
		fmt.Fprintf(os.Stderr, "%d rows, %s of Arrow in %d ms on runner %s; dispatch %s\n", result.Rows, size(result.Bytes), result.ElapsedMs, result.RunnerID, result.DispatchID)
	}
	return nil
}

// fetchRequest is what the flags ask for. The secrets come from a file or standard input, never from a flag.
func fetchRequest(c *cli.Context) (fetchBody, error) {
	body := fetchBody{RunnerID: c.String("runner"), Query: c.String("query"), MaxRows: c.Int64("max-rows"), MaxBytes: c.Int64("max-bytes")}
	if body.MaxRows < 0 || body.MaxBytes < 0 || c.Duration("timeout") < 0 {
		return body, usagef("--max-rows, --max-bytes and --timeout can't be negative")
	}
	if d := c.Duration("timeout"); d > 0 {
		body.Timeout = d.String()
	}
	if kind := c.String("source"); kind != "" {
		body.Source = &sourceBody{Kind: kind, Settings: map[string]string{}}
		for _, kv := range c.StringSlice("set") {
			k, v, ok := strings.Cut(kv, "=")
			if !ok || k == "" {
				return body, usagef("--set %q is not KEY=VALUE", kv)
			}
			if _, twice := body.Source.Settings[k]; twice {
				return body, usagef("--set %s is given twice", k)
			}
			body.Source.Settings[k] = v
		}
	} else {
		return body, usagef("name the source with --source: file, sqlite, postgres or http")
	}
	if name := c.String("secrets-file"); name != "" {
		var err error
		if body.Secrets, err = readSecrets(name, os.Stdin); err != nil {
			return body, err
		}
	}
	return body, nil
}

// readSecrets reads a JSON object of strings, or KEY=VALUE lines. Its errors never show a part of a value.
func readSecrets(name string, stdin io.Reader) (map[string]string, error) {
	in := stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, usagef("the secrets file can't be read: %v", err)
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return nil, err
		}
		if !info.Mode().IsRegular() {
			return nil, usagef("the secrets file %s is not a regular file", name)
		}
		if info.Mode().Perm()&0o077 != 0 {
			return nil, usagef("the secrets file %s is open to others (mode %04o): chmod 600 it", name, info.Mode().Perm())
		}
		in = f
	}
	const most = 256 << 10
	b, err := io.ReadAll(io.LimitReader(in, most+1))
	if err != nil {
		return nil, usagef("the secrets can't be read: %v", err)
	}
	if len(b) > most {
		return nil, usagef("the secrets are larger than %d KiB", most>>10)
	}
	secrets := map[string]string{}
	if strings.HasPrefix(strings.TrimSpace(string(b)), "{") {
		if json.Unmarshal(b, &secrets) != nil {
			return nil, usagef("the secrets are not a JSON object whose values are strings")
		}
		return secrets, nil
	}
	scanner := bufio.NewScanner(strings.NewReader(string(b)))
	scanner.Buffer(nil, most+1)
	for n := 1; scanner.Scan(); n++ {
		line := strings.TrimSpace(scanner.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		k, v, ok := strings.Cut(line, "=")
		if k = strings.TrimSpace(k); !ok || k == "" {
			return nil, usagef("line %d of the secrets is not KEY=VALUE", n)
		}
		secrets[k] = v
	}
	return secrets, scanner.Err()
}

// output is where the rows go, and in which form.
type output struct {
	c      *cli.Context
	format string
	file   *os.File
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
		// A new name, and the old file stays until the result is whole.
		f, err := os.OpenFile(name+".part", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			return usagef("--out: %v", err)
		}
		o.file, o.buf = f, bufio.NewWriterSize(f, 1<<20)
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

// close completes the file, or removes it when the fetch failed.
func (o *output) close(err error) error {
	if o.file == nil {
		return err
	}
	if err == nil {
		err = o.buf.Flush()
	}
	err = errors.Join(err, o.file.Close())
	if err != nil {
		_ = os.Remove(o.file.Name())
		return err
	}
	return os.Rename(o.file.Name(), o.c.String("out"))
}

func (o *output) data() json.RawMessage {
	if o.json == nil || !o.json.keep {
		return nil
	}
	return o.json.kept.Bytes()
}
