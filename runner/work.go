package runner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/seal"
	"github.com/org-runink/runbus/runner/policy"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// work is one assignment. It is either refused or run, then its result is delivered. Its memory is another one's afterwards, if all went well:
// then nobody has it any more who might still act (letGo).
type work struct {
	facts

	agent   *Agent
	sender  bus.Sender
	stream  chunks
	leaving outlet // to stream

	// The methods onSilence, over and progress, made once.
	silence func()
	acked   func(error)
	tells   func(phase runbusv1.Phase, message string, rows, bytes int64)

	holders atomic.Int32 // who has it: the goroutine that runs it, and the stream until it is over
}

// facts are what a work begins with anew.
type facts struct {
	id      string
	session string
	task    task
	began   time.Time     // when it was assigned
	ran     time.Duration // …and how long it took from then on; set when it has ended
	refused error         // why it got no slot; nil if it did
	startBy time.Duration // uptime after which it is not begun any more; with a slot only
	sealed  chan *runbusv1.SealedCredential
	ctx     context.Context //nolint:containedctx // the life of this work, cancelled by orders that come on the bus
	stop    context.CancelCauseFunc
	span    trace.Span
	lent    *lent
	space   *workspace // of the goroutine that runs it
	well    bool       // it gave a response
	spent   bool       // …which the control plane has, as far as the stream knows nothing else came of it

	// Guarded by works.mu. Both times are uptimes, 0 for none.
	deadline  time.Duration // it is stopped then
	keptUntil time.Duration // ended: its result is dropped then
	silent    bool          // nobody seems to wait for the result
	orphaned  bool          // ended, and silent
	delivered bool          // acknowledged, or given up
	shared    bool          // a goroutine beside its own was given it
	held      int64         // ended: bytes of chunks that wait for their acknowledgement
}

// lent is what a connector gets of a work. It may keep that, so it is never another work's.
type lent struct {
	tag   tagged
	log   slog.Logger
	base  *net.Dialer
	under policy.Fetch
	out   source.Output
}

// dial is Env.Dial.
func (l *lent) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	return source.GuardedDialBy(l.base, l.under.Dial)(ctx, network, addr)
}

// task is what an assignment asks for.
type task struct {
	kind, query       string
	settings          map[string]string
	limits            source.Limits
	credentialsFollow bool
	bundles           bool // small frames may leave together
	chunksTell        bool // …and a first chunk without a progress that says it
	whole             bool // …and all of it in one frame, if it is little
	scheme            bus.Scheme
}

func taskOf(m *runbusv1.RunnerWorkAssignment) task {
	req := m.GetRequest()
	t := task{
		kind: req.GetSource().GetKind(), query: req.GetQuery(), settings: req.GetSource().GetSettings(),
		limits:            source.Limits{MaxRows: req.GetMaxRows(), MaxBytes: req.GetMaxBytes()},
		credentialsFollow: m.GetCredentialsFollow(), bundles: m.GetBundles(), chunksTell: m.GetChunksTell(), scheme: bus.SchemeOf(m),
	}
	t.whole = m.GetWhole() && t.bundles && t.scheme == bus.SchemeXXH3 && !t.credentialsFollow
	return t
}

// workspace is what a goroutine that runs works has for what they send, one after the other: the bus has encoded a frame when it has taken it.
type workspace struct {
	accepted runbusv1.RunnerWorkAccepted
	progress runbusv1.RunnerWorkProgress
	update   runbusv1.RunFetchUpdate
	at       timestamppb.Timestamp
	chunk    runbusv1.RunnerWorkChunk
	digest   bus.Digest
	result   runbusv1.RunnerWorkResult
	outcome  runbusv1.RunnerWorkResult_Response
	response runbusv1.RunFetchResponse
	elapsed  durationpb.Duration
}

// forget drops what a work has left there.
func (m *workspace) forget() {
	m.digest.Close()
	m.digest = bus.Digest{}
	m.update.Message, m.chunk.ArrowIpc = "", nil
	m.result.Outcome, m.result.StreamSha256, m.result.RestXxh3 = nil, nil, nil
	m.response.Notices = nil
}

// log is that of the work.
func (w *work) log() *slog.Logger { return &w.lent.log }

// at is the control plane's time at that time here, in the workspace.
func (w *work) at(here time.Time) *timestamppb.Timestamp {
	t := w.agent.clock.at(here)
	w.space.at.Seconds, w.space.at.Nanos = t.Unix(), int32(t.Nanosecond()) // below 1e9
	return &w.space.at
}

// newWork is memory of a work that nobody has.
func newWork(a *Agent) *work {
	w := &work{agent: a}
	w.silence, w.acked, w.tells = w.onSilence, w.over, w.progress
	return w
}

