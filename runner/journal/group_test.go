package journal

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// A record is written as encoding/json would write it.
func TestRecordsAreWrittenAsJSON(t *testing.T) {
	texts := rapid.OneOf(rapid.Just(""), rapid.StringMatching(`[a-z<>&"\\]*`), rapid.String(), rapid.Just("\xff\u2028\n\x7f"))
	rapid.Check(t, func(t *rapid.T) {
		text := func(name string) string { return texts.Draw(t, name) }
		number := func(name string) int64 {
			return rapid.OneOf(rapid.Just(int64(0)), rapid.Int64()).Draw(t, name)
		}
		r := Record{
			Seq: rapid.Uint64().Draw(t, "seq"), Prev: zeroHash, At: time.Unix(number("at")%(1<<36), number("nano")%1e9).UTC(),
			Event: text("event"), Dispatch: text("dispatch"), Tenant: text("tenant"), Runner: text("runner"), Kind: text("kind"),
			Target: text("target"), Policy: text("policy"), Outcome: text("outcome"), Reason: text("reason"),
			Rules: rapid.SliceOf(texts).Draw(t, "rules"), Dialled: rapid.SliceOf(texts).Draw(t, "dialled"),
			Rows: number("rows"), Bytes: number("bytes"), BytesOut: number("out"), DurationMS: number("ms"),
			DroppedBytes: number("dropped"), DroppedSHA256: text("sum"),
		}
		if rapid.Bool().Draw(t, "caller") {
			r.Caller = &Caller{text("caller's tenant"), text("person"), text("role")}
		}
		if rapid.Bool().Draw(t, "query") {
			r.Query = &Query{text("word"), text("sha"), text("query's text")}
		}
		want, err := json.Marshal(r)
		if err != nil {
			t.Skip(err) // a year that JSON does not have
		}
		got, err := appendBody(nil, &r, []byte(r.Prev))
		if err != nil || string(got)+"}" != string(want) {
			t.Fatalf("%s, %v; want %s", got, err, want)
		}
	})
}

// Many at once end up in one chain, those that wait for the disk and the others.
func TestAGroupIsOneChain(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir, 5000)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			for k := range 10 {
				if err := j.Append(t.Context(), Record{Event: EventStart, Dispatch: strconv.Itoa(i)}, i%4 == 0); err != nil {
					t.Error(err)
				}
				if bad := k == 5 && i%7 == 0; bad { // does no harm to its neighbours
					if err := j.Append(t.Context(), Record{Event: EventStart, Reason: strings.Repeat("x", maxLine)}, false); err == nil {
						t.Error("a record that no reader takes was written")
					}
				}
			}
		})
	}
	wg.Wait()
	whole(t, dir, 640)
}

// Whoever got his answer before Close finds his record, and who comes after it is told.
func TestCloseFinishesAppends(t *testing.T) {
	dir := t.TempDir()
	j, err := Open(dir, 0)
	must(t, err)
	var wg sync.WaitGroup
	var mu sync.Mutex
	recorded := uint64(0)
	began := make(chan struct{}, 16)
	for range 16 {
		wg.Go(func() {
			for {
				if j.Append(t.Context(), Record{Event: EventStart}, false) != nil {
					return
				}
				mu.Lock()
				recorded++
				mu.Unlock()
				poke(began)
			}
		})
	}
	<-began
	must(t, j.Close())
	wg.Wait()
	r := whole(t, dir, recorded)
	if head, _, err := readHead(dir); err != nil || head != r.Last {
		t.Errorf("head %v, last %v, %v", head, r.Last, err)
	}
}

// A crash may cut what was written together anywhere: whatever is left is a chain, and goes on as one.
func TestACrashInAGroupIsMended(t *testing.T) {
	j := open(t, t.TempDir(), 0)
	put(t, j, 1, 2)
	before := j.Head()
	var group []*entry
	for i := range 5 {
		group = append(group, &entry{record: Record{Event: EventStart, Dispatch: strconv.Itoa(i)}})
	}
	size := j.tip.size
	must(t, j.exclusively(func() error { return j.write(group) }))
	text, err := os.ReadFile(filepath.Join(j.dir, fileName(1)))
	must(t, err)
	for length := int(size); length <= len(text); length++ {
		if around := text[max(0, length-2):min(length+1, len(text))]; length%41 != 0 && !bytes.Contains(around, []byte{'\n'}) {
			continue // enough to cut at and next to each line's end, and here and there in the middle
		}
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, fileName(1)), text[:length], 0o600))
		must(t, writeHead(dir, before))
		lines := uint64(bytes.Count(text[:length], []byte{'\n'}))
		if r := whole(t, dir, lines); r.Unfinished != (text[length-1] != '\n') {
			t.Fatalf("%d bytes: %+v", length, r)
		}
		again, err := Open(dir, 0)
		must(t, err)
		put(t, again, 8, 8)
		must(t, again.Close())
		more := uint64(1)
		if text[length-1] != '\n' { // recovered
			more++
		}
		whole(t, dir, lines+more)
	}
}

