package runner

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/runner/source/all"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	pingInterval   = 3 * time.Second // two unanswered end the link: the runner notices before the server does (DESIGN, Dispatch)
	maxPings       = 2
	connectTimeout = 10 * time.Second
	helloTimeout   = 5 * time.Second
	firstRetry     = 2 * time.Second // SPEC E8: within 5 s
	slowestRetry   = 20 * time.Second
	heartbeatEvery = 15 * time.Second // until the control plane says otherwise
)

// session is what one accepted hello gave.
type session struct {
	id        string
	heartbeat time.Duration
	subs      []*nats.Subscription
}

// connect opens the one connection of this process. It returns while the first attempt may still fail: nats.go goes on.
func (a *Agent) connect() error {
	tlsConfig, err := a.cfg.tlsConfig()
	if err != nil {
		return err
	}
	up := func(*nats.Conn) { signal(a.linkUp) }
	retry := newRetry()
	nc, err := nats.Connect(strings.Join(a.cfg.Addrs, ","),
		nats.Name(schemas.ConnectName(a.ref.Runner, a.nonce)),
		a.cred.option(),
		func(o *nats.Options) error { o.Secure, o.TLSConfig = a.cfg.TLS, tlsConfig; return nil },
		nats.CustomInboxPrefix(schemas.InboxPrefix(a.ref)),
		nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(),
		nats.IgnoreDiscoveredServers(), nats.SkipHostLookup(), nats.ReconnectBufSize(-1),
		nats.Timeout(connectTimeout), nats.PingInterval(pingInterval), nats.MaxPingsOutstanding(maxPings),
		nats.CustomReconnectDelay(retry.delay),
		nats.ConnectHandler(up), nats.ReconnectHandler(up),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) {
			text, hint := explainLink(err)
			a.log.Warn("can't reach the control plane; trying again", "addr", a.addrsText(), "error", text, "hint", hint)
		}),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err == nil {
				err = errors.New("closed")
			}
			a.log.Warn("the link to the control plane is down", "error", err)
		}),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			subject := ""
			if sub != nil {
				subject = sub.Subject
			}
			a.log.Warn("bus error", "error", err, "subject", subject)
		}),
	)
	if err != nil {
		return configError("connect to %s: %v", a.addrsText(), err)
	}
	a.conn = bus.NewConn(nc)
	return nil
}

// keepEnrolled says hello whenever the link is new or the control plane asks for it.
func (a *Agent) keepEnrolled(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.linkUp:
		case <-a.rehello:
		}
		accepted, err := backoff.Retry(ctx, func() (*runbusv1.EnrollmentAccepted, error) {
			answer, err := a.hello(ctx)
			var exit *ExitError
			if errors.As(err, &exit) {
				return nil, backoff.Permanent(err)
			}
			if err != nil && ctx.Err() == nil {
				a.log.Warn("enrolment did not succeed; trying again", "error", err)
			}
			return answer, err
		}, backoff.WithBackOff(newRetry().policy()), backoff.WithMaxElapsedTime(0))
		if err != nil {
			return err
		}
		if err := a.begin(accepted); err != nil {
			a.log.Warn("can't begin the session; the link is made anew", "error", err)
			_ = a.conn.NATS().ForceReconnect()
		}
	}
}

// hello says it once. An error of ExitRefused is final, any other may heal.
func (a *Agent) hello(ctx context.Context) (*runbusv1.EnrollmentAccepted, error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	// Whatever is half sent on a new link goes out first, or the request waits behind it (DESIGN, "One bus").
	if err := a.conn.NATS().FlushWithContext(ctx); err != nil {
		return nil, fmt.Errorf("flush: %w", err)
	}
	h := &runbusv1.RunnerHello{
		RunnerId: a.ref.Runner, Name: a.cfg.Name, Version: a.cfg.Version,
		Capabilities: capabilities(), LoadScore: a.works.load(), Limit: int32(a.cfg.Concurrency), //nolint:gosec // at most 10000
		ProcessNonce: a.nonce, Pid: a.pid(), SealingKey: a.key.Public(),
		RunningDispatches: a.works.ids(), Draining: a.works.draining(),
	}
	if s := a.session.Load(); s != nil {
		h.Session = s.id
	}
	if err := a.cred.sign(a.ref, h); err != nil {
		return nil, err
	}
	sent := time.Now()
	answer := new(runbusv1.EnrollmentAccepted)
	if err := a.conn.Request(ctx, schemas.HelloSubject(a.ref), h, answer); err != nil {
		if errors.Is(err, bus.ErrNoResponders) {
			return nil, errors.New("no control plane answers hellos at that address yet")
		}
		return nil, fmt.Errorf("hello: %w", err)
	}
	if err := schemas.FromDetail(answer.GetError()); err != nil {
		switch {
		case schemas.CodeOf(err) == schemas.CodeReplaced:
			return nil, &ExitError{Code: ExitReplaced, Err: err}
		case answer.GetFatal():
			return nil, &ExitError{Code: ExitRefused, Err: err}
		}
		return nil, err
	}
	a.clock.adjust(answer.GetServerTime().AsTime(), sent, time.Now())
	return answer, nil
}