// begin makes the work that of an assignment, which gets no slot if refused says why.
func (w *work) begin(m *runbusv1.RunnerWorkAssignment, from bus.Trace, began time.Time, refused error) {
	a := w.agent
	w.holders.Store(2)
	w.facts = facts{id: m.GetDispatchId(), session: m.GetSession(), task: taskOf(m), began: began, refused: refused}
	w.lent = &lent{tag: tagged{a.log.Handler(), w.id}, base: &a.dial}
	w.lent.log = *slog.New(&w.lent.tag)
	ctx, span, answers := a.startSpan(context.Background(), m, from)
	w.span = span
	w.ctx, w.stop = context.WithCancelCause(ctx)
	stream := bus.Opening{
		Dispatch: w.id, Session: w.session, Replica: m.GetReplica(), WindowBytes: m.GetWindowBytes(),
		Together: m.GetTogether(), Whole: w.task.whole, Trace: answers,
	}
	if w.task.credentialsFollow {
		w.sealed = make(chan *runbusv1.SealedCredential, 1)
	} else { // for `accepted` the control plane waits with the credentials
		stream.Bundle = w.task.bundles
	}
	if refused == nil {
		stream.OnOrphaned = w.silence
	}
	a.senders.OpenIn(&w.sender, stream, began)
	w.stream.begin(w.ctx, &w.sender, a.works.wakeStream, a.fit)
}

// forget drops what of a work is over, before its memory waits for another one.
func (w *work) forget() {
	w.facts, w.leaving = facts{}, outlet{}
	w.stream.drop()
}

// letGo says that one of the holders has done with the work. It reports whether its memory may be another one's: it was the last, and the
// work went as most do. One that was stopped, failed, or was looked at for its time may still be in somebody's hands; who else finds it
// among the jobs has the lock that takes it out of there.
func (w *work) letGo() bool { return w.holders.Add(-1) == 0 && w.well && w.spent && !w.shared }

// isRunning, ends, kept and look are called with works.mu.

func (w *work) isRunning() bool { return w.refused == nil && w.keptUntil == 0 }

// ends sets the deadline and returns it as an uptime.
func (w *work) ends(left time.Duration) time.Duration {
	w.deadline = max(w.began.Sub(processStart)+left, 1)
	return w.deadline
}

// endedAt is the uptime at which it ended.
func (w *work) endedAt() time.Duration { return w.began.Sub(processStart) + w.ran }

// kept says that the work has ended, and that its result waits for so long at most. It returns until when, as an uptime.
func (w *work) kept(delivery time.Duration) time.Duration {
	w.keptUntil = w.endedAt() + delivery
	return w.keptUntil
}

// look does what time brings, and returns the uptime at which it is to be called again, 0 for when works.wake is called.
func (w *work) look(now time.Duration) (next time.Duration) {
	switch {
	case w.keptUntil > now:
		return w.keptUntil
	case w.keptUntil > 0:
		w.shared = true
		w.agent.works.open.Go(w.sender.Close)
		return 0
	case w.deadline > now:
		next = w.deadline
	case w.deadline > 0:
		w.deadline = 0
		w.cancel(errDeadline())
	}
	late, at := w.stream.isLate(now)
	if late {
		w.shared = true
		w.agent.works.open.Go(w.stream.flushLate)
	}
	if at > 0 && (next == 0 || at < next) {
		next = at
	}
	return next
}

// cancel stops the work; the code of reason is the code of the result that confirms it.
func (w *work) cancel(reason *schemas.Error) { w.stop(reason) }

// The reasons for which a runner stops a work.
func errCancelled() *schemas.Error {
	return schemas.Errorf(schemas.CodeCancelled, "the fetch was cancelled")
}

func errDeadline() *schemas.Error {
	return schemas.Errorf(schemas.CodeDeadline, "the fetch ran out of time and was stopped").
		WithHint("ask for less, or for more time (timeout, --timeout)")
}

func errAborted() *schemas.Error {
	return schemas.Errorf(schemas.CodeCancelled, "the fetch was cancelled: its runner was told to stop")
}

func errProcessEnds() *schemas.Error {
	return schemas.Errorf(schemas.CodeRunnerLost, "the runner's process ended while it ran this fetch").
		WithHint("it is not run again by itself; start it again if the read may be repeated")
}

