// Package runner is the process that executes fetches inside a customer's network: it dials out, says hello, holds
// subscriptions on the bus, runs what is assigned to it through a connector of runner/source, and streams the result back.
// It holds no source configuration, stores no credential and schedules nothing (SPEC C14).
package runner

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/sync/errgroup"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/seal"
	chain "github.com/org-runink/runbus/runner/journal"
	"github.com/org-runink/runbus/runner/policy"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/all"
	"github.com/org-runink/runbus/runner/tunnel"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// waits is what an Agent waits for at most.
type waits struct {
	connect     time.Duration // one attempt of a link, until the server has let the runner in
	credentials time.Duration // that follow an assignment (DESIGN, "Dispatch")
	hello       time.Duration // the answer to one, and the begin of the session that it brings
	delivery    time.Duration // of the last acknowledgement of an ended work
	goodbye     time.Duration // each of the last words: results still to be acknowledged, goodbye
}

// Agent is one runner process. Make it with New, start it once with Run; Drain and Abort may come from any goroutine.
type Agent struct {
	cfg     Config
	cred    proof
	linked  *linked  // nil for a runner that dials
	dialled *dialled // nil for a runner that is not dialled
	child   *child   // nil for a runner that its control plane did not start
	ref     schemas.RunnerRef
	nonce   string // of this process
	key     *seal.Key
	tls     *tls.Config
	env     source.Env     // without Dial, which depends on the fetch
	dial    net.Dialer     // of sources
	tunnel  *tunnel.Dialer // of the control plane
	policy  *policy.Keeper
	journal *chain.Journal // from Run on; nil: none is kept
	find    func(kind string) (source.Connector, error)
	waits   waits
	times   []bus.Option // of the result streams; none in production
	retry   func(attempt int) time.Duration
	again   func(bound time.Duration) time.Duration // askAgain
	clocks  func() (time.Time, time.Duration)       // hostClocks
	log     *slog.Logger

	endCheck func() // of the journal that is kept

	fit     *processors  // nil unless Config.FitProcessors
	tracer  trace.Tracer // nil: nobody traces here
	conn    *bus.Conn
	link    atomic.Pointer[link]
	senders *bus.Senders // made at the first session
	works   *works
	session atomic.Pointer[session]
	clock   clock

	reporting sync.Mutex // held by report
	beats     uint64     // heartbeats sent, or tried to

	linkUp   chan struct{} // the connection is (again) established
	rehello  chan struct{} // the control plane wants another hello
	began    chan struct{} // a session has begun
	doubt    chan struct{} // the clock may be wrong
	stop     chan error    // an order that ends this process
	drainNow chan struct{}
	drained  sync.Once
	grace    time.Duration // of the drain; set before drainNow is closed
	abortNow chan struct{}
	aborted  sync.Once
}

// New checks cfg and makes the process's keys; nothing is dialled. Its errors are *ExitError of ExitConfig.
func New(cfg Config) (*Agent, error) {
	cred, tenant, err := cfg.prepare()
	if err != nil {
		return nil, err
	}
	tlsConfig, err := cfg.tlsConfig()
	if err != nil {
		return nil, err
	}
	way, err := cfg.tunnel()
	if err != nil {
		return nil, err
	}
	roots, err := source.OpenRoots(strings.Join(cfg.FileRoots, string(os.PathListSeparator)))
	if err != nil {
		return nil, &ExitError{Code: ExitConfig, Err: fmt.Errorf("RUNNER_FILE_ROOTS: %w", err)}
	}
	rules, err := policy.Open(cfg.Policy, cfg.StateDir, all.Kinds())
	if err != nil {
		_ = roots.Close()
		return nil, &ExitError{Code: ExitConfig, Err: fmt.Errorf("RUNNER_POLICY: %w", err)}
	}
	key, err := seal.NewKey()
	if err != nil {
		return nil, fmt.Errorf("sealing key: %w", err)
	}
	a := &Agent{
		cfg: cfg, cred: cred, key: key, tls: tlsConfig, find: cfg.Connectors, retry: retryDelay, again: askAgain, clocks: hostClocks, log: cfg.Log,
		waits:    waits{connect: connectTimeout, credentials: 5 * time.Second, hello: helloTimeout, delivery: 2 * time.Minute, goodbye: 5 * time.Second},
		ref:      schemas.RunnerRef{Tenant: tenant, Runner: cfg.ID},
		nonce:    schemas.NewID(),
		env:      source.Env{Roots: roots, Log: cfg.Log},
		dial:     net.Dialer{Timeout: 15 * time.Second},
		tunnel:   way,
		policy:   rules,
		linkUp:   make(chan struct{}, 1),
		rehello:  make(chan struct{}, 1),
		began:    make(chan struct{}, 1),
		doubt:    make(chan struct{}, 1),
		stop:     make(chan error, 1),
		drainNow: make(chan struct{}),
		abortNow: make(chan struct{}),
	}
	if _, none := cfg.Tracing.(noop.TracerProvider); cfg.Tracing != nil && !none {
		a.tracer = cfg.Tracing.Tracer(tracerName)
	}
	a.works = newWorks(a)
	switch { // last: it takes the state folder, or the lifeline
	case cfg.Lifeline > 0:
		if a.child, err = openChild(&a.cfg); err != nil {
			return nil, errors.Join(err, roots.Close())
		}
		a.cred, a.linked = a.child, &a.child.linked
		roots.Word(childFiles)
		rules.Word(childPolicy)
	case len(cfg.Addrs) == 0:
		if a.dialled, err = openDialled(&a.cfg); err != nil {
			return nil, errors.Join(err, roots.Close())
		}
		a.cred, a.linked = a.dialled, &a.dialled.linked
	}
	return a, nil
}

