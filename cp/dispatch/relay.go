package dispatch

import (
	"context"
	"crypto/sha256"
	"hash"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// lostLinger is how long what a lost runner had sent may still arrive: its result may be among it.
const lostLinger = 200 * time.Millisecond

// stream is the result stream of one run, beside the watch over its runner.
type stream struct {
	receiver *bus.Receiver
	lost     <-chan string
	back     bus.Frame // taken, and given back
	closed   bool      // nothing comes any more
}

// arrival is a frame, or an error of the stream.
type arrival struct {
	frame bus.Frame
	err   error
}

// open begins to wait for the run's result.
func (d *Dispatcher) open(run *run, lost <-chan string) *stream {
	return &stream{receiver: d.receivers.Open(run.runner.Ref, run.runner.Session, run.id, window), lost: lost}
}

// take is what has arrived next, if anything has. When it has nothing, ready tells when to ask again.
func (s *stream) take() (arrival, bool) {
	if f := s.back; f != nil {
		s.back = nil
		return arrival{frame: f}, true
	}
	if s.closed {
		return arrival{}, false
	}
	f, err := s.receiver.Try()
	s.closed = err != nil && !isNoResponders(err)
	return arrival{f, err}, f != nil || err != nil
}

// giveBack has take return f again. What nobody takes stays in the receiver, within its window.
func (s *stream) giveBack(f bus.Frame) { s.back = f }

func (s *stream) ready() <-chan struct{} { return s.receiver.Ready() }

// said is a channel on which why waits to be received.
func said(why string) <-chan string {
	c := make(chan string, 1)
	c <- why
	return c
}

func (s *stream) close() { s.receiver.Close() }

// relay hands what arrives to the caller, one piece at a time, and gives the runner credit for what the caller took (SPEC
// D2, D15). It returns how the run ended; the sink is not called any more then.
func (d *Dispatcher) relay(ctx context.Context, run *run, stream *stream, accepted *runbusv1.RunnerWorkAccepted, sink Sink) ending {
	out := newDelivery(sink.Abandon)
	defer out.close()
	deadline := time.NewTimer(run.deadline.Sub(d.d.Now()))
	defer deadline.Stop()

	sum := sha256.New()
	calls := []call{{do: func() error {
		return sink.Accepted(Accepted{
			DispatchID: run.id, Tenant: run.caller.Tenant, RunnerID: run.runner.Ref.Runner, RunnerPID: accepted.GetPid(), At: d.d.Now(),
		})
	}}}
	var linger <-chan time.Time
	var why string
	lost := stream.lost
	for {
		ready := stream.ready()
		if out.busy {
			ready = nil
		} else {
			var end *ending
			if calls, end = d.gather(run, stream, sink, sum, calls); end != nil {
				return *end
			}
			if len(calls) > 0 {
				out.start(calls)
				calls, ready = nil, nil
			}
		}
		select {
		case <-ready:
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

// gatherBytes is how much of a result is handed over at once, beside the piece that is over it.
const gatherBytes = 64 << 10

// gather adds to calls what has arrived. It returns how the run ended once everything before that was handed over.
func (d *Dispatcher) gather(run *run, stream *stream, sink Sink, sum hash.Hash, calls []call) ([]call, *ending) {
	for bytes := 0; bytes < gatherBytes; {
		a, ok := stream.take()
		if !ok {
			break
		}
		if _, final := a.frame.(*runbusv1.RunnerWorkResult); (final || a.frame == nil && stream.closed) && len(calls) > 0 {
			if stream.closed = false; final {
				stream.giveBack(a.frame)
			}
			break
		}
		do, end := d.pass(run, stream, sink, sum, a)
		if end != nil {
			return nil, end
		}
		if do != nil {
			calls = append(calls, call{a.frame, do})
		}
		if chunk, ok := a.frame.(*runbusv1.RunnerWorkChunk); ok {
			bytes += len(chunk.GetArrowIpc())
		}
	}
	return calls, nil
}

// pass takes one arrival: it returns how the caller is told, or how the run ended.
func (d *Dispatcher) pass(run *run, stream *stream, sink Sink, sum hash.Hash, a arrival) (func() error, *ending) {
	switch f := a.frame.(type) {
	case *runbusv1.RunnerWorkChunk:
		sum.Write(f.GetArrowIpc())
		run.count(f.GetRows(), f.GetBytes())
		return func() error { return sink.Chunk(f.GetArrowIpc()) }, nil
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
		return func() error { return sink.Progress(update) }, nil
	case *runbusv1.RunnerWorkResult:
		stream.receiver.Done(f)
		return nil, ended(d.resultEnding(run, f, sum))
	case nil:
		if isNoResponders(a.err) {
			return nil, nil // of an assignment that was published again, and overtaken by its acceptance
		}
		return nil, ended(failure(errStreamEnded(a.err)))
	default: // a second acceptance says nothing new
		stream.receiver.Done(f)
	}
	return nil, nil
}

// call tells the caller something.
type call struct {
	frame bus.Frame // that is consumed when the call has returned; nil for none
	do    func() error
}

// delivery calls the sink in a goroutine of its own, one call at a time, so that a caller who doesn't take what comes can't keep
// a deadline or a cancel from reaching the runner. All but the goroutine belongs to relay.
type delivery struct {
	tasks   chan []call
	results chan error // room for one
	busy    bool
	frame   bus.Frame // the last one under way; nil for none
	abandon func()    // makes a call under way return
	over    atomic.Bool
	done    chan struct{}
}

func newDelivery(abandon func()) *delivery {
	o := &delivery{tasks: make(chan []call, 1), results: make(chan error, 1), abandon: abandon, done: make(chan struct{})}
	go func() {
		defer close(o.done)
		for calls := range o.tasks {
			o.results <- o.each(calls)
		}
	}()
	return o
}

// each makes the calls, up to the first that fails or that the end of the run overtakes.
func (o *delivery) each(calls []call) error {
	for _, c := range calls {
		if o.over.Load() {
			return nil
		}
		if err := c.do(); err != nil {
			return err
		}
	}
	return nil
}

// start begins some calls; no others may be under way.
func (o *delivery) start(calls []call) {
	o.busy, o.frame = true, nil
	for _, c := range calls {
		if c.frame != nil {
			o.frame = c.frame
		}
	}
	o.tasks <- calls
}

// finished ends the calls under way and returns the last frame among them.
func (o *delivery) finished() bus.Frame {
	f := o.frame
	o.busy, o.frame = false, nil
	return f
}

// close waits until the sink is not being called any more.
func (o *delivery) close() {
	if o.busy {
		o.over.Store(true)
		o.abandon()
	}
	close(o.tasks)
	<-o.done
}
