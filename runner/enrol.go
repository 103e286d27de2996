package runner

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/runner/source/all"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	helloTimeout   = 5 * time.Second
	heartbeatEvery = 15 * time.Second // until the control plane says otherwise
)

// session is what one accepted hello gave.
type session struct {
	id        string
	heartbeat time.Duration
	subs      []*nats.Subscription
}

// keepEnrolled says hello whenever the link is new or the control plane asks for it, and again until it is accepted. A link
// that comes back in the meantime doesn't wait for the next try: the grace of running works counts (SPEC D13).
func (a *Agent) keepEnrolled(ctx context.Context) error {
	retry := time.NewTimer(0)
	retry.Stop() // until a try has failed
	failures := 0
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.linkUp:
			failures = 0
		case <-a.rehello:
		case <-retry.C:
		}
		retry.Stop()
		if !a.conn.NATS().IsConnected() {
			continue // the next link says so
		}
		err := a.enrol(ctx)
		var exit *ExitError
		switch {
		case err == nil:
			failures = 0
		case errors.As(err, &exit) || ctx.Err() != nil:
			return err
		default:
			failures++
			wait := a.retry(failures)
			a.log.Warn("enrolment did not succeed; trying again", "error", err, "in", wait)
			retry.Reset(wait)
		}
	}
}

// enrol says hello and begins the session that it brings.
func (a *Agent) enrol(ctx context.Context) error {
	l := a.link.Load()
	accepted, err := a.hello(ctx)
	if err != nil {
		return err
	}
	if l != nil {
		if denied := l.greet(); denied > 0 {
			a.log.Warn("the server refused what this runner subscribed or sent before its hello was accepted", "refusals", denied)
		}
	}
	return a.begin(ctx, accepted)
}

// hello says it once. An error of ExitRefused is final, any other may heal.
func (a *Agent) hello(ctx context.Context) (*runbusv1.EnrollmentAccepted, error) {
	ctx, cancel := context.WithTimeout(ctx, a.waits.hello)
	defer cancel()
	if l := a.link.Load(); l != nil { // no answer comes over another link
		defer context.AfterFunc(l, cancel)()
	}
	// Whatever is half sent on a new link goes out first, or the request waits behind it (DESIGN, "One bus").
	if err := a.conn.NATS().FlushWithContext(ctx); err != nil {
		return nil, fmt.Errorf("flush: %w", err)
	}
	h := &runbusv1.RunnerHello{
		RunnerId: a.ref.Runner, Name: a.cfg.Name, Version: a.cfg.Version,
		Capabilities: capabilities(), LoadScore: a.works.load(), Limit: int32(a.cfg.Concurrency),
		ProcessNonce: a.nonce, Pid: a.pid(), SealingKey: a.key.Public(),
		RunningDispatches: a.works.runningIDs(), Draining: a.works.draining(), Policy: a.statement(),
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
		var said *schemas.Error
		switch {
		case errors.As(err, &said) && said.Code == schemas.CodeReplaced:
			return nil, a.replaced(said)
		case answer.GetFatal(): // told here, before the end of the process is
			a.log.Error("the control plane refuses this runner for good", "reason", err, "hint", answer.GetError().GetHint())
			return nil, &ExitError{Code: ExitRefused, Err: err}
		}
		return nil, err
	}
	if answer.GetSession() == "" {
		return nil, errors.New("hello: the answer brings no session")
	}
	if at := answer.GetServerTime(); at != nil {
		a.clock.adjust(at.AsTime(), sent, time.Now())
	}
	return answer, nil
}

// begin subscribes what the session brings and reports once: only then is the runner dispatchable (DESIGN, "Sessions").
func (a *Agent) begin(ctx context.Context, accepted *runbusv1.EnrollmentAccepted) error {
	if a.senders == nil { // not before: who is refused may not subscribe credit, and a person's session has no tenant to do it in
		senders, err := bus.NewSenders(a.conn, a.ref, a.times...)
		if err != nil {
			return fmt.Errorf("subscribe credit: %w", err)
		}
		a.senders = senders
	}
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
	ctx, cancel := context.WithTimeout(ctx, a.waits.hello)
	defer cancel()
	if err := a.conn.NATS().FlushWithContext(ctx); err != nil {
		return fmt.Errorf("begin the session: flush: %w", err)
	}
	a.report()
	signal(a.began)
	a.senders.Resume()
	a.log.Info("enrolled", "runner", accepted.GetRunnerId(), "tenant", accepted.GetTenantId(), "heartbeat", s.heartbeat)
	if a.cfg.OnEnrolled != nil {
		a.cfg.OnEnrolled(Enrolled{RunnerID: a.ref.Runner, TenantID: accepted.GetTenantId(), Session: s.id, PID: int(a.pid())})
	}
	return nil
}

// keepReporting sends the heartbeat of the current session, and looks whether this host has slept since the one before.
func (a *Agent) keepReporting(ctx context.Context) error {
	var leaps leaps
	leaps.next(a.clocks())
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
		case <-a.began: // it has reported, and may have another interval
			timer.Stop()
		case <-timer.C:
			if leap := leaps.next(a.clocks()); leap.Abs() > mostLeap {
				a.log.Info("this host has slept, or its clock was set: the control plane is asked for its time", "by", leap)
				signal(a.doubt)
			}
			a.report()
		}
	}
}

// report sends one heartbeat. One that is lost is made good by the next. Of two, the one with the higher number says what is newer.
func (a *Agent) report() {
	a.reporting.Lock()
	defer a.reporting.Unlock()
	s := a.session.Load()
	if s == nil || !a.conn.NATS().IsConnected() {
		return
	}
	a.beats++
	err := a.conn.Publish(schemas.HeartbeatSubject(a.ref), &runbusv1.RunnerHeartbeat{
		Session: s.id, ProcessNonce: a.nonce, LoadScore: a.works.load(),
		InFlight: int32(a.works.count()), Limit: int32(a.cfg.Concurrency),
		Draining: a.works.draining(), SentAt: timestamppb.New(a.clock.now()), Number: a.beats,
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
	return append(c, bus.CapabilityAssignments, bus.CapabilityXXH3, bus.CapabilityChunksTell, bus.CapabilityWhole, bus.CapabilitySettled)
}

func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func stack() string { return string(debug.Stack()) }
