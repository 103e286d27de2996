package e2e

import (
	"bufio"
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"

	"github.com/org-runink/runbus/tests/pgtest"
	"github.com/org-runink/runbus/tests/stack"
)

// What a process may have resident at most while it moves a result of any size.
const (
	planeMemory  = 200 << 20
	runnerMemory = 300 << 20
)

// bounded fails the test if a process ever had more memory resident than the requirements allow.
func bounded(t *testing.T, plane *stack.Plane, runner *stack.Runner) {
	t.Helper()
	ofPlane, ofRunner := plane.PeakMemory(t), runner.PeakMemory(t)
	t.Logf("peak resident memory: control plane %d MiB, runner %d MiB", ofPlane>>20, ofRunner>>20)
	if ofPlane > planeMemory {
		t.Errorf("the control plane had %d MiB resident, over %d", ofPlane>>20, planeMemory>>20)
	}
	if ofRunner > runnerMemory {
		t.Errorf("the runner had %d MiB resident, over %d", ofRunner>>20, runnerMemory>>20)
	}
}

// sumOfArrow reads an Arrow stream to its end; a stream without its end mark is an error.
func sumOfArrow(r io.Reader) (pgtest.Sum, error) {
	var sum pgtest.Sum
	end := &lastBytes{r: r}
	reader, err := ipc.NewReader(end)
	if err != nil {
		return sum, err
	}
	defer reader.Release()
	for reader.Next() {
		if err := sum.Add(reader.RecordBatch()); err != nil {
			return sum, err
		}
	}
	if err := reader.Err(); err != nil && !errors.Is(err, io.EOF) {
		return sum, err
	}
	if string(end.last) != "\xff\xff\xff\xff\x00\x00\x00\x00" {
		return sum, fmt.Errorf("the stream ends with % x, not with its end mark", end.last)
	}
	return sum, nil
}

// lastBytes remembers the last eight bytes that were read.
type lastBytes struct {
	r    io.Reader
	last []byte
}

func (l *lastBytes) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	l.last = append(l.last, p[max(n-8, 0):n]...)
	l.last = l.last[max(len(l.last)-8, 0):]
	return n, err
}

// Issue 2: 1,000,000 rows × 6 columns from PostgreSQL reach an Arrow file at the caller, none lost, with bounded memory.
func TestMillionRowsToAnArrowFile(t *testing.T) {
	t.Parallel()
	user := newLogin(t, "million")
	user.Exec(t, "DROP TABLE IF EXISTS large")
	postgres(t).MakeLarge(t, "large", pgtest.LargeRows)
	want := postgres(t).LargeSum(t, "large")
	if want.Rows != pgtest.LargeRows {
		t.Fatalf("the source has %d rows", want.Rows)
	}
	plane := stack.StartPlane(t, false, nil)
	runner := plane.StartRunner(t, "edge", nil)
	file := filepath.Join(t.TempDir(), "large.arrow")
	_, stderr, status := plane.Runink(t, user.args(t, "edge", "SELECT "+pgtest.LargeColumns+" FROM large", "--format", "arrow", "--out", file)...)
	if status != 0 {
		t.Fatalf("runink ended with status %d: %s", status, stderr)
	}
	bounded(t, plane, runner)
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got, err := sumOfArrow(bufio.NewReaderSize(f, 1<<20))
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("the file has %+v, the source %+v", got, want)
	}
	user.awaitGone(t)
	plane.Stop(t)
}

const smallRows = 20_000

