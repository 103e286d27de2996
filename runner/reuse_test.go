package runner

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// until waits until something is true of the works.
func (p *process) until(what string, is func(w *works) bool) {
	p.t.Helper()
	for give := time.Now().Add(patience); ; runtime.Gosched() {
		p.works.mu.Lock()
		ok := is(p.works)
		p.works.mu.Unlock()
		switch {
		case ok:
			return
		case time.Now().After(give):
			p.t.Fatalf("not seen: %s", what)
		}
	}
}

// spare waits until nobody has a work, and returns how many are kept. No work comes afterwards.
func (p *process) spare() (n int) {
	p.t.Helper()
	p.works.pool.close()
	p.works.pool.wait()
	p.until("the end of all works", func(w *works) bool { n = len(w.spare); return len(w.jobs) == 0 })
	return n
}

// telling has each work that its goroutine has done with sent to ran.
func telling(a *Agent, ran chan<- *work) {
	do := a.works.pool.do
	a.works.pool.do = func(w *work, m *workspace) { do(w, m); ran <- w }
}

// kept runs works until the memory of one is kept, and returns it: a process that pauses for 4 ms has sent a work in several frames.
func (p *process) kept(ran <-chan *work) *work {
	p.t.Helper()
	for give := time.Now().Add(patience); time.Now().Before(give); {
		p.assign(wholly).completes()
		job := receive(p.t, ran, "end of a work's goroutine")
		kept := false
		p.until("the acknowledgement", func(w *works) bool { kept = slices.Contains(w.spare, job); return len(w.jobs) == 0 })
		if kept {
			return job
		}
	}
	p.t.Fatal("no work's memory is kept")
	return nil
}

// running is the work that runs under an id.
func (p *process) running(id string) *work {
	p.t.Helper()
	p.works.mu.Lock()
	defer p.works.mu.Unlock()
	job := p.works.job(id)
	if job == nil {
		p.t.Fatalf("%s does not run", id)
	}
	return job
}

// keeper is a connector that keeps all it was given, and may do anything with it when its fetch is over.
type keeper struct {
	kept chan lentAway
	gate *gate
}

type lentAway struct {
	ctx context.Context //nolint:containedctx // it is what is looked at
	env source.Env
	out *source.Output
}

func (*keeper) Kind() string { return "test" }

func (k *keeper) Fetch(ctx context.Context, env source.Env, req source.Request, out *source.Output) error {
	k.kept <- lentAway{ctx, env, out}
	if req.Query == "held" {
		return k.gate.fetch(ctx, req, out)
	}
	return oneRow(out)
}

// What a connector keeps of a work that is over leads to no other work, though that has its memory.
func TestWhatAConnectorKeepsReachesNoOtherWork(t *testing.T) {
	k := &keeper{kept: make(chan lentAway, 1<<16), gate: newGate()}
	ran := make(chan *work, 1<<16)
	cp := newControlPlane(t)
	p := cp.start(t, nil, func(a *Agent) {
		a.find = func(string) (source.Connector, error) { return k, nil }
		telling(a, ran)
	})
	memory := p.kept(ran)
	var old lentAway
	for len(k.kept) > 0 {
		old = receive(t, k.kept, "fetch")
	}
	oldID := dispatchOf(t, old.env.Log)

	next := p.assign(func(m *runbusv1.RunnerWorkAssignment) { wholly(m); m.Request.Query = "held" })
	receive(t, k.gate.started, "fetch")
	now := receive(t, k.kept, "fetch")
	if p.running(next.id) != memory {
		t.Fatal("the memory is not used again")
	}
	if now.out == old.out || now.env.Log == old.env.Log || now.ctx == old.ctx {
		t.Fatal("a connector was lent what another one has")
	}
	if oldID == next.id || dispatchOf(t, old.env.Log) != oldID || dispatchOf(t, now.env.Log) != next.id || old.ctx.Err() == nil || now.ctx.Err() != nil {
		t.Errorf("kept: dispatch %s, context %v; now %s, %v", oldID, old.ctx.Err(), next.id, now.ctx.Err())
	}
	if err := oneRow(old.out); err == nil {
		t.Error("a row of a work that is over was taken")
	}
	old.out.Phase(runbusv1.Phase_PHASE_DONE, "from before")
	old.out.Notice(runbusv1.NoticeCode_NOTICE_CODE_SOURCE, "from before")
	if err := old.out.Close(); err != nil {
		t.Errorf("a second close: %v", err)
	}
	if _, err := old.env.Dial(old.ctx, "tcp", "127.0.0.1:1"); err == nil {
		t.Error("a dial of a work that is over succeeds")
	}
	close(k.gate.open)
	names, result, digest := next.frames(time.Now())
	if strings.Contains(strings.Join(names, " "), "from before") || result.GetResponse().GetRows() != 1 || len(result.GetResponse().GetNotices()) != 0 {
		t.Errorf("frames %q, result %v", names, result)
	}
	if string(result.GetRestXxh3()) != string(digest.XXH3()) {
		t.Error("the checksum is not that of the rows")
	}
}

