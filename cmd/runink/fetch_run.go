package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/process"
)

func fetchCommand() *cli.Command {
	run := remote("run", "run a fetch on a runner", "", []cli.Flag{
		&cli.StringFlag{Name: "runner", Usage: "`ID` or name of the runner", EnvVars: []string{"RUNINK_RUNNER"}},
		&cli.StringFlag{Name: "source", Usage: "`KIND`: file, sqlite, postgres or http"},
		&cli.StringSliceFlag{Name: "set", Usage: "`KEY=VALUE` of the source's settings; may be repeated"},
		&cli.StringFlag{Name: "secrets-file", Usage: "`FILE` (mode 0600, or - for standard input) with the source's secrets: a JSON object, or KEY=VALUE lines"},
		&cli.StringFlag{Name: "query", Usage: "the read, for sources with a query language"},
		&cli.StringFlag{Name: "format", Value: "table", Usage: "table, json, csv or arrow"},
		&cli.StringFlag{Name: "out", Usage: "write the rows to `FILE` (the default is standard output)"},
		&cli.Int64Flag{Name: "max-rows", Usage: "rows at most", DefaultText: "10,000,000"},
		&cli.Int64Flag{Name: "max-bytes", Usage: "Arrow bytes at most, before compression", DefaultText: "4 GiB"},
		&cli.DurationFlag{Name: "timeout", Usage: "time of the whole fetch, such as 90s", DefaultText: "the control plane's, 10m, which is the most"},
		&cli.BoolFlag{Name: "early-id", Usage: "ask for the dispatch's id ahead of the answer: for a control plane with no proxy before it, or one that forwards interim responses (102)", DisableDefaultText: true},
		&cli.BoolFlag{Name: "quiet", Usage: "no progress", DisableDefaultText: true},
	}, fetchRun)
	run.Description = `Settings by kind: file path, format; sqlite path; postgres host, port, database, username, sslMode (secret: password);
http url, format, jsonPath, paging (secrets by auth mode). docs/sources.md has them all. Ctrl-C cancels.

With --json the outcome is one object; the rows are in it under "data", unless --out puts them into a file.`
	return group("fetch", "run a fetch on a runner, cancel one, look at those of the last day", run, fetchListCommand(), fetchTraceCommand(),
		remote("cancel", "cancel a running fetch", "DISPATCH", nil, func(c *cli.Context) error {
			id, err := oneArg(c, "DISPATCH")
			if err != nil {
				return err
			}
			if err := do(c, http.MethodDelete, "/api/fetches/"+url.PathEscape(id), nil, nil); err != nil {
				return err
			}
			return say(c, map[string]string{"dispatchId": id}, "dispatch %s is asked to stop; whoever runs it is told the outcome", id)
		}))
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
	out := &output{c: c}
	if err := out.open(); err != nil {
		return err
	}
	run := &fetch{api: api, body: body, earlyID: c.Bool("early-id"), progress: newProgress(os.Stderr, c.Bool("quiet") || c.Bool("json"))}
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
	if err = out.finish(err); err != nil {
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
		fmt.Fprintf(os.Stderr, "notice: %s\n", process.Printable(n.Message))
	}
	switch {
	case c.Bool("quiet"):
	case result.RunnerID != "":
		fmt.Fprintf(os.Stderr, "%d rows, %s of Arrow in %d ms on runner %s; dispatch %s\n", result.Rows, size(result.Bytes), result.ElapsedMs, result.RunnerID, result.DispatchID)
	default:
		fmt.Fprintf(os.Stderr, "%s of %s; dispatch %s\n", size(result.WireBytes), out.format, result.DispatchID)
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
				return body, usagef("--set takes KEY=VALUE, such as --set path=/data/in.csv")
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