// The same rows through the other formats: every value is the source's, NULL included.
func TestRowsAsTextAreTheSources(t *testing.T) {
	t.Parallel()
	user := newLogin(t, "texts")
	user.Exec(t, "DROP TABLE IF EXISTS small")
	postgres(t).MakeLarge(t, "small", smallRows)
	want := postgres(t).LargeSum(t, "small")
	plane := stack.StartPlane(t, true, nil)
	plane.StartRunner(t, "edge", nil)
	run := func(format string) []byte {
		t.Helper()
		file := filepath.Join(t.TempDir(), "small")
		_, stderr, status := plane.Runink(t, user.args(t, "edge", "SELECT "+pgtest.LargeColumns+" FROM small", "--format", format, "--out", file)...)
		if status != 0 {
			t.Fatalf("runink ended with status %d: %s", status, stderr)
		}
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}

	records, err := csv.NewReader(bytes.NewReader(run("csv"))).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	if head := strings.Join(records[0], ", "); head != pgtest.LargeColumns {
		t.Errorf("the header is %s", head)
	}
	var got pgtest.Sum
	for _, record := range records[1:] {
		addText(t, &got, record)
	}
	if got != want {
		t.Errorf("the CSV has %+v, the source %+v", got, want)
	}

	var rows []struct {
		ID     json.Number
		N      *json.Number
		X      *json.Number
		Amount *string
		At     *string
		Label  *string
	}
	if err := json.Unmarshal(run("json"), &rows); err != nil {
		t.Fatal(err)
	}
	got = pgtest.Sum{}
	for _, r := range rows {
		addText(t, &got, []string{r.ID.String(), text(r.N), text(r.X), text(r.Amount), text(r.At), text(r.Label)})
	}
	if got != want {
		t.Errorf("the JSON has %+v, the source %+v", got, want)
	}
}

// text is a value as a CSV field has it: NULL is empty.
func text[T ~string](v *T) string {
	if v == nil {
		return ""
	}
	return string(*v)
}

// addText adds a row of a CSV in the form of pgtest's checksum.
func addText(t *testing.T, sum *pgtest.Sum, cells []string) {
	t.Helper()
	for i, cell := range cells {
		switch {
		case cell == "":
			cells[i] = "~"
		case i == 2:
			x, err := strconv.ParseFloat(cell, 64)
			if err != nil {
				t.Fatal(err)
			}
			cells[i] = strconv.FormatFloat(x, 'f', -1, 64)
		case i == 4:
			at, err := time.Parse("2006-01-02 15:04:05.999999Z07:00", strings.Replace(cell, "T", " ", 1))
			if err != nil {
				t.Fatal(err)
			}
			cells[i] = strconv.FormatInt(at.UnixMicro(), 10)
		}
	}
	sum.AddText([]byte(strings.Join(cells, "|")))
}

// D15: a limit cuts the result, and a notice says so; a result that just fits has none.
func TestLimitsAreNoticed(t *testing.T) {
	t.Parallel()
	user := newLogin(t, "limits")
	plane := stack.StartPlane(t, true, nil)
	plane.StartRunner(t, "edge", nil)
	const query = "SELECT i, md5(i::text) AS m FROM generate_series(1, 50000) AS i"
	type result struct {
		Outcome string
		Rows    int64
		Bytes   int64
		Notices []struct{ Code, Message string }
		Data    []json.RawMessage
	}
	run := func(more ...string) (r result) {
		t.Helper()
		stdout, stderr, status := plane.Runink(t, user.args(t, "edge", query, append(more, "--json")...)...)
		if status != 0 {
			t.Fatalf("runink ended with status %d: %s", status, stderr)
		}
		if err := json.Unmarshal([]byte(stdout), &r); err != nil {
			t.Fatal(err)
		}
		if int64(len(r.Data)) != r.Rows {
			t.Errorf("%d rows came, the result says %d", len(r.Data), r.Rows)
		}
		return r
	}
	if r := run("--max-rows", "1234"); r.Rows != 1234 || len(r.Notices) != 1 || r.Notices[0].Code != "row_limit" || !strings.Contains(r.Notices[0].Message, "1234 rows") {
		t.Errorf("a limit of 1234 rows gave %d with %+v", r.Rows, r.Notices)
	}
	if r := run("--max-bytes", "1000000"); r.Rows == 0 || r.Rows >= 50000 || r.Bytes > 1_000_000 || r.Bytes < 900_000 || len(r.Notices) != 1 || r.Notices[0].Code != "byte_limit" {
		t.Errorf("a limit of 1,000,000 bytes gave %d rows of %d bytes with %+v", r.Rows, r.Bytes, r.Notices)
	}
	if r := run("--max-rows", "50000"); r.Rows != 50000 || len(r.Notices) != 0 {
		t.Errorf("a limit that just fits gave %d with %+v", r.Rows, r.Notices)
	}
	// Where rows alone are written, the notice comes beside them.
	for _, format := range []string{"csv", "arrow"} {
		_, stderr, status := plane.Runink(t, user.args(t, "edge", query, "--max-rows", "10", "--format", format, "--out", filepath.Join(t.TempDir(), "out"))...)
		if status != 0 || !strings.Contains(stderr, "notice: the result was cut at 10 rows") {
			t.Errorf("%s ended with status %d: %s", format, status, stderr)
		}
	}
	user.awaitGone(t)
}

