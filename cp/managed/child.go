package managed

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// child keeps the managed runner of one tenant running: one process after the other.
type child struct {
	r      *Runners
	tenant string
	ref    schemas.RunnerRef
	log    *slog.Logger
	stop   context.CancelFunc
	ended  chan struct{} // closed when no process is left and none will come

	// Guarded by Runners.mu.
	users   int // fetches
	usedAt  time.Time
	leaving bool

	mu       sync.Mutex
	public   []byte        // of the process's key; nil while there is none
	cameUp   bool          // the process could be given work
	failures int           // in a row
	why      string        // the last one, in words for who wants a fetch
	trouble  chan struct{} // closed between two processes when failures are giveUp or more
	troubled bool          // trouble is closed
}

// giveUp is how many processes in a row must have failed for a fetch to wait no longer for the next.
const giveUp = 3

// keep starts processes until ctx ends. When it returns, none is left.
func (c *child) keep(ctx context.Context) {
	for ctx.Err() == nil {
		began := time.Now()
		c.begin()
		err := c.process(ctx)
		c.r.c.Ended(context.WithoutCancel(ctx), c.tenant)
		if ctx.Err() != nil {
			return
		}
		pause := c.note(err, time.Since(began) >= steady)
		c.log.Warn("the managed runner has ended; it is started again", "error", err, "in", pause)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// begin lets fetches wait for the process that is to come.
func (c *child) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cameUp = false
	if c.troubled {
		c.trouble, c.troubled = make(chan struct{}), false
	}
}

// watch waits until the process can be given work.
func (c *child) watch(ctx context.Context) {
	for {
		changed := c.r.c.Changed()
		if c.r.c.Fit(c.tenant) {
			c.mu.Lock()
			c.cameUp = true
			c.mu.Unlock()
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// note counts a failure, the first one of a row if the process had lasted or come up, and returns the pause that follows.
func (c *child) note(err error, lasted bool) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if lasted || c.cameUp {
		c.failures = 0
	}
	c.why = "it ended"
	var f *failure
	if errors.As(err, &f) {
		c.why = f.what
	}
	if c.failures++; c.failures >= giveUp {
		close(c.trouble)
		c.troubled = true
	}
	most := min(c.r.c.FirstRetry<<min(c.failures, 10), c.r.c.SlowestRetry)
	return most/2 + rand.N(most/2+1) //nolint:gosec // spreads load, keeps no secret
}

func (c *child) failed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.trouble
}

// because is why the last process failed, as the end of a sentence; empty if none has.
func (c *child) because() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.why == "" {
		return ""
	}
	return ": " + c.why + "; the control plane's log says more"
}

// failure is why there is no process: what tenants may know of it, and the rest for the log.
type failure struct {
	what  string
	cause error
}

func (f *failure) Error() string { return f.what + ": " + f.cause.Error() }

func (f *failure) Unwrap() error { return f.cause }

// process runs one process from its start to its end, and returns why it ended; when ctx ends it is stopped, and killed if it does not
// stop.
func (c *child) process(ctx context.Context) error {
	cmd, lifeline, err := c.command()
	if err != nil {
		return err
	}
	defer func() { _ = lifeline.Close() }()
	exited := make(chan struct{})
	var ended error
	started := make(chan error, 1)
	go func() {
		// Linux ends the child when the thread that started it ends, not the process: so this thread lives as long as the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		_ = cmd.ExtraFiles[0].Close() // the child has its own
		started <- err
		if err == nil {
			ended = cmd.Wait()
			close(exited)
		}
	}()
	if err := <-started; err != nil {
		return &failure{"it can't be started", err}
	}
	c.log.Info("the managed runner is started", "pid", cmd.Process.Pid)
	linking, stopLinking := context.WithCancel(context.Background())
	defer stopLinking()
	var links sync.WaitGroup
	var unlinked error
	links.Go(func() { c.watch(linking) })
	links.Go(func() {
		if unlinked = c.serve(linking, lifeline, exited); unlinked != nil {
			_ = cmd.Process.Kill() // it is no runner of ours, or can't be reached any more
		}
	})
	select {
	case <-exited:
	case <-ctx.Done():
		c.end(cmd, exited)
	}
	stopLinking()
	_ = lifeline.Close()
	links.Wait()
	switch {
	case unlinked != nil:
		return &failure{"it does not do what a runner does", unlinked}
	case ended != nil:
		return &failure{"it ended", ended}
	}
	return &failure{"it ended", errors.New("by itself, with status 0")}
}

// end stops the process: it may end its works and say goodbye; what is left after StopWithin is killed.
func (c *child) end(cmd *exec.Cmd, exited <-chan struct{}) {
	_ = cmd.Process.Signal(syscall.SIGTERM) // it may have gone already
	timer := time.NewTimer(c.r.c.StopWithin)
	defer timer.Stop()
	select {
	case <-exited:
		return
	case <-timer.C:
	}
	c.log.Warn("the managed runner did not stop and is killed", "pid", cmd.Process.Pid, "within", c.r.c.StopWithin)
	_ = cmd.Process.Kill()
	<-exited
}

// serve hears the process's greeting, and gives it a link whenever it has none, until it has exited. An error says that it can't be a
// runner.
func (c *child) serve(ctx context.Context, lifeline *link.Lifeline, exited <-chan struct{}) error {
	defer context.AfterFunc(ctx, func() { _ = lifeline.Close() })()
	greeting, err := lifeline.Greeting(time.Now().Add(greetingWithin))
	switch {
	case ctx.Err() != nil, errors.Is(err, io.EOF):
		return nil // its end says more
	case err != nil:
		return fmt.Errorf("no greeting: %w", err)
	case len(greeting.GetPublicKey()) == 0:
		return errors.New("its greeting has no key")
	}
	c.know(greeting.GetPublicKey())
	defer c.know(nil)
	for failed := 0; ctx.Err() == nil; {
		if err := c.link(ctx, lifeline, greeting.GetPublicKey()); err == nil {
			failed = 0
		} else if failed++; failed == deaf {
			return fmt.Errorf("it takes no link: %w", err)
		}
		timer := time.NewTimer(relinkAfter)
		select {
		case <-timer.C:
		case <-exited:
			timer.Stop()
			return nil
		case <-ctx.Done():
			timer.Stop()
		}
	}
	return nil
}

// know makes the key that of the runner.
func (c *child) know(public []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.public = public
}

// link gives the process one link and splices it into the server until it ends.
func (c *child) link(ctx context.Context, lifeline *link.Lifeline, public []byte) error {
	now := time.Now()
	token, err := c.r.c.Sign(auth.LinkIdentity{Ref: c.ref, Fingerprint: fingerprintOf(public)}, c.r.c.ServerID(), now)
	if err != nil {
		return err
	}
	conn, err := lifeline.Hand()
	if err != nil {
		return err
	}
	if err := c.offer(ctx, conn, token, now); err != nil {
		_ = conn.Close()
		return err
	}
	server, err := c.r.c.Server()
	if err != nil {
		_ = conn.Close()
		return err
	}
	err = link.Splice(ctx, conn, server)
	if ctx.Err() == nil {
		c.log.Info("the link of the managed runner has ended", "error", err)
	}
	return nil
}

// offer has the process take the link.
func (c *child) offer(ctx context.Context, conn net.Conn, token string, now time.Time) error {
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	return link.Offer(conn, now.Add(answerWithin), &runbusv1.LinkPreface{
		RunnerId: c.ref.Runner, Tenant: c.ref.Tenant, ServerId: c.r.c.ServerID(), Token: token, ServerTime: timestamppb.New(now), Replica: c.r.c.Replica,
	})
}

// command is the process, not started, and this end of its lifeline.
func (c *child) command() (*exec.Cmd, *link.Lifeline, error) {
	dir, err := c.folder()
	if err != nil {
		return nil, nil, &failure{"its state folder can't be used", err}
	}
	lifeline, file, err := link.NewLifeline()
	if err != nil {
		return nil, nil, &failure{"it can't be started", err}
	}
	command := c.r.c.Command
	cmd := exec.Command(command[0], command[1:]...) //nolint:gosec,noctx // the operator's own; stopped by signals, in order
	cmd.Env = c.environ(dir)
	cmd.ExtraFiles = []*os.File{file}
	cmd.Stderr = c.r.c.Stderr
	cmd.Dir = dir
	bindToParent(cmd)
	return cmd, lifeline, nil
}

// fingerprintOf names a key as a leaf is named: hex SHA-256.
func fingerprintOf(public []byte) string {
	sum := sha256.Sum256(public)
	return hex.EncodeToString(sum[:])
}
