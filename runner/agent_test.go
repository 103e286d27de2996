package runner

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// What a runner says of itself, and that its hello verifies.
func TestEnrolment(t *testing.T) {
	cp := newControlPlane(t)
	p := cp.start(t, func(c *Config) { c.Concurrency, c.Version = 7, "v1.2.3" }, nil)
	h := receive(t, cp.hellos, "hello")
	if h.GetRunnerId() != edge.Runner || h.GetName() != "test" || h.GetVersion() != "v1.2.3" || h.GetLimit() != 7 || h.GetPid() != p.pid() ||
		h.GetSession() != "" || h.GetDraining() || h.GetLoadScore() != 0 || len(h.GetSealingKey()) == 0 {
		t.Errorf("hello %v", h)
	}
	if !strings.Contains(strings.Join(h.GetCapabilities(), " "), "fetch source:file") {
		t.Errorf("capabilities %v", h.GetCapabilities())
	}
	token, err := schemas.ParseServiceToken(cp.token)
	must(t, err)
	if err := token.Key.Verify(schemas.HelloSigningInput(edge, h), h.GetSignature()); err != nil {
		t.Errorf("the hello's signature: %v", err)
	}
	for _, text := range []string{schemas.RoleRunnerText, `(runner id "edge.1")`} {
		p.log.await(t, text)
	}
	if strings.Contains(p.log.text(), cp.token[len(cp.token)-30:]) {
		t.Error("the token is in the log")
	}
	p.Drain()
	p.exit(ExitOK)
	if bye := receive(t, cp.goodbyes, "goodbye"); bye.GetSession() != p.session || bye.GetReason() != "drained" || bye.GetProcessNonce() != h.GetProcessNonce() {
		t.Errorf("goodbye %v", bye)
	}
}

// A SIGTERM before there is anybody to talk to ends the process at once.
func TestDrainBeforeEnrolment(t *testing.T) {
	nobody := func(c *Config) { c.Addrs = []string{"127.0.0.1:1"} }
	cp := newControlPlane(t)
	t.Run("nobody there", func(t *testing.T) {
		p := cp.run(t, nobody, nil)
		p.log.await(t, "can't reach the control plane")
		p.Drain()
		p.exit(ExitOK)
	})
	t.Run("before Run", func(t *testing.T) {
		p := cp.run(t, nobody, func(a *Agent) { a.Abort() })
		p.exit(ExitOK)
	})
	t.Run("no answer to the hello", func(t *testing.T) {
		cp.answerWith(func(*runbusv1.RunnerHello) *runbusv1.EnrollmentAccepted { return nil })
		p := cp.run(t, nil, nil)
		receive(t, cp.hellos, "hello")
		p.Drain()
		p.exit(ExitOK)
	})
	none(t, cp.goodbyes, "goodbye without a session")
}

func TestDrainWaitsForRunningWorks(t *testing.T) {
	g := newGate()
	cp := newControlPlane(t)
	p := cp.start(t, nil, playing(g.fetch))
	c := p.assign(nil).accepted()
	receive(t, g.started, "fetch")
	p.Drain()
	b := receive(t, cp.beats, "heartbeat")
	for give := time.Now().Add(patience); !b.GetDraining() && time.Now().Before(give); { // one that time brought before
		b = receive(t, cp.beats, "heartbeat that says so")
	}
	if !b.GetDraining() {
		t.Fatal("no heartbeat says that it drains")
	}
	if b.GetInFlight() != 1 {
		t.Errorf("heartbeat %v", b)
	}
	r := p.assign(nil).fails(schemas.CodeRunnerOffline)
	if r.GetStarted() || r.GetError().GetMessage() != schemas.ErrRunnerOffline(edge.Runner, "draining").Message {
		t.Errorf("refused with %v", r)
	}
	none(t, cp.goodbyes, "goodbye while a work runs")
	none(t, p.ended, "end while a work runs")
	close(g.open)
	c.completes()
	p.exit(ExitOK)
	receive(t, cp.goodbyes, "goodbye")
}