// do runs the work, or refuses it, and delivers the result. m is the work's until do returns.
func (w *work) do(m *workspace) {
	w.space, w.stream.space = m, m
	defer func() {
		w.space = nil
		m.forget()
		w.agent.works.leave(w)
	}()
	var result *runbusv1.RunnerWorkResult
	switch {
	case w.refused != nil:
		result = w.refuse(w.refused)
	case uptime() > w.startBy: // it came in time, and then the process, or the works before it, took too long: nobody counts on it
		result = w.refuse(schemas.ErrRunnerOffline(w.agent.ref.Runner, "it got to the work too late, and has not run it"))
	default:
		result = w.run()
	}
	silent := w.agent.works.ended(w, w.agent.waits.delivery) // first: whoever has the result may count on the slot
	w.deliver(result)
	if silent {
		w.forsaken()
	}
}

// refuse is the answer to an assignment that is not run. Nothing was touched.
func (w *work) refuse(reason error) *runbusv1.RunnerWorkResult {
	w.log().Info("work refused", "reason", reason)
	w.ran = time.Since(w.began)
	w.stop(nil)
	endSpan(w.span, 0, 0, reason)
	return &runbusv1.RunnerWorkResult{Outcome: &runbusv1.RunnerWorkResult_Error{Error: schemas.ToDetail(reason)}}
}

// run executes the work: accept, open the credentials, fetch, stream. It returns how that ended, for deliver.
func (w *work) run() *runbusv1.RunnerWorkResult {
	defer w.stop(nil)
	accepted := &w.space.accepted
	accepted.Pid, accepted.At = w.agent.pid(), w.at(w.began)
	err := w.sender.Send(w.ctx, accepted)
	if w.task.bundles && w.task.credentialsFollow {
		w.sender.Bundle()
	}
	w.space.digest.Scheme = w.task.scheme
	var response *runbusv1.RunFetchResponse
	if err == nil {
		response, err = w.recorded()
	}
	w.ran = time.Since(w.began)
	result := &w.space.result
	result.Started = true
	w.stream.sumInto(result)
	if err != nil {
		err = w.reason(err)
		result.Outcome = &runbusv1.RunnerWorkResult_Error{Error: schemas.ToDetail(err)}
		w.log().Warn("work failed", "error", err, "code", schemas.CodeOf(err), "after", w.ran)
	} else {
		response.Elapsed = &w.space.elapsed
		response.Elapsed.Seconds, response.Elapsed.Nanos = int64(w.ran/time.Second), int32(w.ran%time.Second)
		w.space.outcome.Response = response
		result.Outcome = &w.space.outcome
	}
	endSpan(w.span, response.GetRows(), response.GetBytes(), err)
	return result
}

// fetch runs the connector under the local policy. Whatever it does with the credentials ends when it returns.
func (w *work) fetch(under *policy.Fetch, secrets map[string]string) (response *runbusv1.RunFetchResponse, err error) {
	defer func() {
		if p := recover(); p != nil {
			w.log().Error("a connector panicked", "panic", p, "stack", stack())
			err = schemas.Errorf(schemas.CodeFailed, "the connector failed; the runner's log has the cause")
		}
	}()
	connector, err := w.agent.find(w.task.kind)
	if err != nil {
		return nil, err
	}
	if err := under.Start(w.task.settings); err != nil {
		return nil, err
	}
	stream := &w.stream
	leaving := &w.leaving
	leaving.stream, leaving.under = stream, under
	out := &w.lent.out
	out.Open(leaving, w.task.limits, w.tells)
	stream.counts = out
	defer stream.end()
	if w.log().Enabled(w.ctx, slog.LevelDebug) {
		w.log().LogAttrs(w.ctx, slog.LevelDebug, "work started", slog.String("source", connector.Kind()))
	}
	env := w.agent.env
	env.Log, env.Dial, env.Roots = w.log(), w.lent.dial, env.Roots.By(under.Path)
	ctx, span := w.startSource(connector.Kind())
	err = connector.Fetch(ctx, env, source.Request{
		Settings: w.task.settings, Secrets: secrets, Query: w.task.query,
	}, out)
	err = withoutSecrets(err, secrets)
	endSpan(span, out.Rows(), out.Bytes(), err)
	if err == nil && w.ctx.Err() != nil {
		err = context.Cause(w.ctx)
	}
	if err == nil {
		err = out.Close()
	}
	if err == nil {
		err = stream.finish()
	}
	if leaving.refusal != nil { // in the policy's words, whatever the connector made of them
		err = leaving.refusal
	}
	if err != nil {
		return nil, err
	}
	response = &w.space.response
	response.Rows, response.Bytes, response.WireBytes = out.Rows(), out.Bytes(), stream.total()
	response.Notices, response.RunnerPid = out.Notices(), w.agent.pid()
	return response, nil
}

