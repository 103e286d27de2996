package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/org-runink/runbus/internal/leak"
)

func TestMain(m *testing.M) {
	if os.Getenv(appends) != "" {
		appendAll()
	}
	leak.Main(m)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, dir string, maxFile int64) *Journal {
	t.Helper()
	j, err := Open(dir, maxFile)
	must(t, err)
	t.Cleanup(func() { must(t, j.Close()) })
	return j
}

func put(t *testing.T, j *Journal, from, to int) {
	t.Helper()
	for i := from; i <= to; i++ {
		must(t, j.Append(t.Context(), Record{Event: EventStart, Dispatch: fmt.Sprintf("d%d", i)}, i%2 == 0))
	}
}

// whole verifies that the journal is, with n records.
func whole(t *testing.T, dir string, n uint64) Report {
	t.Helper()
	r, err := Verify(dir, VerifyOptions{})
	must(t, err)
	if !r.OK || r.Records != n || r.Last.Seq != n {
		t.Fatalf("%+v, break %v; want %d records", r, r.Break, n)
	}
	return r
}

// filled is a closed journal of 20 records in several files.
func filled(t *testing.T) (dir string, names []string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "journal")
	j, err := Open(dir, 1500)
	must(t, err)
	put(t, j, 1, 20)
	must(t, j.Close())
	if r := whole(t, dir, 20); r.Files < 3 {
		t.Fatalf("%d files", r.Files)
	}
	names, err = files(dir)
	must(t, err)
	return dir, names
}

func TestAppendAndVerify(t *testing.T) {
	dir, names := filled(t)
	for _, name := range append(names, "head", "lock") {
		info, err := os.Stat(filepath.Join(dir, name))
		must(t, err)
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", name, info.Mode())
		}
	}
	j := open(t, dir, 1500) // the chain goes on
	put(t, j, 21, 25)
	r := whole(t, dir, 25)
	if r.Last != j.Head() {
		t.Errorf("head %v, last %v", j.Head(), r.Last)
	}
	var seen []string
	must(t, List(dir, func(r Record, _ Anchor) error { seen = append(seen, r.Dispatch); return nil }))
	if len(seen) != 25 || seen[24] != "d25" {
		t.Errorf("listed %v", seen)
	}
	stop := errors.New("stop")
	if err := List(dir, func(Record, Anchor) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("%v", err)
	}
}

func TestAnEmptyJournalIsWhole(t *testing.T) {
	dir := t.TempDir()
	open(t, dir, 0)
	whole(t, dir, 0)
	if _, err := Verify(filepath.Join(dir, "nothing"), VerifyOptions{}); err == nil {
		t.Error("a folder that is not there was verified")
	}
}

// edit rewrites a file.
func edit(t *testing.T, file string, change func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(file)
	must(t, err)
	must(t, os.WriteFile(file, change(b), 0o600))
}

func encode(r Record) ([]byte, error) { return appendLine(nil, &r, []byte(r.Prev)) }

// forge is a line that holds by itself, in the place of another.
func forge(t *testing.T, r Record) []byte {
	t.Helper()
	line, err := encode(r)
	must(t, err)
	return line
}

