package runner

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// wholly asks for all that a replica asks of a runner that knows it.
func wholly(m *runbusv1.RunnerWorkAssignment) {
	m.Bundles, m.Together, m.Xxh3Whole, m.ChunksTell, m.Whole = true, true, true, true, true
}

// frames are the frames of a dispatch to its end, by name, with the messages of its progress, and the checksum that the caller gets. Chunks
// in a row are one if so much time went by since it began that rows may have waited for as long as they may, as in a process that stands still:
// such rows leave before those after them.
func (c *call) frames(began time.Time) (names []string, result *runbusv1.RunnerWorkResult, digest bus.Digest) {
	c.t.Helper()
	digest.Scheme = bus.SchemeOf(c.m)
	for {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		f, err := c.Next(ctx)
		cancel()
		must(c.t, err)
		switch f := f.(type) {
		case *runbusv1.RunnerWorkAccepted:
			names = append(names, "accepted")
		case *runbusv1.RunnerWorkProgress:
			names = append(names, f.GetUpdate().GetMessage())
		case *runbusv1.RunnerWorkChunk:
			if last := len(names) - 1; last < 0 || names[last] != "chunk" || time.Since(began) < flushAfter {
				names = append(names, "chunk")
			}
			digest.Add(f.GetArrowIpc())
		case *runbusv1.RunnerWorkResult:
			c.Done(f)
			return append(names, "result"), f, digest
		}
		c.Done(f)
	}
}

// A small work is one message to a control plane that reads it, with all that it would say otherwise; to another one it never is.
func TestASmallWorkIsOneMessage(t *testing.T) {
	cp := newControlPlane(t)
	p := cp.start(t, func(c *Config) { c.Journal = JournalOn }, playing(func(_ context.Context, _ source.Request, out *source.Output) error {
		out.Phase(runbusv1.Phase_PHASE_QUERYING, "asking")
		return oneRow(out)
	}))
	messages := make(chan *nats.Msg, 1000)
	watcher := cp.Conn(t, embedded.UserDispatch)
	_, err := watcher.ChanSubscribe(schemas.ResultsOf(cp.receivers.Replica()), messages)
	must(t, err)
	must(t, watcher.Flush())
	whole := 0
	for give := time.Now().Add(patience); whole == 0; { // a process that pauses for 4 ms sends what it has
		if time.Now().After(give) {
			t.Fatal("no work was one message")
		}
		began := time.Now()
		names, result, digest := p.assign(wholly).frames(began)
		if got := strings.Join(names, " "); got != "accepted asking chunk result" {
			t.Fatalf("frames %s", got)
		}
		if r := result.GetResponse(); r.GetRows() != 1 || r.GetRunnerPid() != p.pid() || r.GetWireBytes() == 0 || string(result.GetRestXxh3()) != string(digest.XXH3()) {
			t.Fatalf("result %v", result)
		}
		must(t, watcher.Flush())
		for len(messages) > 0 {
			if msg := <-messages; bus.TypeOf(msg) == "RunnerWorkWhole" {
				whole++
			}
		}
	}
	for what, without := range map[string]func(*runbusv1.RunnerWorkAssignment){
		"whole":      func(m *runbusv1.RunnerWorkAssignment) { m.Whole = false },
		"bundles":    func(m *runbusv1.RunnerWorkAssignment) { m.Bundles = false },
		"xxh3_whole": func(m *runbusv1.RunnerWorkAssignment) { m.Xxh3Whole = false },
	} {
		c := p.assign(func(m *runbusv1.RunnerWorkAssignment) { wholly(m); without(m) })
		if names, result, _ := c.frames(time.Now()); names[0] != "accepted" || result.GetSeq() < 4 {
			t.Errorf("without %s: %v, result %v", what, names, result)
		}
		must(t, watcher.Flush())
		for len(messages) > 0 {
			if msg := <-messages; bus.TypeOf(msg) == "RunnerWorkWhole" {
				t.Errorf("without %s it came whole", what)
			}
		}
	}
}

// A work that may leave whole and doesn't says what it has as ever: an acceptance while it runs, a failure, a cancel.
func TestAWorkThatIsNotWholeSaysSo(t *testing.T) {
	cp := newControlPlane(t)
	g := newGate()
	p := cp.start(t, nil, playing(g.fetch))
	running, cancelled := p.assign(wholly).accepted(), p.assign(wholly).accepted()
	for range 2 {
		receive(t, g.started, "start of a fetch")
	}
	if state := p.cancel(cancelled.id, schemas.CodeCancelled); state != runbusv1.CancelState_CANCEL_STATE_STOPPING {
		t.Errorf("the cancel is answered with %v", state)
	}
	cancelled.fails(schemas.CodeCancelled)
	close(g.open)
	running.completes()

	failing := cp.start(t, nil, playing(func(_ context.Context, _ source.Request, out *source.Output) error {
		if err := oneRow(out); err != nil {
			return err
		}
		return errors.New("the disk is gone")
	}))
	if names, result, _ := failing.assign(wholly).frames(time.Now()); names[0] != "accepted" || result.GetError() == nil || !result.GetStarted() {
		t.Errorf("%v, %v", names, result)
	}
}
