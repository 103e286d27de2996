package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

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
