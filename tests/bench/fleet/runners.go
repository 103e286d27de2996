package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
	"github.com/org-runink/runbus/tests/bench/proc"
)

const (
	runnersRole = "runners"
	setupFile   = "BENCH_FLEET"
)

// setup is what the process of the runners is told.
type setup struct {
	Addr   string   `json:"addr"`
	CA     string   `json:"ca"`
	Dir    string   `json:"dir"`
	Tokens []string `json:"tokens"` // one of a site: runner i has number i modulo their number
	Count  int      `json:"count"`
}

func (s setup) token(i int) string { return s.Tokens[i%len(s.Tokens)] }

func runnerName(i int) string { return fmt.Sprintf("edge-%05d", i) }

// agents is the fleet in its process: the product's runner.Agent, whole, as often as there are runners.
type agents struct {
	setup setup
	all   []*runner.Agent
	warn  counter

	slots   chan struct{} // one taken by each runner that has not been enrolled yet
	beaters []beater

	mu       sync.Mutex
	began    time.Time         // of what is timed now
	back     []bool            // enrolled since
	at       []time.Duration   // when, in order
	sessions []string          // the newest of each
	ended    map[string]string // runners whose Run has returned, and why
	changed  chan struct{}
}

// serveRunners is the child.
func serveRunners() error {
	body, err := os.ReadFile(os.Getenv(setupFile)) //nolint:gosec // its parent says where
	if err != nil {
		return err
	}
	a := &agents{ended: map[string]string{}, changed: make(chan struct{})}
	if err := json.Unmarshal(body, &a.setup); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	if err := a.make(); err != nil {
		return err
	}
	return proc.Serve(nil, map[string]proc.Command{
		"connect": func(arg string) (any, error) {
			var together int
			if _, err := fmt.Sscan(arg, &together); err != nil {
				return nil, err
			}
			return a.connect(ctx, &running, together)
		},
		"mark":  func(string) (any, error) { a.mark(); return nil, nil },
		"await": func(arg string) (any, error) { return a.await(arg) },
		"beaters": func(arg string) (any, error) {
			var n int
			if _, err := fmt.Sscan(arg, &n); err != nil {
				return nil, err
			}
			return nil, a.openBeaters(n)
		},
		"beat": func(string) (any, error) { return a.beat() },
	})
}

// make constructs every runner; nothing is dialled.
func (a *agents) make() error {
	n := a.setup.Count
	a.back, a.sessions = make([]bool, n), make([]string, n)
	log := slog.New(&a.warn)
	for i := range n {
		one, err := runner.New(runner.Config{
			Addrs: []string{a.setup.Addr}, Token: a.setup.token(i), ID: runnerName(i), TLS: true, CA: a.setup.CA,
			StateDir: filepath.Join(a.setup.Dir, runnerName(i)), Journal: runner.JournalOff, Log: log,
			OnEnrolled: func(e runner.Enrolled) { a.enrolled(i, e) },
		})
		if err != nil {
			return err
		}
		a.all = append(a.all, one)
	}
	return nil
}

// connect starts all runners, at most so many under way at once, and waits until all are enrolled.
func (a *agents) connect(ctx context.Context, running *sync.WaitGroup, together int) (outcome, error) {
	a.mark()
	a.slots = make(chan struct{}, together)
	for i, one := range a.all {
		select {
		case a.slots <- struct{}{}:
		case <-time.After(5 * time.Minute):
			return a.outcome(), errors.New("the runners do not get in")
		}
		running.Go(func() {
			err := one.Run(ctx)
			if ctx.Err() == nil {
				a.end(i, err)
			}
		})
	}
	return a.await("1 5m")
}

// mark begins to count who enrols, and to take the time.
func (a *agents) mark() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.began, a.at = time.Now(), nil
	clear(a.back)
	a.warn.reset()
}

func (a *agents) enrolled(i int, e runner.Enrolled) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.sessions[i] == "" {
		<-a.slots
	}
	a.sessions[i] = e.Session
	if !a.back[i] {
		a.back[i] = true
		a.at = append(a.at, time.Since(a.began))
	}
	a.signal()
}

func (a *agents) end(i int, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.sessions[i] == "" {
		<-a.slots
	}
	a.ended[runnerName(i)] = fmt.Sprint(err)
	a.signal()
}

// signal wakes who waits. The lock is held.
func (a *agents) signal() {
	close(a.changed)
	a.changed = make(chan struct{})
}