// withoutSecrets is the second gate for what a connector says of its failure, should it have let a secret through. An error
// without a code is not the source's.
func withoutSecrets(err error, secrets map[string]string) error {
	if err == nil {
		return nil
	}
	var coded *schemas.Error
	if errors.As(err, &coded) || errors.Is(err, context.Canceled) {
		return source.Redact(err, secrets)
	}
	return schemas.Errorf(schemas.CodeFailed, "the fetch failed on the runner: %s", source.Redact(err, secrets).Error())
}

// secrets waits for the sealed bundle, if one follows, and opens it. caller is on whose behalf the work runs, if the bundle says.
func (w *work) secrets() (secrets map[string]string, caller *runbusv1.CallerSession, err error) {
	if !w.task.credentialsFollow {
		return nil, nil, nil
	}
	timer := time.NewTimer(w.agent.waits.credentials)
	defer timer.Stop()
	select {
	case sealed := <-w.sealed:
		bundle, err := w.agent.key.Open(seal.Context{
			Tenant: w.agent.ref.Tenant, Runner: w.agent.ref.Runner, Session: w.session, Dispatch: w.id,
		}, sealed)
		if err != nil {
			return nil, nil, schemas.Wrap(schemas.CodeFailed, err, "the sealed credentials do not open on this runner")
		}
		if caller := bundle.GetCaller(); caller != nil {
			if expires := caller.GetExpiresAt(); expires != nil && w.agent.clock.now().After(expires.AsTime()) {
				return nil, caller, schemas.Errorf(schemas.CodeForbidden, "the caller's session has expired")
			}
			w.log().Info("credentials opened", "caller", caller.GetPerson(), "role", caller.GetRole())
		}
		return bundle.GetSecrets(), bundle.GetCaller(), nil
	case <-timer.C:
		return nil, nil, schemas.Errorf(schemas.CodeFailed, "the credentials did not arrive within %s", w.agent.waits.credentials)
	case <-w.ctx.Done():
		return nil, nil, context.Cause(w.ctx)
	}
}

// progress is the Output's callback.
func (w *work) progress(phase runbusv1.Phase, message string, rows, bytes int64) {
	if phase == runbusv1.Phase_PHASE_DONE && message == "" || w.space == nil {
		return // the result says it, right after; or has said it, to a connector that goes on
	}
	if phase == runbusv1.Phase_PHASE_STREAMING && message == "" && w.task.chunksTell && w.stream.tells() {
		return
	}
	u := &w.space.update
	u.Phase, u.Message, u.Rows, u.Bytes, u.At = phase, message, rows, bytes, w.at(time.Now())
	w.space.progress.Update = u
	_ = w.sender.Send(w.ctx, &w.space.progress) // a lost progress is made good by the next
}

// reason is what the caller is told of err: why the work was stopped, if it was, else the source's own words.
func (w *work) reason(err error) error {
	if cause := context.Cause(w.ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	var known *schemas.Error
	if errors.As(err, &known) {
		return known
	}
	return schemas.Wrap(schemas.CodeFailed, err, fmt.Sprintf("the fetch failed on the runner: %v", err))
}

// deliver sends the last frame, and has over called when the control plane has it. A replica that is silent may only have been stopped
// for a while, and its caller waits: the result is kept for it as long as for any other.
func (w *work) deliver(result *runbusv1.RunnerWorkResult) {
	w.well = result.GetResponse() != nil
	w.sender.Finish(w.stream.last(result), result, w.acked)
	w.stream.forget()
	w.logDone(result.GetResponse())
}

// logDone says that a work went well, once the result is on its way.
func (w *work) logDone(r *runbusv1.RunFetchResponse) {
	if r == nil {
		return
	}
	works := w.agent.works
	if at := works.done.done(w.endedAt(), w.id, w.task.kind, r.GetRows(), r.GetBytes(), w.ran); at > 0 {
		works.wakeAt(at)
	}
}

// over ends the work, whose result was acknowledged if err is nil.
func (w *work) over(err error) {
	if err != nil {
		w.log().Error("outcome unknown to the control plane: the result was not acknowledged", "error", err)
	}
	w.spent = err == nil && w.sender.Spent()
	w.agent.works.delivered(w)
}

// onSilence is called when the waiting replica has not been heard for long: the source is stopped, or the result may have to go.
func (w *work) onSilence() {
	if w.agent.works.silence(w) {
		w.stop(schemas.Errorf(schemas.CodeOutcomeUnknown, "the waiting control plane has gone"))
		return
	}
	w.forsaken()
}

// forsaken drops the result that nobody waits for, if there are too many of those.
func (w *work) forsaken() {
	if !w.agent.works.orphan(w) {
		w.sender.Close()
	}
}
