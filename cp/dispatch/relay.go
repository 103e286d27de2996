package dispatch

import (
	"context"
	"crypto/sha256"
	"hash"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// lostLinger is how long what a lost runner had sent may still arrive: its result may be among it.
const lostLinger = 200 * time.Millisecond

// stream is the result stream of one run as a channel, beside the watch over its runner.
type stream struct {
	receiver *bus.Receiver
	arrivals chan arrival // unbuffered: what nobody takes stays in the receiver, within its window
	lost     <-chan string
	end      context.CancelFunc
	done     chan struct{}
}

// arrival is a frame, or an error of the stream.
type arrival struct {
	frame bus.Frame
	err   error
}

// open begins to wait for the run's result.
func (d *Dispatcher) open(run *run, lost <-chan string) *stream {
	ctx, end := context.WithCancel(context.Background())
	s := &stream{
		receiver: d.receivers.Open(run.runner.Ref, run.runner.Session, run.id, window),
		arrivals: make(chan arrival), lost: lost, end: end, done: make(chan struct{}),
	}
	go s.pump(ctx)
	return s
}

func (s *stream) pump(ctx context.Context) {
	defer close(s.done)
	for {
		f, err := s.receiver.Next(ctx)
		if ctx.Err() != nil {
			return
		}
		select {
		case s.arrivals <- arrival{f, err}:
		case <-ctx.Done():
			return
		}
		if err != nil && !isNoResponders(err) {
			return
		}
	}
}

// said is a channel on which why waits to be received.
func said(why string) <-chan string {
	c := make(chan string, 1)
	c <- why
	return c
}

func (s *stream) close() {
	s.end()
	<-s.done
	s.receiver.Close()
}

// relay hands what arrives to the caller, one piece at a time, and gives the runner credit for what the caller took (SPEC
// D2, D15). It returns how the run ended; the sink is not called any more then.
func (d *Dispatcher) relay(ctx context.Context, run *run, stream *stream, accepted *runbusv1.RunnerWorkAccepted, sink Sink) ending {
	out := newDelivery(sink.Abandon)
	defer out.close()
	deadline := time.NewTimer(run.deadline.Sub(d.d.Now()))
	defer deadline.Stop()

	sum := sha256.New()
	out.start(nil, func() error {
		return sink.Accepted(Accepted{
			DispatchID: run.id, Tenant: run.caller.Tenant, RunnerID: run.runner.Ref.Runner, RunnerPID: accepted.GetPid(), At: d.d.Now(),
		})
	})
	var linger <-chan time.Time
	var why string
	lost := stream.lost
	for {
		arrivals := stream.arrivals
		if out.busy {
			arrivals = nil
		}
		select {
		case a := <-arrivals:
			if end := d.pass(run, stream, out, sink, sum, a); end != nil {
				return *end
			}
		case err := <-out.results:
			frame := out.finished()
			if err != nil {
				d.d.Log.Info("the caller has gone", "dispatch", run.id, "error", err)
				return d.cancelled(run, stream)
			}
			if frame != nil {
				stream.receiver.Done(frame)
			}
		case why = <-lost:
			lost, linger = nil, time.After(lostLinger)
			stream.lost = said(why) // for stopWork, should the caller go now
		case <-linger:
			return lostEnding(run, why)
		case <-deadline.C:
			return d.outOfTime(run, stream)
		case <-ctx.Done():
			return d.cancelled(run, stream)
		case <-run.cancelled:
			return d.cancelled(run, stream)
		}
	}
}

// pass takes one arrival: it starts its delivery, or returns how the run ended.
func (d *Dispatcher) pass(run *run, stream *stream, out *delivery, sink Sink, sum hash.Hash, a arrival) *ending {
	switch f := a.frame.(type) {
	case *runbusv1.RunnerWorkChunk:
		sum.Write(f.GetArrowIpc())
		run.count(f.GetRows(), f.GetBytes())
		if f.GetRows() > 0 {
			run.mark(PhaseFirstRow, run.byRunner())
		}
		out.start(f, func() error { return sink.Chunk(f.GetArrowIpc()) })
	case *runbusv1.RunnerWorkProgress:
		update := f.GetUpdate()
		if update == nil {
			update = &runbusv1.RunFetchUpdate{}
		}
		if update.GetAt() == nil {
			update.At = timestamppb.New(d.d.Now())
		}
		run.count(update.GetRows(), update.GetBytes())
		switch update.GetPhase() {
		case runbusv1.Phase_PHASE_CONNECTING:
			run.mark(PhaseConnecting, run.byRunner())
		case runbusv1.Phase_PHASE_QUERYING:
			run.mark(PhaseQuerying, run.byRunner())
		}
		out.start(f, func() error { return sink.Progress(update) })
	case *runbusv1.RunnerWorkResult:
		stream.receiver.Done(f)
		return ended(d.resultEnding(run, f, sum))
	case nil:
		if isNoResponders(a.err) {
			return nil // of an assignment that was published again, and overtaken by its acceptance
		}
		return ended(failure(errStreamEnded(a.err)))
	default: // a second acceptance says nothing new
		stream.receiver.Done(f)
	}
	return nil
}

// delivery calls the sink in a goroutine of its own, one call at a time, so that a caller who doesn't take what comes can't keep
// a deadline or a cancel from reaching the runner. All but the goroutine belongs to relay.
type delivery struct {
	tasks   chan func() error
	results chan error // room for one
	busy    bool
	frame   bus.Frame // under way; nil for none
	abandon func()    // makes a call under way return
	done    chan struct{}
}

func newDelivery(abandon func()) *delivery {
	o := &delivery{tasks: make(chan func() error, 1), results: make(chan error, 1), abandon: abandon, done: make(chan struct{})}
	go func() {
		defer close(o.done)
		for task := range o.tasks {
			o.results <- task()
		}
	}()
	return o
}

// start begins one call; no other may be under way.
func (o *delivery) start(f bus.Frame, call func() error) {
	o.busy, o.frame = true, f
	o.tasks <- call
}

// finished ends the call under way and returns its frame.
func (o *delivery) finished() bus.Frame {
	f := o.frame
	o.busy, o.frame = false, nil
	return f
}

// close waits until the sink is not being called any more.
func (o *delivery) close() {
	if o.busy {
		o.abandon()
	}
	close(o.tasks)
	<-o.done
}