// ID is the runner's plain id; empty before a runner that is dialled has enrolled.
func (a *Agent) ID() string { return a.ref.Runner }

// Drain stops taking work: running works finish within Config.DrainGrace, then the runner says goodbye and Run returns nil
// (SPEC D14). It returns at once.
func (a *Agent) Drain() { a.drain(a.cfg.DrainGrace) }

func (a *Agent) drain(grace time.Duration) {
	a.drained.Do(func() {
		a.grace = grace
		close(a.drainNow)
	})
}

// Abort drains and cancels the running works (a second SIGTERM). It returns at once.
func (a *Agent) Abort() {
	a.Drain()
	a.aborted.Do(func() { close(a.abortNow) })
}

// Run connects, enrols and works until it is drained or told to stop; then it returns nil, or an error for ExitCode. Works that
// run then are cancelled and get five seconds to say so. A cancelled ctx ends it like that without a goodbye, with ctx's error.
// A lost link is mended for ever (SPEC E8).
func (a *Agent) Run(ctx context.Context) error {
	defer func() { _ = a.env.Roots.Close() }() // read only: nothing is lost
	a.log.Info(schemas.RoleRunnerText)
	switch {
	case a.dialled != nil:
		defer a.dialled.close()
	case a.child != nil:
		defer a.child.close()
	default:
		a.log.Info(schemas.EnrolmentText(a.addrsText(), a.ref.Runner))
	}
	a.logPolicy()
	if err := a.openJournal(); err != nil {
		return err
	}
	defer a.closeJournal()
	if a.cfg.FitProcessors {
		a.fit = fitProcessors(func() bool { return a.works.count() > 0 })
		defer a.fit.close()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	if a.linked != nil {
		if err := a.await(ctx, group); err != nil {
			cancel()
			if first := group.Wait(); errors.Is(err, context.Canceled) {
				err = first // a task ended, and the wait with it
			}
			return unlessDrained(err)
		}
	}
	dialling, stopDialling := context.WithCancel(context.Background())
	defer stopDialling()
	if err := a.connect(ctx, a.dialer(dialling), stopDialling); err != nil {
		cancel()
		_ = group.Wait()
		return err
	}
	defer func() {
		stopDialling()
		a.conn.NATS().Close()
		if l := a.link.Load(); l != nil {
			l.end()
		}
	}()
	defer func() {
		if a.senders != nil {
			_ = a.senders.Close()
		}
	}()

	group.Go(guard("enrolment", func() error { return a.keepEnrolled(ctx) }))
	group.Go(guard("heartbeat", func() error { return a.keepReporting(ctx) }))
	group.Go(guard("clock", func() error { return a.keepTime(ctx) }))
	group.Go(guard("renewal", func() error { return a.keepRenewing(ctx) }))
	group.Go(guard("drain", func() error { return a.waitForDrain(ctx) }))
	group.Go(guard("orders", func() error {
		select {
		case err := <-a.stop:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}))
	err := group.Wait()
	a.works.close(errProcessEnds())
	a.works.wait(a.waits.goodbye)
	return unlessDrained(err)
}

// unlessDrained is nil for the end in good order.
func unlessDrained(err error) error {
	if errors.Is(err, errDrained) {
		return nil
	}
	return err
}

// errDrained ends the tasks of a runner that stops in good order.
var errDrained = errors.New("drained")

// waitForDrain lets running works end, then takes leave.
func (a *Agent) waitForDrain(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-a.drainNow:
	}
	running := a.works.drain()
	a.log.Info("draining: new work is refused", "running", running, "grace", a.grace)
	a.report()
	grace := time.NewTimer(a.grace)
	defer grace.Stop()
	idle := a.works.idle()
	select {
	case <-idle:
	case <-ctx.Done():
		return ctx.Err()
	case <-a.abortNow:
		a.log.Warn("second signal: running works are cancelled", "running", a.works.count())
		a.works.cancelAll(errAborted())
	case <-grace.C:
		a.log.Warn("the drain grace is over: running works are cancelled", "running", a.works.count())
		a.works.cancelAll(errAborted())
	}
	stopped := time.NewTimer(2 * a.waits.goodbye)
	defer stopped.Stop()
	select {
	case <-idle:
	case <-ctx.Done():
		return ctx.Err()
	case <-stopped.C:
		a.log.Error("a work did not stop, or its result was not acknowledged", "running", a.works.count())
	}
	a.goodbye("drained")
	return errDrained
}

// goodbye is best effort: a control plane that misses it notices the closed link.
func (a *Agent) goodbye(reason string) {
	s := a.session.Load()
	if s == nil {
		return
	}
	err := a.conn.Publish(schemas.GoodbyeSubject(a.ref), &runbusv1.RunnerGoodbye{Session: s.id, ProcessNonce: a.nonce, Reason: reason})
	if err == nil {
		err = a.conn.NATS().FlushTimeout(a.waits.goodbye)
	}
	if err != nil {
		a.log.Warn("goodbye was not delivered", "error", err)
	}
}

// end stops the process with err; the first call wins.
func (a *Agent) end(err error) {
	select {
	case a.stop <- err:
	default:
	}
}

var processID = int64(os.Getpid())

func (a *Agent) pid() int64 { return processID }

// guard turns a panic of a task into its error.
func guard(task string, run func() error) func() error {
	return func() (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("%s: panic: %v\n%s", task, p, stack())
			}
		}()
		return run()
	}
}
