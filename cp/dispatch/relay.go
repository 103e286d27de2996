package dispatch

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// lostLinger is how long what a lost runner had sent may still arrive: its result may be among it.
const lostLinger = 200 * time.Millisecond

// stream is the result stream of one run.
type stream struct {
	receiver *bus.Receiver
	closed   bool // nothing comes any more
}

// arrival is a frame, or an error of the stream.
type arrival struct {
	frame bus.Frame
	err   error
}

// open begins to wait for the run's result, and to watch over its runner. Whatever the run may have to look at wakes it in one
// place, where the frames arrive.
func (d *Dispatcher) open(run *run) {
	ref, session := run.runner.Ref, run.runner.Session
	run.sum.Scheme = run.runner.Can.Scheme()
	run.stream.receiver = &run.receiver
	d.receivers.OpenAt(&run.receiver, ref, session, run.id, window)
	run.open.Store(true)
	d.d.Registry.WatchLoss(&run.watch, run.runner, run.nudge)
}

// shut ends what open began.
func (d *Dispatcher) shut(run *run) {
	run.open.Store(false)
	run.wakeAt.Store(0)
	d.d.Registry.Forget(&run.watch)
	run.stream.receiver.Close()
}

// take is what has arrived next, if anything has. When it has nothing, ready tells when to ask again.
func (s *stream) take() (arrival, bool) {
	if s.closed {
		return arrival{}, false
	}
	f, err := s.receiver.Try()
	s.closed = err != nil && !isNoResponders(err)
	return arrival{f, err}, f != nil || err != nil
}

func (s *stream) ready() <-chan struct{} { return s.receiver.Ready() }

// spared puts off the end of the wait for an acceptance by the time that this process stood still since the last call, by mostSpared all in all
// and never beyond the fetch's deadline, and reports whether that is still to come: a standstill is no fault of the runner's.
func (d *Dispatcher) spared(run *run, now int64) bool {
	stood := d.stood.Load()
	more := min(stood-run.stood, d.spare-run.spent)
	due := min(run.due+more, max(run.due, run.endsAt))
	run.stood, run.spent = stood, run.spent+more
	run.dueAt(due)
	return now < due
}

// dueAt sets the time, by Dispatcher.clock, at which the run is out of time.
func (r *run) dueAt(at int64) {
	r.due = at
	r.wakeAt.Store(at)
}

// overtaken returns how the run ended if something else than the runner's word ends it: the caller, the time, the loss of the
// runner.
func (d *Dispatcher) overtaken(run *run) *ending {
	if run.unwanted() {
		return ended(d.cancelled(run))
	}
	now := d.coarse.Load() // wrong by a tick at most, as the limits of time are, and by more only before the first look at this run
	if why, lost := run.watch.Lost(); lost {
		now = d.clock()
		switch {
		case !run.accepted || run.lingers > 0 && now >= run.lingers:
			return ended(lostEnding(run, why))
		case run.lingers == 0:
			run.lingers = now + int64(lostLinger)
			run.wakeAt.Store(min(run.due, run.lingers))
		}
	}
	switch {
	case now < run.due:
		return nil
	case run.accepted:
		return ended(d.outOfTime(run))
	case d.spared(run, now):
		return nil
	}
	return ended(d.notAccepted(run, min(d.d.AcceptWithin, run.timeout)))
}

// relay hands what arrives to the caller, one piece at a time, and gives the runner credit for what the caller took (SPEC
// D2, D15). It returns how the run ended; the sink is not called any more then.
func (d *Dispatcher) relay(run *run, sink Sink) ending {
	run.dueAt(run.endsAt)
	run.guard.sink = sink
	defer run.sum.Close()
	if end := d.tell(run, sink, nil, nil); end != nil {
		return *end
	}
	for {
		if end := d.overtaken(run); end != nil {
			return *end
		}
		a, ok := run.stream.take()
		if !ok {
			<-run.stream.ready()
			continue
		}
		if end := d.pass(run, sink, a); end != nil {
			return *end
		}
	}
}

