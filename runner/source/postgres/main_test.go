package postgres

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"strconv"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/tests/pgtest"
)

// shared is the cluster of this package's tests.
var shared *pgtest.Cluster

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	var stop func() error
	var err error
	if shared, stop, err = pgtest.StartShared(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	if err := stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if err := leak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	return code
}

// request reads from c as its superuser; settings are pairs that change it. A value of "-" leaves a setting out.
func request(c *pgtest.Cluster, query string, settings ...string) source.Request {
	req := source.Request{
		Settings: map[string]string{"host": c.Host, "port": strconv.Itoa(c.Port), "database": c.Database, "username": c.User},
		Secrets:  map[string]string{"password": c.Password},
		Query:    query,
	}
	for i := 0; i < len(settings); i += 2 {
		into := req.Settings
		if settings[i] == "password" || settings[i] == "sslKey" {
			into = req.Secrets
		}
		if into[settings[i]] = settings[i+1]; settings[i+1] == "-" {
			delete(into, settings[i])
		}
	}
	return req
}

// result is what a fetch gave.
type result struct {
	schema  *arrow.Schema
	batches []arrow.RecordBatch
	out     *source.Output
	err     error
}

func (r *result) rows() (n int64) {
	for _, b := range r.batches {
		n += b.NumRows()
	}
	return n
}

// fetchAll runs a whole fetch through an Output and decodes its stream. It fails the test when memory is not given back.
func fetchAll(ctx context.Context, t testing.TB, req source.Request, limits source.Limits) *result {
	t.Helper()
	var stream bytes.Buffer
	mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
	defer mem.AssertSize(t, 0)
	r := &result{out: source.NewOutput(&stream, limits, nil)}
	given := source.Request{Settings: maps.Clone(req.Settings), Secrets: maps.Clone(req.Secrets), Query: req.Query}
	r.err = New().Fetch(ctx, source.Env{Dial: source.GuardedDial(&net.Dialer{}), Memory: mem}, given, r.out)
	if r.err != nil {
		return r
	}
	if err := r.out.Close(); err != nil {
		t.Fatalf("close the output: %v", err)
	}
	reader, err := ipc.NewReader(&stream)
	if err != nil {
		t.Fatalf("read the stream: %v", err)
	}
	defer reader.Release()
	r.schema = reader.Schema()
	for {
		batch, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return r
		}
		if err != nil {
			t.Fatalf("read the stream: %v", err)
		}
		batch.Retain()
		r.batches = append(r.batches, batch)
	}
}

// must is fetchAll for a fetch that has to go well.
func must(t testing.TB, req source.Request) *result {
	t.Helper()
	r := fetchAll(t.Context(), t, req, source.Limits{})
	if r.err != nil {
		t.Fatalf("%s: %v", req.Query, r.err)
	}
	return r
}
