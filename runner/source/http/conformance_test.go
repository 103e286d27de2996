package httpsource_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"

	"github.com/org-runink/runbus/runner/source"
	httpsource "github.com/org-runink/runbus/runner/source/http"
	"github.com/org-runink/runbus/runner/source/sourcetest"
)

const token = "conformance-t0ken-9f3b"

// api is a server with a table behind every kind of paging.
type api struct {
	hanging chan struct{} // a value for each request of /long
	ended   chan struct{}
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Authorization") != "Bearer "+token {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	switch r.URL.Path {
	case "/few":
		_, _ = io.WriteString(w, `{"data":[{"id":1,"at":"2024-01-02T03:04:05+02:00","o":{"k": null}},{"id":2.5,"s":"x"}]}`)
	case "/empty":
		_, _ = io.WriteString(w, `{"data":[]}`)
	case "/csv":
		_, _ = io.WriteString(w, "a,b\n1,x\n")
	case "/many": // in pages of 5000
		from, _ := strconv.Atoi(r.URL.Query().Get("cursor"))
		to := min(from+5000, sourcetest.MinManyRows)
		_, _ = io.WriteString(w, `{"data":[`)
		for i := from; i < to; i++ {
			sep := ","
			if i == from {
				sep = ""
			}
			fmt.Fprintf(w, `%s{"n":%d,"s":"text %d"}`, sep, i, i)
		}
		next := "null"
		if to < sourcetest.MinManyRows {
			next = strconv.Itoa(to)
		}
		fmt.Fprintf(w, `],"next":%s}`, next)
	case "/broken":
		w.WriteHeader(http.StatusInternalServerError)
		fmt.Fprintf(w, "the table is gone, %s", r.Header.Get("Authorization"))
	case "/long":
		_, _ = io.WriteString(w, `{"data":[`)
		w.(http.Flusher).Flush()
		a.hanging <- struct{}{}
		<-r.Context().Done()
		a.ended <- struct{}{}
	}
}

func TestConformance(t *testing.T) {
	a := &api{hanging: make(chan struct{}, 10), ended: make(chan struct{}, 10)}
	s := httptest.NewServer(a)
	defer s.Close()
	read := func(path string, kv ...string) source.Request {
		r := source.Request{Settings: map[string]string{"url": s.URL + path, "jsonPath": "data", "auth": "bearer"}, Secrets: map[string]string{"token": token}}
		for i := 0; i < len(kv); i += 2 {
			r.Settings[kv[i]] = kv[i+1]
		}
		return r
	}
	long := read("/long")
	sourcetest.Exercise(t, httpsource.New(), sourcetest.Fixture{
		Cases: []sourcetest.Case{
			{Name: "json", Request: read("/few"), Schema: []string{"id: float64", "at: timestamp[us, tz=UTC]", "o: utf8", "s: utf8"},
				Rows: []string{`1 | 2024-01-02T01:04:05Z | {"k":null} | NULL`, "2.5 | NULL | NULL | x"}},
			{Name: "csv", Request: read("/csv", "format", "csv", "jsonPath", ""), Schema: []string{"a: int64", "b: utf8"}, Rows: []string{"1 | x"}},
			{Name: "cut", Request: read("/many", "paging", "cursor", "cursorPath", "next", "maxPages", "1", "columns", "n", "sampleRows", "1", "types", "n:text"),
				Schema: []string{"n: utf8"}, Rows: numbers(5000), Notices: []string{"maxPages=1"}},
		},
		Empty:      sourcetest.Case{Request: read("/empty")},
		Many:       read("/many", "paging", "cursor", "cursorPath", "next"),
		ManyRows:   sourcetest.MinManyRows,
		Broken:     read("/broken"),
		BrokenText: "the table is gone",
		Long:       &long,
		Running: func(ctx context.Context) error {
			select {
			case <-a.hanging:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		},
		Idle: func(context.Context) error {
			select {
			case <-a.hanging: // not seen by Running: none is left
				return errors.New("a request hangs")
			default:
			}
			return nil
		},
		Dials: func(host string) source.Request { return read("", "url", "http://"+net.JoinHostPort(host, "80")+"/") },
	})
	<-a.ended // the cancelled request has left the server
}

func numbers(n int) []string {
	rows := make([]string, n)
	for i := range rows {
		rows[i] = strconv.Itoa(i)
	}
	return rows
}
