package runner

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"log/slog"
	"sync"
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

const (
	flushAfter  = 200 * time.Millisecond // rows wait at most so long for a chunk to fill
	smallResult = 32 << 10               // bytes for which no whole chunk is set aside
)

// work is one assignment. It is either refused or run, then its result is delivered.
type work struct {
	agent   *Agent
	id      string
	session string
	m       *runbusv1.RunnerWorkAssignment
	sealed  chan *runbusv1.SealedCredential
	sender  *bus.Sender
	ctx     context.Context //nolint:containedctx // the life of this work, cancelled by orders that come on the bus
	stop    context.CancelCauseFunc
	span    trace.Span
	log     *slog.Logger
	done    func() // logs that it is, once the result is on its way; may be nil

	// Guarded by works.mu: ended, and its replica is silent; acknowledged, or given up.
	orphaned, delivered bool
}

func newWork(a *Agent, m *runbusv1.RunnerWorkAssignment, from bus.Trace, log *slog.Logger) *work {
	w := &work{
		agent: a, id: m.GetDispatchId(), session: m.GetSession(), m: m, log: log,
		sealed: make(chan *runbusv1.SealedCredential, 1),
		sender: a.senders.Open(m.GetDispatchId(), m.GetSession(), m.GetReplica(), m.GetWindowBytes()),
	}
	if m.GetBundles() && !m.GetCredentialsFollow() { // for `accepted` the control plane waits with the credentials
		w.sender.Bundle()
	}
	ctx, span, answers := a.startSpan(context.Background(), m, from)
	w.span = span
	w.sender.Trace(answers)
	w.ctx, w.stop = context.WithCancelCause(ctx)
	return w
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

// refuse is the answer to an assignment that got no slot. Nothing was touched.
func (w *work) refuse(reason error) *runbusv1.RunnerWorkResult {
	w.stop(nil)
	endSpan(w.span, 0, 0, reason)
	return &runbusv1.RunnerWorkResult{Outcome: &runbusv1.RunnerWorkResult_Error{Error: schemas.ToDetail(reason)}}
}

// run executes the work: accept, open the credentials, fetch, stream. It returns how that ended, for deliver.
func (w *work) run() *runbusv1.RunnerWorkResult {
	defer w.stop(nil)
	started := time.Now()
	left := w.m.GetDeadline().AsTime().Sub(w.agent.clock.now())
	timer := time.AfterFunc(left, func() { w.cancel(errDeadline()) })
	defer timer.Stop()
	w.sender.OnOrphaned(func() {
		w.stop(schemas.Errorf(schemas.CodeOutcomeUnknown, "the waiting control plane has gone"))
	})

	err := w.sender.Send(w.ctx, &runbusv1.RunnerWorkAccepted{Pid: w.agent.pid(), At: timestamppb.New(w.agent.clock.now())})
	if w.m.GetBundles() {
		w.sender.Bundle()
	}
	var response *runbusv1.RunFetchResponse
	stream := newChunks(w.ctx, w.sender)
	if err == nil {
		response, err = w.recorded(stream)
	}
	result := &runbusv1.RunnerWorkResult{Started: true, StreamSha256: stream.sum()}
	defer func() { endSpan(w.span, response.GetRows(), response.GetBytes(), err) }()
	if err != nil {
		err = w.reason(err)
		result.Outcome = &runbusv1.RunnerWorkResult_Error{Error: schemas.ToDetail(err)}
		w.log.Warn("work failed", "error", err, "code", schemas.CodeOf(err), "after", time.Since(started))
	} else {
		response.Elapsed = durationpb.New(time.Since(started))
		result.Outcome = &runbusv1.RunnerWorkResult_Response{Response: response}
		w.done = func() {
			w.log.Info("work done", "source", w.m.GetRequest().GetSource().GetKind(),
				"rows", response.GetRows(), "bytes", response.GetBytes(), "after", response.GetElapsed().AsDuration())
		}
	}
	return result
}

// fetch runs the connector under the local policy. Whatever it does with the credentials ends when it returns.
func (w *work) fetch(stream *chunks, under *policy.Fetch, secrets map[string]string) (response *runbusv1.RunFetchResponse, err error) {
	defer func() {
		if p := recover(); p != nil {
			w.log.Error("a connector panicked", "panic", p, "stack", stack())
			err = schemas.Errorf(schemas.CodeFailed, "the connector failed; the runner's log has the cause")
		}
	}()
	req := w.m.GetRequest()
	connector, err := w.agent.find(req.GetSource().GetKind())
	if err != nil {
		return nil, err
	}
	if err := under.Start(req.GetSource().GetSettings()); err != nil {
		return nil, err
	}
	leaving := &outlet{stream: stream, permit: under.Send}
	out := source.NewOutput(leaving, source.Limits{MaxRows: req.GetMaxRows(), MaxBytes: req.GetMaxBytes()}, w.progress)
	stream.counts = out
	defer stream.end()
	w.log.Debug("work started", "source", connector.Kind())
	env := w.agent.env
	env.Log, env.Dial, env.Roots = w.log, source.GuardedDialBy(&w.agent.dial, under.Dial), env.Roots.By(under.Path)
	ctx, span := w.startSource(connector.Kind())
	err = connector.Fetch(ctx, env, source.Request{
		Settings: req.GetSource().GetSettings(), Secrets: secrets, Query: req.GetQuery(),
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
		err = stream.flush()
	}
	if leaving.refusal != nil { // in the policy's words, whatever the connector made of them
		err = leaving.refusal
	}
	if err != nil {
		return nil, err
	}
	return &runbusv1.RunFetchResponse{
		Rows: out.Rows(), Bytes: out.Bytes(), WireBytes: stream.total(), Notices: out.Notices(), RunnerPid: w.agent.pid(),
	}, nil
}

// withoutSecrets is the second gate for what a connector says of its failure, should it have let a secret through. An error
// without a code is not the source's.
func withoutSecrets(err error, secrets map[string]string) error {
	var coded *schemas.Error
	if err == nil || errors.As(err, &coded) || errors.Is(err, context.Canceled) {
		return source.Redact(err, secrets)
	}
	return schemas.Errorf(schemas.CodeFailed, "the fetch failed on the runner: %s", source.Redact(err, secrets).Error())
}

// secrets waits for the sealed bundle, if one follows, and opens it. caller is on whose behalf the work runs, if the bundle says.
func (w *work) secrets() (secrets map[string]string, caller *runbusv1.CallerSession, err error) {
	if !w.m.GetCredentialsFollow() {
		return map[string]string{}, nil, nil
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
			w.log.Info("credentials opened", "caller", caller.GetPerson(), "role", caller.GetRole())
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
	if phase == runbusv1.Phase_PHASE_DONE && message == "" {
		return // the result says it, right after
	}
	_ = w.sender.Send(w.ctx, &runbusv1.RunnerWorkProgress{Update: &runbusv1.RunFetchUpdate{
		Phase: phase, Message: message, Rows: rows, Bytes: bytes, At: timestamppb.New(w.agent.clock.now()),
	}}) // a lost progress is made good by the next
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

// deliver sends the last frame and waits until the control plane has it. A replica that is silent may only have been stopped
// for a while, and its caller waits: the result is kept for it as long as for any other.
func (w *work) deliver(result *runbusv1.RunnerWorkResult) {
	defer w.sender.Close()
	ctx, cancel := context.WithTimeout(context.Background(), w.agent.waits.delivery)
	defer cancel()
	w.sender.OnOrphaned(nil)
	if result.GetStarted() {
		w.sender.OnOrphaned(func() {
			if !w.agent.works.orphan(w) {
				cancel()
			}
		})
	}
	err := w.sender.Send(ctx, result)
	if w.done != nil {
		w.done()
	}
	if err == nil {
		err = w.sender.Drain(ctx)
	}
	if err != nil {
		w.log.Error("outcome unknown to the control plane: the result was not acknowledged", "error", err)
	}
}

// chunks cuts the Arrow stream into frames. It is written by the connector and flushed by a timer, so it locks.
type chunks struct {
	ctx    context.Context //nolint:containedctx // an io.Writer has no other way to be cancelled
	sender *bus.Sender
	counts *source.Output // of what is written here; set before the first Write

	mu    sync.Mutex
	buf   []byte
	timer *time.Timer // sends what is buffered after flushAfter; nil until something was
	ended bool        // the timer does nothing any more
	hash  hash.Hash
	sent  int64
	err   error
}

func newChunks(ctx context.Context, s *bus.Sender) *chunks {
	return &chunks{ctx: ctx, sender: s, hash: sha256.New()}
}

// Write blocks while the window is full: that is how a slow caller slows the source down (SPEC D15).
func (c *chunks) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := len(p)
	for len(p) > 0 {
		if c.err != nil {
			return n - len(p), c.err
		}
		take := min(len(p), bus.ChunkBytes-len(c.buf))
		if len(c.buf) == 0 {
			c.arm()
		}
		if need := len(c.buf) + take; need > cap(c.buf) && need > smallResult {
			c.buf = append(make([]byte, 0, bus.ChunkBytes), c.buf...) // more is to be expected
		}
		c.buf, p = append(c.buf, p[:take]...), p[take:]
		if len(c.buf) == bus.ChunkBytes {
			c.send()
		}
	}
	return n, c.err
}

func (c *chunks) flush() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.send()
	return c.err
}

// send sends what is buffered; mu is held.
func (c *chunks) send() {
	if len(c.buf) == 0 || c.err != nil {
		return
	}
	c.hash.Write(c.buf)
	c.sent += int64(len(c.buf))
	c.err = c.sender.Send(c.ctx, &runbusv1.RunnerWorkChunk{ArrowIpc: c.buf, Rows: c.counts.Rows(), Bytes: c.counts.Bytes()})
	c.buf = c.buf[:0]
	if c.timer != nil {
		c.timer.Stop()
	}
}

// arm makes sure that what is buffered from now on is sent in time; mu is held.
func (c *chunks) arm() {
	switch {
	case c.ended:
	case c.timer == nil:
		c.timer = time.AfterFunc(flushAfter, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			if !c.ended {
				c.send()
			}
		})
	default:
		c.timer.Reset(flushAfter)
	}
}

// end stops the timer: nothing is sent by it afterwards.
func (c *chunks) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	if c.timer != nil {
		c.timer.Stop()
	}
}

func (c *chunks) sum() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hash.Sum(nil)
}

func (c *chunks) total() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sent
}