// Check is for what is there: files that were moved away are no break, whatever was done to the others is, and it can be ended.
func TestCheckTakesWhatIsThere(t *testing.T) {
	dir, names := filled(t)
	for range 2 {
		if r, err := Check(t.Context(), dir); err != nil || !r.OK {
			t.Errorf("%+v, %v", r, err)
		}
		must(t, os.Remove(filepath.Join(dir, names[0])))
		if r, err := Check(t.Context(), dir); err != nil || !r.OK || r.Records == 0 {
			t.Errorf("without the first file: %+v, %v", r, err)
		}
		names = names[1:]
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Check(ctx, dir); !errors.Is(err, context.Canceled) {
		t.Errorf("ended: %v", err)
	}
	for range 2 { // the first record of what is left, then all but the head
		edit(t, filepath.Join(dir, names[0]), func(b []byte) []byte { return bytes.Replace(b, []byte(`"start"`), []byte(`"sturt"`), 1) })
		if r, err := Check(t.Context(), dir); err != nil || r.OK || r.Break == nil {
			t.Errorf("changed: %+v, %v", r, err)
		}
		for _, name := range names {
			must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
		}
	}
}

func TestVerifyFindsWhatWasDone(t *testing.T) {
	lines := func(b []byte) [][]byte { return bytes.SplitAfter(b, []byte("\n")) }
	for name, c := range map[string]struct {
		do   func(dir string, names []string)
		want string
	}{
		"a byte changed": {func(dir string, names []string) {
			edit(t, filepath.Join(dir, names[1]), func(b []byte) []byte { return bytes.Replace(b, []byte(`"start"`), []byte(`"sturt"`), 1) })
		}, ":1: record 7: it was changed"},
		"a record changed and its hash made to fit": {func(dir string, names []string) {
			edit(t, filepath.Join(dir, names[0]), func(b []byte) []byte {
				l := lines(b)
				r, _, err := decode(bytes.TrimSpace(l[1]))
				must(t, err)
				r.Dispatch = "other"
				l[1] = forge(t, r)
				return bytes.Join(l, nil)
			})
		}, ":3: record 3: it does not follow from the record before"},
		"the last record changed and its hash made to fit": {func(dir string, names []string) {
			edit(t, filepath.Join(dir, names[len(names)-1]), func(b []byte) []byte {
				l := lines(b)
				last := len(l) - 2
				r, _, err := decode(bytes.TrimSpace(l[last]))
				must(t, err)
				r.Dispatch = "other"
				l[last] = forge(t, r)
				return bytes.Join(l, nil)
			})
		}, "record 20: it is not the record that the file head names"},
		"a record removed": {func(dir string, names []string) {
			edit(t, filepath.Join(dir, names[0]), func(b []byte) []byte { l := lines(b); return bytes.Join(append(l[:1:1], l[2:]...), nil) })
		}, ":2: record 2: record 3 stands here: 1 before it were removed"},
		"a record put in twice": {func(dir string, names []string) {
			edit(t, filepath.Join(dir, names[0]), func(b []byte) []byte { l := lines(b); return bytes.Join(append([][]byte{l[0]}, l...), nil) })
		}, ":2: record 2: record 1 stands here a second time"},
		"another record put in": {func(dir string, names []string) {
			edit(t, filepath.Join(dir, names[0]), func(b []byte) []byte {
				l := lines(b)
				_, hash, err := decode(bytes.TrimSpace(l[0]))
				must(t, err)
				return bytes.Join([][]byte{l[0], forge(t, Record{Seq: 2, Prev: hash, Event: EventStart}), bytes.Join(l[1:], nil)}, nil)
			})
		}, ":3: record 3: record 2 stands here a second time"},
		"two records swapped": {func(dir string, names []string) {
			edit(t, filepath.Join(dir, names[0]), func(b []byte) []byte { l := lines(b); l[0], l[1] = l[1], l[0]; return bytes.Join(l, nil) })
		}, ":1: record 1: record 2 stands here"},
		"text put in": {func(dir string, names []string) {
			edit(t, filepath.Join(dir, names[0]), func(b []byte) []byte { return append([]byte("# nothing\n"), b...) })
		}, ":1: record 1: it is too short"},
		"a very long line put in": {func(dir string, names []string) {
			edit(t, filepath.Join(dir, names[0]), func(b []byte) []byte { return append([]byte(strings.Repeat("x", 3*maxLine)+"\n"), b...) })
		}, ":1: record 1: it does not end in a hash"},
		"the end cut off at a line": {func(dir string, names []string) {
			edit(t, filepath.Join(dir, names[len(names)-1]), func(b []byte) []byte { l := lines(b); return bytes.Join(l[:len(l)-2], nil) })
		}, "head: record 20: the end was cut off: records up to 20 were written"},
		"the end cut off in a line": {func(dir string, names []string) {
			edit(t, filepath.Join(dir, names[len(names)-1]), func(b []byte) []byte { return b[:len(b)-9] })
		}, "head: record 20: the end was cut off"},
		"the last file removed": {func(dir string, names []string) {
			must(t, os.Remove(filepath.Join(dir, names[len(names)-1])))
		}, "the end was cut off: records up to 20"},
		"all files removed": {func(dir string, names []string) {
			for _, name := range names {
				must(t, os.Remove(filepath.Join(dir, name)))
			}
		}, "head: record 1: the end was cut off: records up to 20"},
		"the first file removed": {func(dir string, names []string) {
			must(t, os.Remove(filepath.Join(dir, names[0])))
		}, "the journal begins with record 7"},
		"a middle file removed": {func(dir string, names []string) {
			must(t, os.Remove(filepath.Join(dir, names[1])))
		}, "record 7: its name says that it begins with record 13"},
		"a middle file cut in a line": {func(dir string, names []string) {
			edit(t, filepath.Join(dir, names[1]), func(b []byte) []byte { return b[:len(b)-9] })
		}, "its last line has no end, and another file follows"},
		"the head removed": {func(dir string, _ []string) { must(t, os.Remove(filepath.Join(dir, "head"))) }, "head: record 21: the file is missing"},
		"the head damaged": {func(dir string, _ []string) {
			edit(t, filepath.Join(dir, "head"), func([]byte) []byte { return []byte("x") })
		}, "head: record 21: the file head is damaged"},
		"the head put back": {func(dir string, _ []string) { must(t, writeHead(dir, Anchor{Seq: 7, Hash: zeroHash})) }, "record 7: it is not the record that the file head names"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, names := filled(t)
			c.do(dir, names)
			r, err := Verify(dir, VerifyOptions{})
			must(t, err)
			if r.OK || r.Break == nil || !strings.Contains(r.Break.String(), c.want) {
				t.Errorf("%v, want %q", r.Break, c.want)
			}
			if strings.HasPrefix(c.want, "head: record 21") { // of a head that tells nothing
				if _, err := Open(dir, 0); err == nil {
					t.Error("it was opened")
				}
				return
			}
			// A runner that goes on does not cover it up.
			j, err := Open(dir, 1500)
			must(t, err)
			put(t, j, 100, 110)
			must(t, j.Close())
			if r, err := Verify(dir, VerifyOptions{}); err != nil || r.OK && name != "the head put back" {
				t.Errorf("after more records: %+v, %v", r, err)
			}
		})
	}
}

