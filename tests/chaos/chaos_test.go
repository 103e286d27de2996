package chaos

import (
	"bufio"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
	"github.com/org-runink/runbus/tests/stack"
)

// asked is how a fetch ended for its caller.
type asked struct {
	status int
	last   stack.Line
}

// ask runs a fetch on the runner in the background.
func ask(t testing.TB, p *stack.Plane, id, timeout string) <-chan asked {
	t.Helper()
	c := make(chan asked, 1)
	go func() {
		f := p.Admin.Fetch(t, map[string]any{"runnerId": id, "source": map[string]any{"kind": "file"}, "timeout": timeout})
		c <- asked{f.Status, f.End()}
	}()
	return c
}

// Whatever a runner sends, its caller gets one clean outcome, and the control plane takes the next fetch.
func TestLyingRunners(t *testing.T) {
	p := stack.StartPlane(t, true, nil)
	r := newRogue(t, p, "rogue")
	junk := []byte("this is no Arrow stream")
	sum := sha256.Sum256(junk)
	none := sha256.Sum256(nil)
	for name, c := range map[string]struct {
		send    func(m *runbusv1.RunnerWorkAssignment)
		outcome string
		text    string
	}{
		"result before acceptance": {func(m *runbusv1.RunnerWorkAssignment) { r.send(t, r.ctl(m), result(m, 1, none[:])) }, "failed", "before it accepted"},
		"accepted twice": {func(m *runbusv1.RunnerWorkAssignment) {
			r.send(t, r.ctl(m), accepted(m, 1))
			r.send(t, r.ctl(m), accepted(m, 2))
			r.send(t, r.ctl(m), accepted(m, 2))
			r.send(t, r.ctl(m), result(m, 3, none[:]))
		}, "completed", ""},
		"no outcome": {func(m *runbusv1.RunnerWorkAssignment) {
			r.send(t, r.ctl(m), accepted(m, 1))
			r.send(t, r.ctl(m), &runbusv1.RunnerWorkResult{DispatchId: m.GetDispatchId(), Session: m.GetSession(), Seq: 2, Started: true})
		}, "failed", "neither a response nor an error"},
		"wrong checksum": {func(m *runbusv1.RunnerWorkAssignment) {
			r.send(t, r.ctl(m), accepted(m, 1))
			r.send(t, r.ctl(m), result(m, 2, sum[:]))
		}, "failed", "damaged"},
		"no Arrow": {func(m *runbusv1.RunnerWorkAssignment) {
			r.send(t, r.ctl(m), accepted(m, 1))
			r.send(t, r.data(m), chunk(m, 2, junk))
			r.send(t, r.ctl(m), result(m, 3, sum[:]))
		}, "failed", "not a valid Arrow stream"},
		"gap and giant number": {func(m *runbusv1.RunnerWorkAssignment) {
			r.send(t, r.ctl(m), accepted(m, 1))
			r.send(t, r.ctl(m), result(m, 1<<63, none[:]))
			r.send(t, r.ctl(m), failed(m, 2, "the rest"))
		}, "failed", "the rest"},
		"another's session": {func(m *runbusv1.RunnerWorkAssignment) {
			r.send(t, r.ctl(m), accepted(m, 1))
			forged := result(m, 2, none[:])
			forged.Session = schemas.NewID()
			r.send(t, r.ctl(m), forged)
			r.send(t, r.ctl(m), failed(m, 2, "mine"))
		}, "failed", "mine"},
	} {
		t.Run(name, func(t *testing.T) {
			var got asked
			for again := 0; ; again++ {
				r.beat(t)
				began := time.Now()
				ended := ask(t, p, "rogue", "30s")
				c.send(r.assignment(t))
				r.flush(t)
				got = <-ended
				if again == mostAgain || !unheard.MatchString(got.last.Message) || !stack.Excused(t, got.last.Message, began, time.Now(), 0) {
					break
				}
			}
			if got.status == http.StatusOK && got.last.Outcome != c.outcome || got.status != http.StatusOK && c.outcome == "completed" ||
				!strings.Contains(got.last.Message, c.text) {
				t.Errorf("BROKEN lies: status %d, outcome %q: %q", got.status, got.last.Outcome, got.last.Message)
			}
		})
	}
}

