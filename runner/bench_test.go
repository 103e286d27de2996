package runner

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// BenchmarkDispatch is what a work costs at 64 in flight whose source does nothing and gives one row of 1 KiB. Server and
// replica are in this process too, so its figures are theirs as well: a profile tells the runner's part.
func BenchmarkDispatch(b *testing.B) {
	for name, journal := range map[string]string{"journal=off": JournalOff, "journal=on": JournalOn} {
		b.Run(name, func(b *testing.B) {
			schema, batch := kilobyte()
			cp := newControlPlane(b)
			p := cp.start(b, func(c *Config) {
				c.Concurrency, c.Journal = 1024, journal
				c.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
			}, playing(func(_ context.Context, _ source.Request, out *source.Output) error {
				if err := out.Start(schema); err != nil {
					return err
				}
				return out.Write(batch)
			}))
			b.ReportAllocs()
			b.SetParallelism(64)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					p.dispatch(b)
				}
			})
		})
	}
}

// kilobyte is one row of 1 KiB that zstd makes nothing of.
func kilobyte() (*arrow.Schema, arrow.RecordBatch) {
	schema := arrow.NewSchema([]arrow.Field{{Name: "row", Type: arrow.BinaryTypes.Binary}}, nil)
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	row := make([]byte, 1024)
	for i := range row {
		row[i] = byte(i * i >> 3)
	}
	b.Field(0).(*array.BinaryBuilder).Append(row)
	return schema, b.NewRecordBatch()
}

// dispatch runs one work to its result.
func (p *process) dispatch(b *testing.B) {
	now := time.Now()
	m := &runbusv1.RunnerWorkAssignment{
		DispatchId: "d" + schemas.NewID(), Session: p.session, Replica: p.cp.receivers.Replica(),
		Request:  &runbusv1.RunFetchRequest{Source: &runbusv1.Source{Kind: "test"}},
		AcceptBy: timestamppb.New(now.Add(patience)), Deadline: timestamppb.New(now.Add(time.Minute)),
		WindowBytes: bus.MaxWindow,
	}
	wholly(m)
	r := p.cp.receivers.Open(edge, p.session, m.GetDispatchId(), m.GetWindowBytes())
	defer r.Close()
	if err := p.cp.dispatch.PublishWithReply(schemas.WorkSubject(edge, p.session), r.ReplySubject(), m); err != nil {
		b.Error(err)
		return
	}
	for {
		f, err := r.Next(context.Background())
		if err != nil {
			b.Error(err)
			return
		}
		r.Done(f)
		if result, ok := f.(*runbusv1.RunnerWorkResult); ok {
			if result.GetResponse() == nil {
				b.Errorf("it failed: %v", result.GetError())
			}
			return
		}
	}
}