// dispatchOf is whose log a connector got.
func dispatchOf(t *testing.T, log *slog.Logger) string {
	t.Helper()
	h, ok := log.Handler().(*tagged)
	if !ok {
		t.Fatalf("a log with a %T", log.Handler())
	}
	return h.dispatch
}

// A work that may still be in somebody's hands gives its memory to nobody.
func TestMemoryOfAWorkThatIsHeldIsNoOtherWorks(t *testing.T) {
	for name, c := range map[string]struct {
		seam func(a *Agent)
		run  func(p *process, g *gate)
	}{
		"cancelled": {run: func(p *process, g *gate) {
			c := p.assign(wholly).accepted()
			receive(p.t, g.started, "fetch")
			p.cancel(c.id, schemas.CodeCancelled)
			c.fails(schemas.CodeCancelled)
		}},
		"out of time": {run: func(p *process, _ *gate) {
			c := p.assign(func(m *runbusv1.RunnerWorkAssignment) { wholly(m); m.Deadline = nil })
			c.fails(schemas.CodeDeadline)
		}},
		"refused": {seam: func(a *Agent) { a.cfg.Concurrency = 1 }, run: func(p *process, g *gate) {
			running := p.assign(nil).accepted()
			receive(p.t, g.started, "fetch")
			p.assign(wholly).fails(schemas.CodeRunnerBusy)
			p.until("the end of the refused one", func(w *works) bool { return len(w.jobs) == 1 })
			close(g.open)
			running.completes()
		}},
		"failed": {
			seam: playing(func(context.Context, source.Request, *source.Output) error { return errors.New("disk on fire") }),
			run:  func(p *process, _ *gate) { p.assign(wholly).fails(schemas.CodeFailed) },
		},
		"panicked": {
			seam: playing(func(context.Context, source.Request, *source.Output) error { panic("out of luck") }),
			run:  func(p *process, _ *gate) { p.assign(wholly).fails(schemas.CodeFailed) },
		},
		"in several frames": {run: func(p *process, g *gate) {
			c := p.assign(wholly).accepted() // it has left
			receive(p.t, g.started, "fetch")
			close(g.open)
			c.completes()
		}},
		"without a replica": {
			seam: func(a *Agent) {
				a.times, a.waits.delivery = []bus.Option{bus.OrphanAfter(20 * time.Millisecond)}, 100*time.Millisecond
			},
			run: func(p *process, g *gate) {
				close(g.open)
				p.assign(func(m *runbusv1.RunnerWorkAssignment) { wholly(m); m.Replica = schemas.NewID() })
				receive(p.t, g.started, "fetch")
				p.log.await(p.t, "the result was not acknowledged")
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGate()
			cp := newControlPlane(t)
			p := cp.start(t, nil, func(a *Agent) {
				playing(g.fetch)(a)
				if c.seam != nil {
					c.seam(a)
				}
			})
			c.run(p, g)
			if n := p.spare(); n != 0 {
				t.Errorf("the memory of %d works is kept", n)
			}
		})
	}
}

