package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/runner/journal"
)

func journalCommand() *cli.Command {
	common := []cli.Flag{
		stateDirFlag(),
		&cli.StringFlag{Name: "dir", Usage: "folder of the journal, or of a copy (default: journal in the state folder)"},
		&cli.BoolFlag{Name: "json", Usage: "print JSON"},
	}
	return &cli.Command{
		Name: "journal", Usage: "read and check this host's journal of fetches", OnUsageError: usage, HideHelpCommand: true, Action: incomplete,
		Subcommands: []*cli.Command{
			{
				Name: "verify", Usage: "tell whether the journal is whole and unchanged", OnUsageError: usage,
				Description: "The file `head` of the folder names the last record, so a cut end is found. Who can write the folder can make all of it anew: against that,\n" +
					"keep what verify prints as `last` elsewhere (the control plane has one of the runner's last hello) and give it as --expect.\n\n" +
					"Exit status: 0 whole, 1 not, or it can't be read, 2 usage.",
				Flags: append([]cli.Flag{
					afterFlag(),
					&cli.StringFlag{Name: "expect", Usage: "NUMBER:SHA256 of a record that must be there"},
				}, common...),
				Action: verifyJournal,
			},
			{
				Name: "list", Usage: "print the records, oldest first", OnUsageError: usage,
				Description: "Records that can't be read are left out. That the journal is not whole is told on standard error, with where.\n\n" +
					"Exit status: 0 whole, 1 not, or it can't be read, 2 usage.",
				Flags: append([]cli.Flag{
					&cli.StringFlag{Name: "dispatch", Usage: "only of this dispatch"},
					&cli.IntFlag{Name: "limit", Usage: "only the last so many; 0 for all", Value: 0},
					afterFlag(),
				}, common...),
				Action: listJournal,
			},
		},
	}
}

func afterFlag() *cli.StringFlag {
	return &cli.StringFlag{Name: "after", Usage: "NUMBER:SHA256 of the last record of files that were moved away"}
}

func stateDirFlag() *cli.StringFlag {
	return &cli.StringFlag{
		Name: "state-dir", Usage: "where a dialled runner's certificate, a generated id, the journal and the counts of budgets are kept, mode 0700",
		EnvVars: []string{"CORE_RUNNER_STATE_DIR"}, Value: runner.DefaultStateDir,
	}
}

func journalDir(c *cli.Context) (string, error) {
	if c.Args().Present() {
		return "", usageError("it takes no arguments (see core-runner journal --help)")
	}
	dir := c.String("dir")
	if dir == "" {
		dir = runner.JournalDir(c.String("state-dir"))
	}
	if _, err := os.Stat(dir); err != nil {
		return "", fmt.Errorf("no journal: %w", err)
	}
	return dir, nil
}

func verifyJournal(c *cli.Context) error {
	dir, err := journalDir(c)
	if err != nil {
		return err
	}
	report, err := verified(c, dir)
	if err != nil {
		return err
	}
	if c.Bool("json") {
		err = printJSON(c, report)
	} else {
		text := fmt.Sprintf("whole: %d records in %d files, last %s\n", report.Records, report.Files, report.Last)
		if !report.OK {
			text = fmt.Sprintf("BROKEN at %s\n%d records before it hold together, last %s\n", report.Break, report.Records, report.Last)
		}
		if report.Recovered > 0 {
			text += fmt.Sprintf("%d lines that a crash had left unfinished were taken out and recorded\n", report.Recovered)
		}
		if report.Unfinished {
			text += "the last line has no end: a crash; the runner takes it out at its next start and records that\n"
		}
		_, err = fmt.Fprint(c.App.Writer, process.Printable(text))
	}
	if err == nil && !report.OK {
		return &runner.ExitError{Code: runner.ExitFailed, Err: errors.New("the journal is not whole")}
	}
	return err
}

// verified verifies the journal as the flags say.
func verified(c *cli.Context, dir string) (journal.Report, error) {
	var o journal.VerifyOptions
	for name, into := range map[string]*journal.Anchor{"after": &o.After, "expect": &o.Expect} {
		if text := c.String(name); text != "" {
			a, err := journal.ParseAnchor(text)
			if err != nil {
				return journal.Report{}, usageError("--" + name + ": " + err.Error())
			}
			*into = a
		}
	}
	return journal.Verify(dir, o)
}

// listed is a record with its hash.
type listed struct {
	journal.Record
	Hash string `json:"hash"`
}

func listJournal(c *cli.Context) error {
	dir, err := journalDir(c)
	if err != nil {
		return err
	}
	report, err := verified(c, dir)
	if err != nil {
		return err
	}
	records := []listed{}
	limit := c.Int("limit")
	err = journal.List(dir, func(r journal.Record, a journal.Anchor) error {
		if id := c.String("dispatch"); id != "" && id != r.Dispatch {
			return nil
		}
		records = append(records, listed{r, a.Hash})
		if limit > 0 && len(records) > limit {
			records = records[1:]
		}
		return nil
	})
	if err != nil {
		return err
	}
	if c.Bool("json") {
		err = printJSON(c, records)
	} else {
		_, err = fmt.Fprint(c.App.Writer, process.Printable(recordsText(records)))
	}
	if err == nil && !report.OK {
		return &runner.ExitError{Code: runner.ExitFailed, Err: fmt.Errorf(
			"the journal is not whole: BROKEN at %s; %d records before it hold together, what the list has from there on may be missing or changed", report.Break, report.Records)}
	}
	return err
}

// recordsText is a line a record.
func recordsText(records []listed) string {
	var out strings.Builder
	for _, r := range records {
		fmt.Fprintf(&out, "%d  %s  %-9s  %s", r.Seq, r.At.Format(time.RFC3339), r.Event, r.Dispatch)
		by := "-"
		if r.Caller != nil {
			by = r.Caller.Person
		}
		switch r.Event {
		case journal.EventStart:
			fmt.Fprintf(&out, "  by %s  %s %s", by, r.Kind, r.Target)
			if r.Query != nil {
				fmt.Fprintf(&out, "  %s %.12s…", r.Query.Word, r.Query.SHA256)
			}
		case journal.EventEnd:
			fmt.Fprintf(&out, "  %s  %d rows, %d bytes out", r.Outcome, r.Rows, r.BytesOut)
			if len(r.Rules) > 0 {
				fmt.Fprintf(&out, "  by %s", strings.Join(r.Rules, ", "))
			}
		case journal.EventRecovered:
			fmt.Fprintf(&out, "an unfinished line of %d bytes was taken out", r.DroppedBytes)
		}
		out.WriteByte('\n')
	}
	return out.String()
}