func TestVerifyByAnchors(t *testing.T) {
	dir, names := filled(t)
	var all []Anchor
	must(t, List(dir, func(_ Record, a Anchor) error { all = append(all, a); return nil }))
	verify := func(o VerifyOptions) string {
		r, err := Verify(dir, o)
		must(t, err)
		return fmt.Sprint(r.Break)
	}
	if got := verify(VerifyOptions{Expect: all[11]}); got != "<nil>" {
		t.Error(got)
	}
	if got := verify(VerifyOptions{Expect: Anchor{Seq: 12, Hash: zeroHash}}); !strings.Contains(got, "made anew") {
		t.Error(got)
	}
	if got := verify(VerifyOptions{Expect: Anchor{Seq: 21, Hash: zeroHash}}); !strings.Contains(got, "record 21 was expected and is not there") {
		t.Error(got)
	}
	must(t, os.Remove(filepath.Join(dir, names[0]))) // archived
	if got := verify(VerifyOptions{After: all[5]}); got != "<nil>" {
		t.Error(got)
	}
	if got := verify(VerifyOptions{After: all[4]}); got == "<nil>" {
		t.Error("it goes on from another record")
	}
	for _, s := range []string{"", "1", "1:", "01:" + zeroHash, "-1:" + zeroHash, "1:" + strings.ToUpper(all[0].Hash[:63]) + "G", "1 :" + zeroHash} {
		if a, err := ParseAnchor(s); err == nil {
			t.Errorf("%q: %v", s, a)
		}
	}
	if a, err := ParseAnchor(all[3].String()); err != nil || a != all[3] {
		t.Errorf("%v, %v", a, err)
	}
}

// TestACrashInALineIsMendedAndRecorded cuts what a crash may have left at every length of an unfinished line.
func TestACrashInALineIsMendedAndRecorded(t *testing.T) {
	dir := t.TempDir()
	j, err := Open(dir, 0)
	must(t, err)
	put(t, j, 1, 3)
	must(t, j.Close())
	n := uint64(3)
	line := forge(t, Record{Seq: 99, Event: EventStart, Dispatch: "unfinished"})
	for _, length := range []int{1, len(line) / 2, len(line) - 1} {
		edit(t, filepath.Join(dir, fileName(1)), func(b []byte) []byte { return append(b, line[:length]...) })
		r, err := Verify(dir, VerifyOptions{})
		must(t, err)
		if !r.OK || !r.Unfinished {
			t.Errorf("before it is mended: %+v", r)
		}
		j, err := Open(dir, 0)
		must(t, err)
		must(t, j.Close())
		n++
		if r := whole(t, dir, n); r.Recovered != int(n-3) || r.Unfinished {
			t.Errorf("%+v", r)
		}
		must(t, List(dir, func(r Record, a Anchor) error {
			if a.Seq == n && (r.Event != EventRecovered || r.DroppedBytes != int64(length) || !isHash(r.DroppedSHA256)) {
				t.Errorf("%+v", r)
			}
			return nil
		}))
	}
}

func TestACrashBetweenTwoFiles(t *testing.T) {
	dir, _ := filled(t)
	must(t, os.WriteFile(filepath.Join(dir, fileName(21)), nil, 0o600))
	whole(t, dir, 20)
	put(t, open(t, dir, 1500), 21, 21)
	whole(t, dir, 21)
}

