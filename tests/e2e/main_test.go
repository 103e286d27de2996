// Package e2e shows the promises of the product on its real processes: a control plane, runners, the command line, a
// PostgreSQL.
package e2e

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"testing"

	"github.com/org-runink/runbus/tests/stack"
)

func TestMain(m *testing.M) {
	code := m.Run()
	stack.Remove()
	if err := stopPostgres(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
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