// wait returns when is holds, asked under the lock, or ctx ends.
func (a *agents) wait(ctx context.Context, is func() bool) {
	for {
		a.mu.Lock()
		ok, changed := is(), a.changed
		a.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// outcome is what became of the fleet since mark.
type outcome struct {
	Enrolled int           `json:"enrolled"`
	Half     time.Duration `json:"half"`   // until half were
	Most     time.Duration `json:"most"`   // until 99 % were
	All      time.Duration `json:"all"`    // until the last was
	Closed   []string      `json:"closed"` // runners that have ended, with their reasons
	Warnings int           `json:"warnings"`
}

func (a *agents) outcome() outcome {
	a.mu.Lock()
	defer a.mu.Unlock()
	o := outcome{Enrolled: len(a.at), Warnings: a.warn.count()}
	after := func(part float64) time.Duration {
		if n := int(part * float64(len(a.all))); n > 0 && len(a.at) >= n {
			return a.at[n-1]
		}
		return 0
	}
	o.Half, o.Most, o.All = after(0.5), after(0.99), after(1)
	for id, why := range a.ended {
		o.Closed = append(o.Closed, id+": "+why)
	}
	return o
}

// await waits until a part of the fleet is enrolled, for so long at most: "0.99 60s".
func (a *agents) await(arg string) (outcome, error) {
	var part float64
	var limit string
	if _, err := fmt.Sscan(arg, &part, &limit); err != nil {
		return outcome{}, err
	}
	most, err := time.ParseDuration(limit)
	if err != nil {
		return outcome{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), most)
	defer cancel()
	a.wait(ctx, func() bool { return float64(len(a.at)+len(a.ended)) >= part*float64(len(a.all)) })
	return a.outcome(), nil
}

// beatsEach is how many heartbeats one runner sends in a row: the control plane takes a few of one at once, no more.
const beatsEach = 5

// beater is a second connection of a runner's process, as far as the control plane can see, that sends heartbeats of its session.
type beater struct {
	conn    *bus.Conn
	subject string
	session string
}

// openBeaters connects n of them.
func (a *agents) openBeaters(n int) error {
	for i := range min(n, len(a.all)) {
		token, err := schemas.ParseServiceToken(a.setup.token(i))
		if err != nil {
			return err
		}
		public, err := token.Key.PublicKey()
		if err != nil {
			return err
		}
		nc, err := nats.Connect("tls://"+a.setup.Addr, nats.RootCAs(a.setup.CA), nats.Nkey(public, token.Key.Sign),
			nats.Name(schemas.ConnectName(runnerName(i), schemas.NewID())), nats.PingInterval(time.Minute))
		if err != nil {
			return err
		}
		a.mu.Lock()
		session := a.sessions[i]
		a.mu.Unlock()
		a.beaters = append(a.beaters, beater{
			bus.NewConn(nc), schemas.HeartbeatSubject(schemas.RunnerRef{Tenant: token.Tenant, Runner: runnerName(i)}), session,
		})
	}
	return nil
}

// beat has each beater send some heartbeats, beside those that the runners send, and returns how many it were.
func (a *agents) beat() (int, error) {
	for _, b := range a.beaters {
		for range beatsEach {
			if err := b.conn.Publish(b.subject, &runbusv1.RunnerHeartbeat{
				Session: b.session, Limit: runner.DefaultConcurrency, SentAt: timestamppb.Now(),
			}); err != nil {
				return 0, err
			}
		}
		if err := b.conn.NATS().Flush(); err != nil {
			return 0, err
		}
	}
	return beatsEach * len(a.beaters), nil
}

var numbers = regexp.MustCompile(`[0-9]+`)

// counter is a log that counts warnings and errors, and says each text a few times.
type counter struct {
	mu    sync.Mutex
	n     int
	texts map[string]int
}

func (c *counter) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n = 0
}

func (c *counter) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

func (c *counter) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }

func (c *counter) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "no journal is kept (RUNNER_JOURNAL=off)" {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
	if c.texts == nil {
		c.texts = map[string]int{}
	}
	text := r.Message
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "error" {
			text += ": " + numbers.ReplaceAllString(a.Value.String(), "#")
		}
		return true
	})
	if c.texts[text]++; os.Getenv("BENCH_VERBOSE") != "" && c.texts[text] <= 3 && len(c.texts) < 200 {
		fmt.Fprintln(os.Stderr, "runners:", text)
	}
	return nil
}

func (c *counter) WithAttrs([]slog.Attr) slog.Handler { return c }
func (c *counter) WithGroup(string) slog.Handler      { return c }