// A work that time was looked at for has been given to a goroutine of its own: that may come to it when all else has let go.
func TestMemoryOfAWorkThatWasLookedAtIsNoOtherWorks(t *testing.T) {
	cp := newControlPlane(t)
	senders, err := bus.NewSenders(bus.NewConn(cp.RunnerConn(t, edge)), edge)
	must(t, err)
	t.Cleanup(func() { must(t, senders.Close()) })
	a := &Agent{log: slog.New(slog.DiscardHandler), senders: senders}
	a.works = newWorks(a)
	defer a.works.alarm.Stop()
	for name, look := range map[string]func(job *work){
		"not at all":     func(*work) {},
		"for nothing":    func(job *work) { job.look(uptime()) },
		"its result":     func(job *work) { job.keptUntil = 1; job.look(uptime()) },
		"rows that wait": func(job *work) { job.stream.due.Store(1); job.look(uptime()) },
	} {
		job := newWork(a)
		job.begin(&runbusv1.RunnerWorkAssignment{DispatchId: schemas.NewID(), Replica: cp.receivers.Replica()}, bus.Trace{}, time.Now(), nil)
		job.well, job.spent = true, true
		look(job)
		a.works.open.Wait()
		if job.letGo() {
			t.Errorf("%s: the first of two holders is the last", name)
		}
		if got, want := job.letGo(), strings.HasPrefix(name, "not") || strings.HasPrefix(name, "for"); got != want {
			t.Errorf("%s was looked at: its memory may be another one's: %t", name, got)
		}
		job.stop(nil)
	}
}

// Works that come and go as fast as they can, with cancels, orders about those that are over, and credentials for them, each bring their
// own rows: their memory goes round.
func TestWorksThatShareMemoryDoNotMix(t *testing.T) {
	cp := newControlPlane(t)
	p := cp.start(t, func(c *Config) { c.Concurrency = 64; c.Journal = JournalOn }, playing(func(_ context.Context, req source.Request, out *source.Output) error {
		out.Phase(runbusv1.Phase_PHASE_QUERYING, req.Query)
		return oneRow(out)
	}))
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for n := range 50 {
				query, began := schemas.NewID(), time.Now()
				c := p.assign(func(m *runbusv1.RunnerWorkAssignment) { wholly(m); m.Request.Query = query })
				if n%7 == 3 && p.cancel(c.id, schemas.CodeCancelled) == runbusv1.CancelState_CANCEL_STATE_NEVER_STARTED {
					c.Close() // the order overtook it
					continue
				}
				names, result, digest := c.frames(began)
				c.Close()
				switch r := result.GetResponse(); {
				case r == nil:
					if n%7 != 3 || result.GetError().GetCode() != string(schemas.CodeCancelled) {
						t.Errorf("failed: %v", result)
					}
				case strings.Join(names, " ") != "accepted "+query+" chunk result", r.GetRows() != 1, string(result.GetRestXxh3()) != string(digest.XXH3()):
					t.Errorf("%q of the work %s: %v", names, query, result)
				}
				if err := cp.dispatch.Publish(schemas.WorkSubject(edge, p.session), &runbusv1.RunnerWorkCredentials{DispatchId: c.id, Session: p.session}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	callers.Wait()
	for spare, give := 0, time.Now().Add(patience); spare == 0; { // a work that a pause of the process has sent in several frames keeps none
		p.until("the end of all works", func(w *works) bool { spare = len(w.spare); return len(w.jobs) == 0 })
		if time.Now().After(give) {
			t.Fatal("no work's memory is kept")
		}
		if spare == 0 {
			p.assign(wholly).completes()
		}
	}
	made := make(map[*work]bool)
	p.works.mu.Lock()
	defer p.works.mu.Unlock()
	for _, job := range p.works.spare {
		if made[job] || job.id != "" || job.lent != nil || job.ctx != nil {
			t.Fatalf("kept twice, or with what a work has left: %s", job.id)
		}
		made[job] = true
	}
}
