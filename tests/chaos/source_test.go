package chaos

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"testing"
	"time"
)

// origin is the source that all fetches read: it counts how often each was executed, by the marker and
// the attempt in its URL, and how many are being answered.
type origin struct {
	*httptest.Server
	mu    sync.Mutex
	count map[execution]int
	open  map[string]int
	sums  map[string]string // of large answers that were served whole
}

// execution is of one attempt of a fetch.
type execution struct {
	marker  string
	attempt int
}

func newOrigin(t testing.TB) *origin {
	t.Helper()
	o := &origin{count: map[execution]int{}, open: map[string]int{}, sums: map[string]string{}}
	o.Server = httptest.NewServer(http.HandlerFunc(o.serve))
	t.Cleanup(func() {
		o.CloseClientConnections()
		o.Close()
	})
	return o
}

// serve answers `rows` numbered rows, after `first` ms, with a pause of `pause` ms after each hundred and of `last` ms before the end;
// with `large` set, rows of a KiB that can't be compressed well, without a pause.
func (o *origin) serve(w http.ResponseWriter, r *http.Request) {
	marker := r.FormValue("marker")
	attempt, _ := strconv.Atoi(r.FormValue("attempt"))
	rows, _ := strconv.Atoi(r.FormValue("rows"))
	pause, _ := strconv.Atoi(r.FormValue("pause"))
	last, _ := strconv.Atoi(r.FormValue("last"))
	first, _ := strconv.Atoi(r.FormValue("first"))
	o.mu.Lock()
	o.count[execution{marker, attempt}]++
	o.open[marker]++
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.open[marker]--; o.open[marker] == 0 {
			delete(o.open, marker)
		}
	}()
	w.Header().Set("Content-Type", "application/x-ndjson")
	rest := func(ms int) bool {
		_ = http.NewResponseController(w).Flush()
		select {
		case <-time.After(time.Duration(ms) * time.Millisecond):
			return true
		case <-r.Context().Done():
			return false
		}
	}
	if r.FormValue("large") != "" {
		if sum, err := writeLarge(w, marker, rows); err == nil {
			o.mu.Lock()
			o.sums[marker] = sum
			o.mu.Unlock()
		}
		return
	}
	if first > 0 && !rest(first) {
		return
	}
	for i := range rows {
		if _, err := fmt.Fprintf(w, "{\"n\":%d,\"text\":\"%s\"}\n", i, rowText(i)); err != nil {
			return
		}
		if i%100 == 99 && pause > 0 && !rest(pause) {
			return
		}
	}
	if last > 0 {
		rest(last)
	}
}

// rowText is the text of the row with that number.
func rowText(i int) string { return strconv.FormatInt(int64(i)*int64(i)*7919, 16) }

// sum is the checksum of the large answer with this marker, if it was served whole.
func (o *origin) sum(marker string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.sums[marker]
}

// executed is how often this attempt of the fetch with this marker was.
func (o *origin) executed(marker string, attempt int) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.count[execution{marker, attempt}]
}

// busy is the markers that are being answered.
func (o *origin) busy() (markers []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for m := range o.open {
		markers = append(markers, m)
	}
	return markers
}