// The ways in which a drain stops a running work: each ends with a result, then a goodbye, then status 0.
func TestDrainStopsRunningWorks(t *testing.T) {
	for name, way := range map[string]struct {
		change func(*Config)
		stop   func(*process)
	}{
		"second signal": {nil, func(p *process) { p.Drain(); p.Abort() }},
		"grace over":    {func(c *Config) { c.DrainGrace = 1 }, func(p *process) { p.Drain() }},
		"order": {nil, func(p *process) {
			p.order(&runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Drain{Drain: &runbusv1.DrainOrder{Grace: durationpb.New(time.Millisecond)}}})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGate()
			cp := newControlPlane(t)
			p := cp.start(t, way.change, playing(g.fetch))
			c := p.assign(nil).accepted()
			receive(t, g.started, "fetch")
			way.stop(p)
			if r := c.fails(schemas.CodeCancelled); r.GetError().GetMessage() != errAborted().Message {
				t.Errorf("%v", r)
			}
			p.exit(ExitOK)
			receive(t, cp.goodbyes, "goodbye")
		})
	}
}

// A work that doesn't stop, and a link that is down, don't keep a drained process for ever.
func TestADrainEndsAnyhow(t *testing.T) {
	stuck := make(chan struct{})
	cp := newControlPlane(t)
	proxy := bustest.NewProxy(t, cp.Addr())
	p := cp.start(t, func(c *Config) { c.Addrs = []string{proxy.Addr()} }, func(a *Agent) {
		a.waits.goodbye = 50 * time.Millisecond
		playing(func(context.Context, source.Request, *source.Output) error {
			<-stuck
			return nil
		})(a)
	})
	p.assign(nil).accepted()
	proxy.Cut(true)
	p.Abort()
	p.exit(ExitOK)
	close(stuck) // its goroutine ends before TestMain looks
}

// Orders that end a process: works are told, the status says why, and there is no goodbye for one that was replaced.
func TestOrdersThatEndTheProcess(t *testing.T) {
	for name, c := range map[string]struct {
		order  *runbusv1.RunnerControl
		status int
		text   string
	}{
		"replaced": {&runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Replaced{Replaced: &runbusv1.ReplacedOrder{Reason: "another one"}}},
			ExitReplaced, "REPLACED: another one"},
		"replaced without a reason": {&runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Replaced{Replaced: &runbusv1.ReplacedOrder{}}},
			ExitReplaced, "REPLACED: another process"},
		"goodbye": {&runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Goodbye{Goodbye: &runbusv1.GoodbyeOrder{Reason: "REVOKED"}}}, ExitOK, ""},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGate()
			cp := newControlPlane(t)
			p := cp.start(t, nil, playing(g.fetch))
			work := p.assign(nil).accepted()
			receive(t, g.started, "fetch")
			p.order(c.order)
			work.fails(schemas.CodeRunnerLost)
			if err := p.exit(c.status); c.text != "" && !strings.Contains(err.Error(), c.text) {
				t.Errorf("ends with %v", err)
			} else if c.status == ExitReplaced && !strings.Contains(hintOf(err), "another RUNNER_ID") {
				t.Errorf("%v does not say what to do: %q", err, hintOf(err))
			}
			none(t, cp.goodbyes, "goodbye")
		})
	}
}

func TestRefusedHellos(t *testing.T) {
	t.Run("fatal", func(t *testing.T) {
		cp := newControlPlane(t)
		cp.refuse(schemas.ErrPersonCannotEnrol(), true)
		p := cp.run(t, nil, nil)
		if err := p.exit(ExitRefused); err.Error() != schemas.ErrPersonCannotEnrol().Message {
			t.Errorf("ends with %v", err)
		}
	})
	t.Run("replaced", func(t *testing.T) {
		cp := newControlPlane(t)
		cp.refuse(schemas.Errorf(schemas.CodeReplaced, "REPLACED"), true)
		if err := cp.run(t, nil, nil).exit(ExitReplaced); err.Error() != "REPLACED" || !strings.Contains(hintOf(err), "another RUNNER_ID") {
			t.Errorf("%v does not say what to do: %q", err, hintOf(err))
		}
	})
	t.Run("may heal", func(t *testing.T) {
		cp := newControlPlane(t)
		cp.refuse(schemas.Errorf(schemas.CodeUnavailable, "an election is under way"), false)
		p := cp.run(t, nil, nil)
		receive(t, cp.hellos, "first hello")
		receive(t, cp.hellos, "second hello")
		p.log.await(t, "an election is under way")
		cp.answerWith(cp.accept)
		receive(t, p.enrolled, "enrolment")
	})
	t.Run("no session in the answer", func(t *testing.T) {
		cp := newControlPlane(t)
		cp.answerWith(func(*runbusv1.RunnerHello) *runbusv1.EnrollmentAccepted { return &runbusv1.EnrollmentAccepted{} })
		cp.run(t, nil, nil).log.await(t, "the answer brings no session")
	})
}