// appends has the test's binary do nothing but appendAll.
const appends = "RUNBUS_TEST_JOURNAL"

// fileLimit bounds the files of that process in bytes.
const fileLimit = appends + "_LIMIT"

// appendAll appends to the journal in the working folder, from many goroutines, until it is killed, and writes a line for each record when Append has returned: `<dispatch> ok` or `<dispatch>
// failed`.
func appendAll() {
	fail := func(err error) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if limit := os.Getenv(fileLimit); limit != "" {
		signal.Ignore(syscall.SIGXFSZ)
		n, err := strconv.ParseUint(limit, 10, 64)
		if err != nil {
			fail(err)
		}
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: n, Max: n}); err != nil {
			fail(err)
		}
	}
	j, err := Open(".", 20_000)
	if err != nil {
		fail(err)
	}
	var out sync.Mutex
	for i := range 16 {
		go func() {
			for k := 0; ; k++ {
				id := fmt.Sprintf("%d-%d-%d", os.Getpid(), i, k)
				verdict := "ok"
				if err := j.Append(context.Background(), Record{Event: EventStart, Dispatch: id}, i%5 == 0); err != nil {
					verdict = "failed"
				}
				out.Lock()
				fmt.Fprintln(os.Stdout, id, verdict)
				out.Unlock()
			}
		}()
	}
	select {}
}

// appender is a process that appends.
type appender struct {
	cmd *exec.Cmd
	out *bufio.Scanner
}

func startAppender(t *testing.T, dir string, more ...string) *appender {
	t.Helper()
	exe, err := os.Executable()
	must(t, err)
	a := &appender{cmd: exec.CommandContext(t.Context(), exe)}
	a.cmd.Env, a.cmd.Dir = append(os.Environ(), append(more, appends+"=yes")...), dir
	a.cmd.Stderr = os.Stderr
	out, err := a.cmd.StdoutPipe()
	must(t, err)
	a.out = bufio.NewScanner(out)
	must(t, a.cmd.Start())
	return a
}

// killAfter kills the process when it has got an answer for n records, and returns those that it was told are recorded. Others may be
// too.
func (a *appender) killAfter(t *testing.T, n int) (recorded []string, failed int) {
	t.Helper()
	for seen := 0; a.out.Scan(); seen++ {
		if seen == n {
			must(t, a.cmd.Process.Kill())
		}
		id, verdict, _ := strings.Cut(a.out.Text(), " ")
		switch verdict {
		case "ok":
			recorded = append(recorded, id)
		case "failed":
			failed++
		}
	}
	_ = a.cmd.Wait() // killed
	return recorded, failed
}

// dispatches are those of the journal, which is whole; a line that was not finished may stand at its end.
func dispatches(t *testing.T, dir string) []string {
	t.Helper()
	r, err := Verify(dir, VerifyOptions{})
	must(t, err)
	if !r.OK {
		t.Fatalf("%+v, break %v", r, r.Break)
	}
	var all []string
	must(t, List(dir, func(r Record, _ Anchor) error { all = append(all, r.Dispatch); return nil }))
	slices.Sort(all)
	return all
}

func expect(t *testing.T, all, want []string) {
	t.Helper()
	for _, id := range want {
		if _, ok := slices.BinarySearch(all, id); !ok {
			t.Errorf("record %s was confirmed and is not there", id)
		}
	}
	if len(slices.Compact(slices.Clone(all))) != len(all) {
		t.Error("a record is there twice")
	}
}

// Processes that share a folder are killed in the middle of their groups: what they were told is recorded is there, once, in one
// chain.
func TestKilledProcessesLeaveAChain(t *testing.T) {
	dir := t.TempDir()
	var want []string
	for round := range 5 {
		one, other := startAppender(t, dir), startAppender(t, dir)
		for _, a := range []*appender{one, other} {
			recorded, failed := a.killAfter(t, 100+37*round)
			if failed > 0 {
				t.Errorf("%d appends failed", failed)
			}
			want = append(want, recorded...)
		}
		expect(t, dispatches(t, dir), want)
	}
	j := open(t, dir, 0)
	must(t, j.Append(t.Context(), Record{Event: EventStart, Dispatch: "last"}, true))
	expect(t, dispatches(t, dir), append(want, "last"))
}

// When there is no room for all of a group, those who were told that they are recorded are, and the others are told.
func TestAGroupThatDoesNotFit(t *testing.T) {
	dir := t.TempDir()
	recorded, failed := startAppender(t, dir, fileLimit+"=10001").killAfter(t, 400)
	if len(recorded) == 0 || failed == 0 {
		t.Errorf("%d recorded, %d failed", len(recorded), failed)
	}
	expect(t, dispatches(t, dir), recorded)
	open(t, dir, 0)
	expect(t, dispatches(t, dir), recorded)
}