// pass takes one arrival: it tells the caller, or returns how the run ended.
func (d *Dispatcher) pass(run *run, sink Sink, a arrival) *ending {
	switch f := a.frame.(type) {
	case *runbusv1.RunnerWorkChunk:
		run.sum.Add(f.GetArrowIpc())
		run.wire += int64(len(f.GetArrowIpc()))
		run.count(f.GetRows(), f.GetBytes())
		var first *runbusv1.RunFetchUpdate
		if run.runner.Can.ChunksTell && !run.streaming {
			run.streaming = true
			first = run.streamingFrom(f)
		}
		return d.tell(run, sink, first, f)
	case *runbusv1.RunnerWorkProgress:
		if f.Update == nil {
			f.Update = &runbusv1.RunFetchUpdate{}
		}
		if f.Update.GetAt() == nil {
			f.Update.At = timestamppb.New(d.d.Now())
		}
		f.Update.Rows, f.Update.Bytes = run.credible(f.Update.GetRows(), f.Update.GetBytes())
		run.count(f.Update.GetRows(), f.Update.GetBytes())
		switch f.Update.GetPhase() {
		case runbusv1.Phase_PHASE_CONNECTING:
			run.mark(PhaseConnecting, run.there)
		case runbusv1.Phase_PHASE_QUERYING:
			run.mark(PhaseQuerying, run.there)
		case runbusv1.Phase_PHASE_STREAMING:
			run.streaming = true
		}
		return d.tell(run, sink, nil, f)
	case *runbusv1.RunnerWorkResult:
		run.over = d.resultEnding(run, f, true)
		return &run.over
	case nil:
		if isNoResponders(a.err) {
			return nil // of an assignment that was published again, and overtaken by its acceptance
		}
		return ended(failure(errStreamEnded(a.err)))
	default: // a second acceptance says nothing new
		run.stream.receiver.Done(f)
	}
	return nil
}

// streamingFrom is the progress that the first chunk of a runner stands for which sends none with it (RunnerWorkAssignment.chunks_tell).
// It has the time of the first rows, or now.
func (r *run) streamingFrom(first *runbusv1.RunnerWorkChunk) *runbusv1.RunFetchUpdate {
	at := r.lastRow
	if at.IsZero() {
		at = r.now()
	}
	r.updateAt.Seconds, r.updateAt.Nanos = at.Unix(), int32(at.Nanosecond())
	u := &r.update
	u.Phase, u.At = runbusv1.Phase_PHASE_STREAMING, &r.updateAt
	u.Rows, u.Bytes = r.credible(first.GetRows(), first.GetBytes())
	return u
}

// tell has the caller take a frame, nil for the acceptance, and consumes it; first, if not nil, is the progress that it stands for. It
// returns how the run ended if that was meanwhile, or because the caller has gone.
//
// It is the one place where the memory of a chunk is given back: sink.Chunk has returned, and no guard, which consumes what comes while the
// sink still reads, ever stood for the run. Every other frame is the collector's.
func (d *Dispatcher) tell(run *run, sink Sink, first *runbusv1.RunFetchUpdate, frame bus.Frame) *ending {
	var err error
	if first != nil {
		d.called(run)
		err = sink.Progress(first)
		if end := run.returned(); end != nil { // a guard is for one call: it may not abandon the next
			return end
		}
	}
	if err == nil {
		d.called(run)
		err = run.give(sink, frame)
		if end := run.returned(); end != nil {
			return end
		}
	}
	switch {
	case err != nil:
		d.d.Log.Info("the caller has gone", "dispatch", run.id, "error", err)
		return ended(d.cancelled(run))
	case frame == nil:
	case run.hadGuard:
		run.stream.receiver.Done(frame)
	default:
		run.stream.receiver.Return(frame)
	}
	return nil
}

// give calls the sink with a frame, nil for the acceptance.
func (r *run) give(sink Sink, frame bus.Frame) error {
	switch f := frame.(type) {
	case *runbusv1.RunnerWorkChunk:
		return sink.Chunk(f.GetArrowIpc())
	case *runbusv1.RunnerWorkProgress:
		return sink.Progress(f.GetUpdate())
	}
	return sink.Accepted(Accepted{
		DispatchID: r.id, Tenant: r.caller.Tenant, RunnerID: r.runner.Ref.Runner, RunnerPID: r.pid, At: r.acceptedAt,
	})
}