// Another hello of the same process keeps its session and its works; a new session takes the place of the old one.
func TestRehello(t *testing.T) {
	g := newGate()
	cp := newControlPlane(t)
	p := cp.start(t, nil, playing(g.fetch))
	first := receive(t, cp.hellos, "hello")
	c := p.assign(nil).accepted()
	receive(t, g.started, "fetch")
	rehello := func() {
		p.order(&runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Rehello{Rehello: &runbusv1.RehelloOrder{}}})
	}
	rehello()
	second := receive(t, cp.hellos, "second hello")
	if second.GetProcessNonce() != first.GetProcessNonce() || second.GetSession() != p.session || len(second.GetRunningDispatches()) != 1 ||
		second.GetRunningDispatches()[0] != c.id || string(second.GetSealingKey()) != string(first.GetSealingKey()) {
		t.Errorf("second hello %v", second)
	}
	receive(t, p.enrolled, "second enrolment")
	receive(t, cp.beats, "heartbeat of the session")
	close(g.open)
	c.completes()

	old := p.session
	cp.answerWith(func(h *runbusv1.RunnerHello) *runbusv1.EnrollmentAccepted {
		answer := cp.accept(h)
		answer.Session = "fresh"
		return answer
	})
	rehello()
	if e := receive(t, p.enrolled, "third enrolment"); e.Session != "fresh" {
		t.Fatalf("session %q", e.Session)
	}
	for receive(t, cp.beats, "heartbeat of the new session").GetSession() != "fresh" { // behind what time brought of the old one
	}
	p.session = "fresh"
	p.assign(nil).completes()
	p.session = old
	if _, err := p.assign(nil).Next(t.Context()); err == nil || !strings.Contains(err.Error(), "nobody is listening") {
		t.Errorf("somebody listens to the old session: %v", err)
	}
}

// A control plane whose clock is an hour ahead of the runner's host, or behind it, has its assignments run and its deadlines
// kept.
func TestClockOffset(t *testing.T) {
	for _, ahead := range []time.Duration{time.Hour, -time.Hour} {
		g := newGate()
		cp := newControlPlane(t)
		cp.ahead = ahead
		p := cp.start(t, nil, playing(g.fetch))
		c := p.assign(nil)
		f, ok := c.next().(*runbusv1.RunnerWorkAccepted)
		if !ok {
			t.Fatalf("%s ahead: %v instead of an acceptance", ahead, f)
		}
		if off := cp.now().Sub(f.GetAt().AsTime()); off < -time.Minute || off > time.Minute {
			t.Errorf("%s ahead: accepted %s off", ahead, off)
		}
		receive(t, g.started, "fetch")
		p.assign(func(m *runbusv1.RunnerWorkAssignment) {
			m.Deadline = timestamppb.New(cp.now().Add(50 * time.Millisecond))
		}).fails(schemas.CodeDeadline)
		close(g.open)
		c.completes()
	}
}

// A cut link comes back by itself: same process, same session; what ran goes on and delivers, once.
func TestACutLinkIsMended(t *testing.T) {
	g := newGate()
	cp := newControlPlane(t)
	proxy := bustest.NewProxy(t, cp.Addr())
	p := cp.start(t, func(c *Config) { c.Addrs = []string{proxy.Addr()} }, playing(g.fetch))
	first := receive(t, cp.hellos, "hello")
	c := p.assign(nil).accepted()
	receive(t, g.started, "fetch")
	proxy.Cut(true)
	p.log.await(t, "the link to the control plane is down")
	close(g.open) // it ends while there is no link
	p.log.await(t, "work done")
	p.log.await(t, "can't reach the control plane")
	proxy.Cut(false)
	second := receive(t, cp.hellos, "hello over the new link")
	if second.GetProcessNonce() != first.GetProcessNonce() || second.GetSession() != p.session {
		t.Errorf("the new link's hello is %v", second)
	}
	if got := c.completes(); got.GetRows() != 1 {
		t.Errorf("response %v", got)
	}
	p.assign(nil).completes()
	none(t, p.ended, "end of the runner")
}