func TestProcessesShareAJournal(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	for range 4 {
		j := open(t, dir, 4000)
		for range 3 {
			wg.Go(func() {
				for i := range 20 {
					if err := j.Append(t.Context(), Record{Event: EventEnd}, i%3 == 0); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	wg.Wait()
	whole(t, dir, 240)
}

func TestAJournalThatCantBeWrittenSaysSoAndHeals(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "journal")
	j := open(t, dir, 0)
	put(t, j, 1, 1)
	away := dir + ".away"
	must(t, os.Rename(dir, away))
	must(t, os.WriteFile(dir, nil, 0o600))
	for _, durable := range []bool{false, true} {
		if err := j.Append(t.Context(), Record{Event: EventStart}, durable); err == nil {
			t.Error("recorded nowhere")
		}
	}
	must(t, os.Remove(dir))
	must(t, os.Rename(away, dir))
	put(t, j, 2, 2)
	whole(t, dir, 2)
	if err := j.Append(t.Context(), Record{Event: EventStart, Reason: strings.Repeat("x", maxLine)}, true); err == nil {
		t.Error("a record that no reader takes was written")
	}
	must(t, j.Close())
	if err := j.Append(t.Context(), Record{}, true); !errors.Is(err, ErrClosed) {
		t.Errorf("after close: %v", err)
	}
}

func TestWhatARecordTells(t *testing.T) {
	for want, settings := range map[string]map[string]string{
		"https://h:1/a/b":  {"url": "https://user:secret@h:1/a/b?token=secret#frag"},
		"https://h":        {"url": "https://h?token=secret"},
		"http://h/a@b":     {"url": "http://h/a@b"},
		"/srv/a.csv":       {"path": "/srv/a.csv"},
		"db:5432/sales":    {"host": "db", "port": "5432", "database": "sales", "username": "u"},
		"db":               {"host": "db"},
		"":                 {},
		"not a url secret": {"url": "not a url secret"},
	} {
		if got := Target(settings); got != want {
			t.Errorf("%v: %q, want %q", settings, got, want)
		}
	}
	q := DescribeQuery("select 'secret' from t", false)
	if q.Word != "SELECT" || len(q.SHA256) != 64 || q.Text != "" {
		t.Errorf("%+v", q)
	}
	if q := DescribeQuery("select 1", true); q.Text != "select 1" {
		t.Errorf("%+v", q)
	}
	if q := DescribeQuery("'secret-without-a-word", false); q.Word != "" {
		t.Errorf("%+v", q)
	}
	if q := DescribeQuery(strings.Repeat("s", 100), false); q.Word != "" {
		t.Errorf("a long first word may be anything: %+v", q)
	}
	if DescribeQuery("", true) != nil {
		t.Error("a query that is none")
	}
}

func FuzzDecode(f *testing.F) {
	for _, r := range []Record{{}, {Seq: 1, Prev: zeroHash, Event: EventStart, Dispatch: "d", Caller: &Caller{Person: "p"}, Query: &Query{Word: "SELECT"}}} {
		line, err := encode(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(bytes.TrimSuffix(line, []byte("\n")))
	}
	f.Add([]byte(`{"seq":1,"hash":"` + zeroHash + `"}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		r, hash, err := decode(line)
		if err != nil {
			return
		}
		// Whatever is taken has the hash that it says, and is written again as a line that is taken.
		if !bytes.HasSuffix(line, []byte(tail(hash))) {
			t.Errorf("%q has another hash than %s", line, hash)
		}
		again, err := encode(r)
		if err != nil {
			return // too long
		}
		if _, _, err := decode(bytes.TrimSuffix(again, []byte("\n"))); err != nil {
			t.Errorf("%q: %v", again, err)
		}
	})
}

// FuzzVerify has any bytes for a journal's file: it is opened or not, and never panics.
func FuzzVerify(f *testing.F) {
	line, err := encode(Record{Seq: 1, Prev: zeroHash, Event: EventStart})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(line)
	f.Add(append(bytes.Clone(line), line[:30]...))
	f.Add([]byte("\n\n{}"))
	f.Fuzz(func(t *testing.T, text []byte) {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, fileName(1)), text, 0o600))
		must(t, writeHead(dir, Anchor{Hash: zeroHash}))
		before, err := Verify(dir, VerifyOptions{})
		must(t, err)
		j, err := Open(dir, 0)
		must(t, err)
		put(t, j, 2, 2)
		must(t, j.Close())
		after, err := Verify(dir, VerifyOptions{})
		must(t, err)
		if before.OK != after.OK {
			t.Errorf("%q: %+v, then %+v: %v", text, before, after, after.Break)
		}
	})
}

// BenchmarkAppend is what a journal costs a fetch without credentials, twice, and one with.
func BenchmarkAppend(b *testing.B) {
	for name, durable := range map[string]bool{"written": false, "durable": true} {
		b.Run(name, func(b *testing.B) {
			j, err := Open(b.TempDir(), 0)
			if err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if err := j.Append(b.Context(), Record{Event: EventStart, Dispatch: "d"}, durable); err != nil {
					b.Fatal(err)
				}
			}
			if err := j.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}
