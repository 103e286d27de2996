package runner

import (
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	chain "github.com/org-runink/runbus/runner/journal"
)

// A state folder that can't be made is told before a start has to fail at it, in the start's words.
func TestDoctorOfAFolderThatCanNotBeMade(t *testing.T) {
	ca := newRunnerCA(t)
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	closed := filepath.Join(t.TempDir(), "closed")
	must(t, os.Mkdir(closed, 0o500))
	daily, single := filepath.Join(t.TempDir(), "daily"), filepath.Join(t.TempDir(), "single")
	must(t, os.WriteFile(daily, []byte("version: 1\ndefault: allow\nbudget: {perDay: 1GiB}\n"), 0o600))
	must(t, os.WriteFile(single, []byte("version: 1\ndefault: allow\nbudget: {perFetch: 1GiB}\n"), 0o600))
	ways := map[string]string{"a file in its way": filepath.Join(file, "a", "state")}
	if os.Geteuid() != 0 { // who may write everywhere
		ways["a folder of others"] = filepath.Join(closed, "a", "state")
	}
	for what, dir := range ways {
		t.Run("dialled, "+what, func(t *testing.T) {
			cfg := Config{StateDir: dir, Log: slog.New(newJournal()), Ticket: ca.ticket(patience)}
			d := Diagnose(t.Context(), cfg, DoctorOptions{})
			a, err := New(cfg)
			if err == nil {
				a.dialled.close()
				t.Fatal("it started")
			}
			if got := d.only(t, "state"); got.Verdict != CheckFail || got.Saw != err.Error() || got.Todo != hintOf(err) || !strings.Contains(got.Saw, "can't be made") {
				t.Errorf("%+v, and the start says %v", got, err)
			}
		})
		for needs, c := range map[string]struct {
			change  func(*Config)
			verdict Verdict
		}{
			"nothing":   {func(*Config) {}, CheckWarn},
			"its id":    {func(c *Config) { c.ID = "" }, CheckFail},
			"a journal": {func(c *Config) { c.Journal = JournalOn }, CheckFail},
			"counts":    {func(c *Config) { c.Policy = daily }, CheckFail},
			"no counts": {func(c *Config) { c.Policy = single }, CheckWarn},
		} {
			t.Run("dials, needs "+needs+", "+what, func(t *testing.T) {
				cfg := Config{StateDir: dir, ID: "edge", Addrs: []string{"127.0.0.1:1"}}
				c.change(&cfg)
				d := &doctor{cfg: cfg}
				if got := d.state(); got.verdict != c.verdict || !strings.Contains(got.saw, "can't be made") || got.todo == "" {
					t.Errorf("%+v", got)
				}
			})
		}
	}
	if _, err := os.Stat(filepath.Join(closed, "a")); !os.IsNotExist(err) {
		t.Errorf("something was made: %v", err)
	}
}

// Older files of a journal that were moved away, as the documentation has it, are no break; what was done to the rest is.
func TestDoctorOfAJournalWithoutItsBegin(t *testing.T) {
	dir := t.TempDir()
	j, err := chain.Open(JournalDir(dir), 1) // a file a record
	must(t, err)
	for range 4 {
		must(t, j.Append(t.Context(), chain.Record{Event: chain.EventStart, Dispatch: "d", Kind: "file"}, true))
	}
	must(t, j.Close())
	d := &doctor{cfg: Config{StateDir: dir}}
	if got := d.journal(); got.verdict != "" || !strings.Contains(got.saw, "whole: 4 records") {
		t.Fatalf("%+v", got)
	}
	names, err := fs.Glob(os.DirFS(JournalDir(dir)), "*.jsonl")
	must(t, err)
	must(t, os.Rename(filepath.Join(JournalDir(dir), names[0]), filepath.Join(t.TempDir(), names[0])))
	if got := d.journal(); got.verdict != "" || !strings.Contains(got.saw, "whole from record 2 on: 3 records") || !strings.Contains(got.saw, "not here") {
		t.Errorf("moved away: %+v", got)
	}
	must(t, os.Remove(filepath.Join(JournalDir(dir), names[2])))
	if got := d.journal(); got.verdict != CheckFail || !strings.Contains(got.saw, "not whole") {
		t.Errorf("one removed from the middle: %+v", got)
	}
}
