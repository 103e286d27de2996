package bus_test

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// BenchmarkDispatch is the bus's part of small dispatches, a number of them in flight: assignment, accepted, a chunk, the result.
// `stream` sends the frames by Senders and Receivers, numbered, acknowledged and written by one goroutine; `plain` publishes the
// same frames from the goroutine of each work and loses what a cut loses.
func BenchmarkDispatch(b *testing.B) {
	server := bustest.Start(b)
	for _, inFlight := range []int{1, 16, 64} {
		for _, how := range []string{"plain", "stream"} {
			b.Run(fmt.Sprintf("%s/in-flight=%d", how, inFlight), func(b *testing.B) {
				l := newLoop(b, server, how == "stream")
				ids := make(chan string)
				ended := make(chan error, inFlight)
				cpu := cpuTime(b)
				b.ResetTimer()
				for range inFlight {
					go func() {
						var err error
						for id := range ids {
							if err == nil {
								err = l.dispatch(b.Context(), id)
							}
						}
						ended <- err
					}()
				}
				for i := range b.N {
					ids <- "d" + strconv.Itoa(i)
				}
				close(ids)
				for range inFlight {
					if err := <-ended; err != nil {
						b.Error(err)
					}
				}
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "dispatches/s")
				b.ReportMetric(float64(cpuTime(b)-cpu)/float64(b.N), "cpu-ns/op")
				b.StopTimer()
				stats := l.replica.NATS().Stats()
				b.ReportMetric(float64(stats.InMsgs)/float64(b.N), "msgs-in/op")
				b.ReportMetric(float64(stats.OutMsgs)/float64(b.N), "msgs-out/op")
				l.close(b)
			})
		}
	}
}

// cpuTime is what this process has used.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// loop is a runner that answers every assignment, and the replica that sends them.
type loop struct {
	stream    bool
	runner    *bus.Conn
	replica   *bus.Conn
	senders   *bus.Senders
	receivers *bus.Receivers
	works     chan work
	working   sync.WaitGroup
	failed    chan error

	delivering sync.WaitGroup
}

func newLoop(b *testing.B, server *bustest.Bus, stream bool) *loop {
	b.Helper()
	l := &loop{
		stream: stream, works: make(chan work, 1024), failed: make(chan error, 1),
		runner:  bus.NewConn(server.RunnerConn(b, edge, nats.ReconnectBufSize(-1), nats.WriteBufferSize(1))),
		replica: bus.NewConn(server.Conn(b, embedded.UserDispatch)),
	}
	var err error
	if l.senders, err = bus.NewSenders(l.runner, edge); err != nil {
		b.Fatal(err)
	}
	if l.receivers, err = bus.NewReceivers(l.replica); err != nil {
		b.Fatal(err)
	}
	if _, err := l.runner.Subscribe(schemas.WorkSubject(edge, session), l.assigned); err != nil {
		b.Fatal(err)
	}
	for range 64 {
		l.working.Go(func() {
			for w := range l.works {
				if err := l.work(w); err != nil {
					l.fail(err)
				}
			}
		})
	}
	for _, c := range []*bus.Conn{l.runner, l.replica} {
		if err := c.NATS().Flush(); err != nil {
			b.Fatal(err)
		}
	}
	return l
}

func (l *loop) close(b *testing.B) {
	b.Helper()
	close(l.works) // every dispatch has its result, so no more will come
	l.working.Wait()
	l.delivering.Wait()
	if err := l.senders.Close(); err != nil {
		b.Error(err)
	}
	if err := l.receivers.Close(); err != nil {
		b.Error(err)
	}
	l.runner.NATS().Close()
	l.replica.NATS().Close()
	select {
	case err := <-l.failed:
		b.Error(err)
	default:
	}
}

var rows = make([]byte, 1000)

func (l *loop) assigned(msg *nats.Msg) {
	err := bus.Assignments(msg, func(a *runbusv1.RunnerWorkAssignment, _ bus.Trace) {
		w := work{dispatch: a.GetDispatchId(), replica: a.GetReplica(), together: a.GetTogether()}
		if l.stream {
			w.sender = l.senders.Open(a.DispatchId, session, a.Replica, a.WindowBytes)
		}
		l.works <- w
	})
	if err != nil {
		l.fail(err)
	}
}

// work is an assignment with the stream of its result.
type work struct {
	dispatch, replica string
	together          bool
	sender            *bus.Sender
}

// work is the runner's part.
func (l *loop) work(w work) error {
	s := w.sender
	frames := []bus.Frame{
		&runbusv1.RunnerWorkAccepted{DispatchId: w.dispatch, Session: session, Seq: 1},
		&runbusv1.RunnerWorkChunk{DispatchId: w.dispatch, Session: session, Seq: 2, ArrowIpc: rows},
		&runbusv1.RunnerWorkResult{DispatchId: w.dispatch, Session: session, Seq: 3, Started: true},
	}
	if !l.stream {
		ctl := schemas.ResultCtlSubject(edge, w.replica, w.dispatch)
		data := schemas.ResultDataSubject(edge, w.replica, w.dispatch)
		for i, subject := range []string{ctl, data, ctl} {
			if err := l.runner.Publish(subject, frames[i]); err != nil {
				return err
			}
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s.Bundle()
	if w.together {
		s.Together()
	}
	for _, f := range frames[:2] {
		if err := s.Send(ctx, f); err != nil {
			return err
		}
	}
	l.delivering.Add(1)
	s.Deliver(&runbusv1.RunnerWorkResult{Started: true}, func(err error) {
		if err != nil {
			l.fail(err)
		}
		l.delivering.Done()
	})
	return nil
}

func (l *loop) fail(err error) {
	select {
	case l.failed <- err:
	default:
	}
}

// assign sends the assignment.
func (l *loop) assign(r *bus.Receiver, a *runbusv1.RunnerWorkAssignment) error {
	if !l.stream {
		return l.replica.PublishWithReply(schemas.WorkSubject(edge, session), r.ReplySubject(), a)
	}
	body, err := proto.Marshal(a)
	if err != nil {
		return err
	}
	return r.Assign(bus.Trace{}, bus.Abilities{Assignments: true}, body)
}

// dispatch is the replica's part.
func (l *loop) dispatch(ctx context.Context, id string) error {
	r := l.receivers.Open(edge, session, id, 0)
	defer r.Close()
	a := &runbusv1.RunnerWorkAssignment{DispatchId: id, Session: session, Replica: l.receivers.Replica(), WindowBytes: r.Window()}
	if err := l.assign(r, a); err != nil {
		return err
	}
	for {
		f, err := r.Next(ctx)
		if err != nil {
			return err
		}
		if l.stream {
			r.Done(f)
		}
		if _, ok := f.(*runbusv1.RunnerWorkResult); ok {
			return nil
		}
	}
}

// BenchmarkSendUnwritten is 20,000 small chunks of one stream that come while the writer is held up: what one costs doesn't depend on how
// many there are before it.
func BenchmarkSendUnwritten(b *testing.B) {
	const chunks = 20_000
	p := newPair(b, bus.ProbeAfter(time.Hour), bus.KeepaliveEvery(time.Hour))
	rows := []byte("0123456789")
	for b.Loop() {
		s, r := p.open(schemas.NewID(), bus.MaxWindow)
		s.Bundle()
		free := p.senders.Busy()
		for range chunks {
			send(b, s, chunk(rows))
		}
		s.Close()
		free()
		r.Close()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/chunks, "ns/chunk")
}
