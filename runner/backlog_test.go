package runner

import (
	"context"
	"crypto/rand"
	"errors"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Results that nobody acknowledges don't pile up for ever: the runner is busy until they are gone. They never keep a slot from new work whose
// last one only lacks its acknowledgement.
func TestUndeliveredResultsAreBounded(t *testing.T) {
	for _, slots := range []int{1, 300} {
		t.Run(strconv.Itoa(slots), func(t *testing.T) { undeliveredResultsAreBounded(t, slots) })
	}
}

func undeliveredResultsAreBounded(t *testing.T, slots int) {
	t.Helper()
	cp := newControlPlane(t)
	ended := make(chan struct{}, 256)
	p := cp.start(t, func(c *Config) { c.Concurrency = slots }, func(a *Agent) {
		a.waits.goodbye = time.Millisecond
		a.waits.delivery, a.times = time.Hour, []bus.Option{bus.OrphanAfter(time.Hour)} // however long the test takes
		playing(func(_ context.Context, _ source.Request, out *source.Output) error {
			defer func() { ended <- struct{}{} }()
			return oneRow(out)
		})(a)
	})
	silent := func(m *runbusv1.RunnerWorkAssignment) { m.Replica = schemas.NewID() } // nobody is there
	most := mostUndelivered + slots
	for range most {
		p.assign(silent)
		receive(t, ended, "end of a fetch")
		for p.works.count() > 0 {
			runtime.Gosched() // until its slot is free
		}
	}
	r, ok := p.assign(nil).next().(*runbusv1.RunnerWorkResult)
	want := schemas.ErrRunnerBacklog(edge.Runner, most)
	if got := r.GetError(); !ok || got.GetCode() != string(want.Code) || got.GetMessage() != want.Message {
		t.Errorf("answered with %v, want %q", r, want.Message)
	}
}

// Large results that nobody acknowledges are bounded by what they keep, long before they are many.
func TestUndeliveredBytesAreBounded(t *testing.T) {
	schema := arrow.NewSchema([]arrow.Field{{Name: "row", Type: arrow.BinaryTypes.Binary}}, nil)
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	row := make([]byte, bus.MaxWindow*7/8)
	_, _ = rand.Read(row) // zstd makes nothing of it
	b.Field(0).(*array.BinaryBuilder).Append(row)
	batch := b.NewRecordBatch()
	defer batch.Release()
	const enough = mostWindows*8/7 + 1
	cp := newControlPlane(t)
	ended := make(chan struct{}, 2*enough)
	p := cp.start(t, func(c *Config) { c.Concurrency = 1 }, func(a *Agent) {
		a.waits.goodbye = time.Millisecond
		a.waits.delivery, a.times = time.Hour, []bus.Option{bus.OrphanAfter(time.Hour)} // however long the test takes
		playing(func(_ context.Context, req source.Request, out *source.Output) error {
			if req.Query == "" {
				return oneRow(out)
			}
			defer func() { ended <- struct{}{} }()
			return errors.Join(out.Start(schema), out.Write(batch))
		})(a)
	})
	for range enough {
		p.assign(func(m *runbusv1.RunnerWorkAssignment) {
			m.Replica, m.WindowBytes, m.Request.Query = schemas.NewID(), bus.MaxWindow, "large" // nobody is there
		})
		receive(t, ended, "end of a large fetch")
		for p.works.count() > 0 {
			runtime.Gosched() // until its slot is free
		}
	}
	r, ok := p.assign(nil).next().(*runbusv1.RunnerWorkResult)
	if want := schemas.ErrRunnerBacklog(edge.Runner, enough).Message; !ok || r.GetError().GetMessage() != want {
		t.Errorf("answered with %v, want %q", r, want)
	}
}