// A link that comes back while a hello is being retried is used at once: the pause is for a control plane that refuses.
func TestANewLinkDoesNotWaitForTheRetry(t *testing.T) {
	cp := newControlPlane(t)
	proxy := bustest.NewProxy(t, cp.Addr())
	cp.refuse(schemas.Errorf(schemas.CodeUnavailable, "not now"), false)
	p := cp.run(t, func(c *Config) { c.Addrs = []string{proxy.Addr()} }, nil)
	for range 2 {
		receive(t, cp.hellos, "hello")
	}
	cp.answerWith(cp.accept)
	proxy.Cut(false)
	receive(t, cp.hellos, "hello over the new link")
	receive(t, p.enrolled, "enrolment")
}

func TestMoveReconnects(t *testing.T) {
	cp := newControlPlane(t)
	p := cp.start(t, nil, nil)
	receive(t, cp.hellos, "hello")
	must(t, cp.dispatch.Publish(schemas.ControlSubject(edge, p.session), &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Move{Move: &runbusv1.MoveOrder{}}}))
	receive(t, cp.hellos, "hello over the new link")
	if e := receive(t, p.enrolled, "second enrolment"); p.session != e.Session {
		t.Errorf("session %q became %q", p.session, e.Session)
	}
}

func TestHealth(t *testing.T) {
	g := newGate()
	cp := newControlPlane(t)
	p := cp.start(t, func(c *Config) { c.Concurrency = 2 }, playing(g.fetch))
	c := p.assign(nil).accepted()
	h := p.order(&runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Health{Health: &runbusv1.HealthOrder{}}}).GetHealth()
	if h.GetInFlight() != 1 || h.GetLimit() != 2 || h.GetResidentBytes() < 1<<20 || h.GetGoroutines() < 1 || h.GetStartedAt() == nil {
		t.Errorf("health %v", h)
	}
	close(g.open)
	c.completes()
}

// The interval of heartbeats is the control plane's, from the first on.
func TestHeartbeatInterval(t *testing.T) {
	cp := newControlPlane(t)
	cp.answerWith(func(h *runbusv1.RunnerHello) *runbusv1.EnrollmentAccepted {
		answer := cp.accept(h)
		answer.HeartbeatIntervalSeconds = 1
		return answer
	})
	cp.start(t, nil, nil)
	began := time.Now()
	const beats = 3
	for range beats {
		if b := receive(t, cp.beats, "heartbeat"); b.GetLimit() != DefaultConcurrency {
			t.Errorf("heartbeat %v", b)
		}
	}
	if took := time.Since(began); took > (beats-1)*heartbeatEvery { // with the default interval the last one comes later
		t.Errorf("%d intervals of a second took %s", beats, took)
	}
}

func TestACancelledContextEndsTheRunner(t *testing.T) {
	g := newGate()
	cp := newControlPlane(t)
	a := cp.start(t, nil, playing(g.fetch))
	a.Drain()
	a.exit(ExitOK)

	ctx, cancel := context.WithCancel(context.Background())
	b, err := New(Config{Addrs: []string{cp.URL()}, Token: cp.token, ID: edge.Runner, TLS: true, CA: cp.CAFile, StateDir: t.TempDir(), Log: a.Agent.log})
	must(t, err)
	ended := make(chan error, 1)
	go func() { ended <- b.Run(ctx) }()
	for receive(t, cp.beats, "heartbeat").GetProcessNonce() != b.nonce { // behind those of the other one
	}
	cancel()
	if err := receive(t, ended, "end"); !errors.Is(err, context.Canceled) {
		t.Errorf("ends with %v", err)
	}
}

// After the end nothing starts any more.
func TestNothingStartsAfterTheEnd(t *testing.T) {
	g := newGate()
	cp := newControlPlane(t)
	p := cp.start(t, nil, playing(g.fetch))
	p.works.close(errProcessEnds())
	p.assign(nil)
	p.log.await(t, "an assignment came after the end")
	none(t, g.started, "fetch")
}