// A runner that floods, for a caller who takes nothing, fills no memory, keeps no other runner out, and its fetch ends at its deadline.
func TestFloodsHarmNobodyElse(t *testing.T) {
	p := stack.StartPlane(t, false, nil)
	file := rows(t, 1000)
	p.StartRunner(t, "honest", map[string]string{"RUNNER_FILE_ROOTS": filepath.Dir(file)})
	r := newRogue(t, p, "rogue")

	c, err := net.Dial("tcp", strings.TrimPrefix(p.HTTP, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	body := `{"runnerId":"rogue","source":{"kind":"file"},"timeout":"5s"}`
	if _, err := fmt.Fprintf(c, "POST /api/fetches HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		p.Admin.Token, len(body), body); err != nil {
		t.Fatal(err)
	}
	m := r.assignment(t)
	r.send(t, r.ctl(m), accepted(m, 1))
	text := strings.Repeat("x", 1000<<10)
	for seq := uint64(2); seq < 600; seq++ {
		r.send(t, r.ctl(m), &runbusv1.RunnerWorkProgress{
			DispatchId: m.GetDispatchId(), Session: m.GetSession(), Seq: seq,
			Update: &runbusv1.RunFetchUpdate{Phase: runbusv1.Phase_PHASE_QUERYING, Message: text},
		})
	}
	for range 30_000 {
		r.send(t, schemas.HeartbeatSubject(r.ref), r.heartbeat())
	}
	r.flush(t)
	began := time.Now()
	n, end := fetch(t, p, "honest", file)
	if n == 0 && unheard.MatchString(end.Message) && stack.Excused(t, end.Message, began, time.Now(), 0) { // and not by the flood
		n, end = fetch(t, p, "honest", file)
	}
	if n != 1000 || end.Outcome != "completed" {
		t.Errorf("the honest runner's fetch: %d rows, %+v", n, end)
	}
	dropped := func(reason string) bool {
		return regexp.MustCompile(`runbus_registry_dropped_total\{reason="` + reason + `"\} [1-9]`).MatchString(get(t, p, "/metrics"))
	}
	if !eventually(stack.Patience, func() bool { return dropped("flood") }) || dropped("overload") {
		t.Error("one runner's flood is not told from an overload")
	}
	give := time.Now().Add(stack.Patience)
	for {
		var running []struct{}
		p.Admin.Must(t, http.MethodGet, "/api/fetches/running", nil, &running)
		if len(running) == 0 {
			break
		}
		if time.Now().After(give) {
			t.Fatal("a fetch whose caller takes nothing never ends")
		}
		<-time.After(100 * time.Millisecond)
	}
	if peak := p.PeakMemory(t); peak > 400<<20 {
		t.Errorf("the control plane had %d MiB resident", peak>>20)
	}
}

// A link that is cut again and again while a result is under way loses no row and doubles none.
func TestRepeatedCutsLoseNoRow(t *testing.T) { stack.EachLink(t, repeatedCutsLoseNoRow) }

func repeatedCutsLoseNoRow(t *testing.T, link stack.Link) {
	const n = 24 << 10
	w := newWorld(t, sealed, []stack.Link{link}, few, longGrace())
	m := w.runners[0]
	j := &job{runner: m.id, rows: n, large: true, timeout: 10 * time.Minute, mustStart: true, mustComplete: true, each: func(row int) {
		if row%(n/4) == 1 {
			m.proxy.cut(false)
		}
	}}
	w.run([]*job{j}, nil)
	if source := w.origin.sum(j.marker); source == "" || j.sum != source {
		w.broken("rows", "the checksum of what came is %q, of the source %q: %s", j.sum, source, j)
	}
	w.remade(m, "again and again")
}

// rows writes a CSV file of n numbered rows.
func rows(t testing.TB, n int) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("id,text\n")
	for i := range n {
		fmt.Fprintf(&b, "%d,%x\n", i, sha256.Sum256([]byte{byte(i), byte(i >> 8), byte(i >> 16)}))
	}
	file := filepath.Join(t.TempDir(), "rows.csv")
	if err := os.WriteFile(file, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// fetch reads the file through the runner, and fails the test when one is missing, twice or out of order.
func fetch(t testing.TB, p *stack.Plane, id, file string) (n int, last stack.Line) {
	t.Helper()
	resp := p.Admin.Send(t, t.Context(), http.MethodPost, "/api/fetches", map[string]any{
		"runnerId": id, "source": map[string]any{"kind": "file", "settings": map[string]string{"path": file}}, "timeout": "80s",
	}, "application/x-ndjson")
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var l struct {
			stack.Line
			Detail string // of a problem
		}
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			t.Fatalf("%s: %v", lines.Bytes(), err)
		}
		if l.Type != "row" {
			last = l.Line
			last.Message = cmp.Or(last.Message, l.Detail)
			continue
		}
		var row struct{ ID int }
		if err := json.Unmarshal(l.Row, &row); err != nil || row.ID != n {
			t.Fatalf("row %s in place %d: %v", l.Row, n, err)
		}
		n++
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return n, last
}

// get is the text at a path that needs no session.
func get(t testing.TB, p *stack.Plane, path string) string {
	t.Helper()
	resp, err := http.Get(p.HTTP + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