// begin subscribes what the session brings and reports once: only then is the runner dispatchable (DESIGN, "Sessions").
func (a *Agent) begin(accepted *runbusv1.EnrollmentAccepted) error {
	s := &session{id: accepted.GetSession(), heartbeat: heartbeatEvery}
	if n := accepted.GetHeartbeatIntervalSeconds(); n > 0 {
		s.heartbeat = time.Duration(n) * time.Second
	}
	if old := a.session.Load(); old != nil && old.id == s.id {
		s.subs = old.subs // nats.go has subscribed them again
	} else {
		if old != nil {
			for _, sub := range old.subs {
				_ = sub.Unsubscribe()
			}
		}
		for subject, handle := range map[string]nats.MsgHandler{
			schemas.WorkSubject(a.ref, s.id):    a.works.receive,
			schemas.ControlSubject(a.ref, s.id): a.obey,
		} {
			sub, err := a.conn.Subscribe(subject, handle)
			if err != nil {
				return fmt.Errorf("subscribe: %w", err)
			}
			s.subs = append(s.subs, sub)
		}
	}
	a.session.Store(s)
	if err := a.conn.NATS().FlushTimeout(helloTimeout); err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	a.report()
	a.senders.Resume()
	a.log.Info("enrolled", "runner", accepted.GetRunnerId(), "tenant", accepted.GetTenantId(), "heartbeat", s.heartbeat)
	if a.cfg.OnEnrolled != nil {
		a.cfg.OnEnrolled(Enrolled{RunnerID: a.ref.Runner, TenantID: accepted.GetTenantId(), Session: s.id, PID: int(a.pid())})
	}
	return nil
}

// keepReporting sends the heartbeat of the current session.
func (a *Agent) keepReporting(ctx context.Context) error {
	for {
		every := heartbeatEvery
		if s := a.session.Load(); s != nil {
			every = s.heartbeat
		}
		timer := time.NewTimer(every)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
			a.report()
		}
	}
}

// report sends one heartbeat. One that is lost is made good by the next.
func (a *Agent) report() {
	s := a.session.Load()
	if s == nil || !a.conn.NATS().IsConnected() {
		return
	}
	err := a.conn.Publish(schemas.HeartbeatSubject(a.ref), &runbusv1.RunnerHeartbeat{
		Session: s.id, ProcessNonce: a.nonce, LoadScore: a.works.load(),
		InFlight: int32(a.works.count()), Limit: int32(a.cfg.Concurrency), //nolint:gosec // at most 10000
		Draining: a.works.draining(), SentAt: timestamppb.New(a.clock.now()),
	})
	if err != nil {
		a.log.Warn("heartbeat was not sent", "error", err)
	}
}

func capabilities() []string {
	c := []string{"fetch"}
	for _, kind := range all.Kinds() {
		c = append(c, "source:"+kind)
	}
	return c
}

func (a *Agent) addrsText() string {
	out := make([]string, len(a.cfg.Addrs))
	for i, addr := range a.cfg.Addrs {
		_, out[i], _ = strings.Cut(addr, "://")
	}
	return strings.Join(out, ",")
}

// explainLink says what an error of connecting means and what to do about it.
func explainLink(err error) (text, hint string) {
	text = err.Error()
	switch {
	case errors.Is(err, nats.ErrSecureConnWanted):
		return "the control plane offers no TLS at this address", "check the address; RUNNER_ENROLL_TLS=false would send in the clear and needs a control plane that allows it"
	case strings.Contains(text, "certificate signed by unknown authority"):
		return text, "set RUNNER_ENROLL_CA to the PEM file of the control plane's CA"
	case strings.Contains(text, "certificate is valid for"), strings.Contains(text, "not valid for any names"):
		return text, "dial the control plane under a name that is in its certificate"
	case strings.Contains(text, "expired or is not yet valid"):
		return text, "check the clock of this host, and the control plane's certificate"
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired):
		return text, "the control plane does not know this key, or can't decide now: check RUNNER_ENROLL_TOKEN"
	case strings.Contains(text, "connection refused"):
		return text, "nothing listens there: is the control plane up, and is the port its NATS port?"
	case strings.Contains(text, "no such host"):
		return text, "the name does not resolve on this host"
	}
	return text, ""
}

// retryPolicy spaces attempts: the first within firstRetry, then doubling to slowestRetry, with jitter, for ever.
type retryPolicy struct {
	after func(attempt int) time.Duration
}

func newRetry() retryPolicy {
	return retryPolicy{after: func(attempt int) time.Duration {
		most := min(firstRetry<<min(attempt, 10), slowestRetry)
		return most/4 + rand.N(most*3/4) //nolint:gosec // spreads load, keeps no secret
	}}
}

// delay is for nats.go; attempts counts rounds over all addresses, from 1.
func (r retryPolicy) delay(attempts int) time.Duration { return r.after(attempts - 1) }

func (r retryPolicy) policy() backoff.BackOff { return &retryBackOff{r, 0} }

type retryBackOff struct {
	retry   retryPolicy
	attempt int
}

func (b *retryBackOff) Reset() { b.attempt = 0 }

func (b *retryBackOff) NextBackOff() time.Duration {
	b.attempt++
	return b.retry.after(b.attempt - 1)
}

// clock tells control-plane time by this host's monotonic clock, so that a wrong or moved wall clock here drops no work.
type clock struct{ set atomic.Pointer[clockSetting] }

type clockSetting struct{ server, local time.Time }

// adjust takes the server's time in an answer to a request that was sent and answered at the given local times.
func (c *clock) adjust(server, sent, got time.Time) {
	c.set.Store(&clockSetting{server: server, local: sent.Add(got.Sub(sent) / 2)})
}

// now is the local time until the first adjust.
func (c *clock) now() time.Time {
	s := c.set.Load()
	if s == nil {
		return time.Now()
	}
	return s.server.Add(time.Since(s.local))
}

func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func stack() string { return string(debug.Stack()) }
