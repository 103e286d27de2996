// Package e2e shows the promises of the product on its real processes: a control plane, runners, the command line, a
// PostgreSQL.
package e2e

import (
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"

	"github.com/org-runink/runbus/tests/stack"
)

// together is how many tests a processor has side by side unless -parallel says otherwise. Each has a control plane and runners of its
// own, and waits nine tenths of the time: for answers, and for clocks that it is about.
const together = 3

func TestMain(m *testing.M) {
	flag.Parse()
	set := false
	flag.Visit(func(f *flag.Flag) { set = set || f.Name == "test.parallel" })
	if !set {
		if err := flag.Set("test.parallel", strconv.Itoa(together*runtime.GOMAXPROCS(0))); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	code := m.Run()
	stack.Remove()
	if err := stopPostgres(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// eachLink runs a test once for each way in which a runner is linked, side by side with all others.
func eachLink(t *testing.T, test func(t *testing.T, link stack.Link)) {
	t.Helper()
	t.Parallel()
	stack.EachLink(t, func(t *testing.T, link stack.Link) {
		t.Parallel()
		test(t, link)
	})
}

// source is an HTTP source that a test holds in its hands: it answers the first rows at once, the others when it is released.
type source struct {
	*httptest.Server
	opened  chan struct{} // a value for each request that came
	gone    chan struct{} // a value for each request whose client went away before the end
	release chan struct{}
	once    sync.Once
}

const (
	rowsBefore = 3
	rowsAfter  = 2
)

func newSource(t *testing.T) *source {
	t.Helper()
	s := &source{opened: make(chan struct{}, 64), gone: make(chan struct{}, 64), release: make(chan struct{})}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/x-ndjson")
		for i := range rowsBefore {
			fmt.Fprintf(w, "{\"n\":%d}\n", i)
		}
		_ = http.NewResponseController(w).Flush()
		s.opened <- struct{}{}
		select {
		case <-s.release:
		case <-r.Context().Done():
			s.gone <- struct{}{}
			return
		}
		for i := range rowsAfter {
			fmt.Fprintf(w, "{\"n\":%d}\n", rowsBefore+i)
		}
	}))
	t.Cleanup(func() { s.let(); s.Close() })
	return s
}

// let lets every request end.
func (s *source) let() { s.once.Do(func() { close(s.release) }) }

// body is a fetch of this source.
func (s *source) body(runner string) map[string]any {
	return map[string]any{"runnerId": runner, "source": map[string]any{"kind": "http", "settings": map[string]string{"url": s.URL, "format": "jsonl"}}}
}

// requests is how many requests ever came.
func (s *source) requests() int { return len(s.opened) }