// One row that is larger than the whole window and many times a chunk arrives as it is.
func TestRowLargerThanTheWindow(t *testing.T) { eachLink(t, rowLargerThanTheWindow) }

func rowLargerThanTheWindow(t *testing.T, link stack.Link) {
	user := newLogin(t, "wide")
	plane := stack.StartPlane(t, false, nil)
	runner := plane.StartLinked(t, link, "edge", nil)
	const wide = "SELECT string_agg(md5(i::text), '') AS v FROM generate_series(1, 400000) AS i" // 12.8 MB of hexadecimal digits
	var want string
	if err := user.admin.QueryRow(t.Context(), "SELECT v FROM ("+wide+") AS w").Scan(&want); err != nil {
		t.Fatal(err)
	}
	resp := plane.Admin.Send(t, t.Context(), http.MethodPost, "/api/fetches", user.body("edge", wide), arrowStream)
	defer resp.Body.Close()
	reader, err := ipc.NewReader(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Release()
	if !reader.Next() || reader.RecordBatch().Column(0).(*array.String).Value(0) != want {
		t.Errorf("the row is not the source's: %v", reader.Err())
	}
	if reader.Next() {
		t.Error("there is a second batch")
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Fatal(err)
	}
	if outcome := resp.Trailer.Get("Runbus-Outcome"); outcome != "completed" {
		t.Errorf("ended %s %s", outcome, resp.Trailer.Get("Runbus-Error"))
	}
	bounded(t, plane, runner)
}

const arrowStream = "application/vnd.apache.arrow.stream"

// stallFor is for how long the caller below takes nothing: longer than a runner waits for a replica that is silent. In the last
// standsFor of it the source stands.
const (
	stallFor  = 35 * time.Second
	standsFor = 10 * time.Second
)

// D15: a caller that stops reading stops the source, not the fetch: nothing piles up, and when it reads on all of it comes.
func TestCallerThatStopsReading(t *testing.T) {
	eachLink(t, callerThatStopsReading)
}

func callerThatStopsReading(t *testing.T, link stack.Link) {
	const rows = 1_500_000 // some 50 MB of digits that don't compress well
	user := newLogin(t, "slow")
	plane := stack.StartPlane(t, false, nil)
	runner := plane.StartLinked(t, link, "edge", nil)
	resp := plane.Admin.Send(t, t.Context(), http.MethodPost, "/api/fetches",
		user.body("edge", fmt.Sprintf("SELECT i, md5(i::text) AS m FROM (SELECT generate_series(1, %d) AS i) AS s", rows)), arrowStream)
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatal(resp.Status)
	}
	reader, err := ipc.NewReader(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Release()
	var n int64
	next := func() bool {
		if !reader.Next() {
			return false
		}
		n += reader.RecordBatch().NumRows()
		return true
	}
	next()

	// Not reading: soon the source stands, writing to a connection that nobody reads, and stays so.
	var running struct{ Rows int64 }
	began := time.Now()
	stands := began
	for time.Since(began) < stallFor || time.Since(stands) < standsFor {
		var list []struct{ Rows int64 }
		plane.Admin.Must(t, http.MethodGet, "/api/fetches/running", nil, &list)
		if len(list) != 1 {
			t.Fatalf("%d fetches run after %s", len(list), time.Since(began))
		}
		if list[0].Rows != running.Rows {
			running.Rows, stands = list[0].Rows, time.Now()
		}
		if time.Since(began) > stallFor+stack.Patience {
			t.Fatalf("the source never stands still: %d rows", running.Rows)
		}
		<-time.After(250 * time.Millisecond)
	}
	user.await(t, 1, "state = 'active' AND wait_event = 'ClientWrite'")
	if running.Rows > rows/2 {
		t.Errorf("%d rows of %d had come when the source stood still", running.Rows, rows)
	}
	bounded(t, plane, runner)

	for more := true; more; {
		more = next()
	}
	if err := reader.Err(); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Fatal(err)
	}
	if outcome := resp.Trailer.Get("Runbus-Outcome"); outcome != "completed" || n != rows {
		t.Errorf("%d rows of %d, ended %s %s", n, rows, outcome, resp.Trailer.Get("Runbus-Error"))
	}
	bounded(t, plane, runner)
	user.awaitGone(t)
}
