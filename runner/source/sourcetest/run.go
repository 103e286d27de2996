package sourcetest

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/org-runink/runbus/runner/source"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// network is the dial hook of a fetch, watched.
type network struct {
	dial   func(ctx context.Context, network, addr string) (net.Conn, error)
	dialed atomic.Int64
	open   atomic.Int64
	closed chan struct{} // told of each close, as far as somebody waits
}

// patience bounds every wait for an event: it is only used up by what fails.
const patience = time.Minute

// wait returns the number of connections that stay open. A fetch may end before them: net/http closes them behind its caller's back.
func (n *network) wait() int64 {
	late := time.NewTimer(patience)
	defer late.Stop()
	for n.open.Load() != 0 {
		select {
		case <-n.closed:
		case <-late.C:
			return n.open.Load()
		}
	}
	return 0
}

func (n *network) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	n.dialed.Add(1)
	conn, err := n.dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	n.open.Add(1)
	return &watchedConn{Conn: conn, closed: sync.OnceFunc(func() {
		n.open.Add(-1)
		select {
		case n.closed <- struct{}{}:
		default:
		}
	})}, nil
}

type watchedConn struct {
	net.Conn
	closed func()
}

func (c *watchedConn) Close() error {
	defer c.closed()
	return c.Conn.Close()
}

// fetch is one fetch of the suite and what came of it.
type fetch struct {
	env    source.Env
	net    *network
	memory *memory.CheckedAllocator
	log    *lockedBuffer
	limits source.Limits
	stream bytes.Buffer
	writer io.Writer // nil: stream
	phase  func(runbusv1.Phase)

	phases []runbusv1.Phase
	out    *source.Output
}

// fetch prepares a fetch with the fixture's environment.
func (f *Fixture) fetch() *fetch {
	r := &fetch{env: f.Env, net: &network{dial: source.GuardedDial(nil), closed: make(chan struct{}, 1)}, memory: memory.NewCheckedAllocator(memory.NewGoAllocator()), log: &lockedBuffer{}}
	r.env.Dial, r.env.Memory = r.net.Dial, r.memory
	r.env.Log = slog.New(slog.NewTextHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	return r
}

// run fetches, and checks what holds for every fetch, however it ends: nothing is left behind, no secret is shown, phases go
// forward.
func (r *fetch) run(ctx context.Context, t *testing.T, c source.Connector, req source.Request) error {
	t.Helper()
	w := r.writer
	if w == nil {
		w = &r.stream
	}
	r.out = source.NewOutput(w, r.limits, func(p runbusv1.Phase, _ string, _, _ int64) {
		r.phases = append(r.phases, p)
		if r.phase != nil {
			r.phase(p)
		}
	})
	err := c.Fetch(ctx, r.env, req, r.out)
	if open := r.net.wait(); open != 0 {
		t.Errorf("%d connections stay open after the fetch", open)
	}
	r.memory.AssertSize(t, 0)
	shown := r.log.String()
	if err != nil {
		shown += fmt.Sprintf(" %v %+v %#v", err, err, err)
	}
	var shownSb122 strings.Builder
	for _, n := range r.out.Notices() {
		shownSb122.WriteString(" " + n.GetMessage())
	}
	shown += shownSb122.String()
	for name, secret := range req.Secrets {
		if len(secret) >= 4 && strings.Contains(shown, secret) {
			t.Errorf("the secret %q is shown", name)
		}
	}
	for i, p := range r.phases[min(1, len(r.phases)):] {
		if p < r.phases[i] {
			t.Errorf("the phase goes back from %s to %s", r.phases[i], p)
		}
	}
	return err
}

// result fetches what must succeed and reads the stream back.
func (r *fetch) result(t *testing.T, c source.Connector, req source.Request) (schema, rows []string) {
	t.Helper()
	if err := r.run(t.Context(), t, c, req); err != nil {
		t.Fatalf("fetch: %v", err)
	}
	if err := r.out.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	return r.decode(t)
}

func (r *fetch) decode(t *testing.T) (schema, rows []string) {
	t.Helper()
	mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
	defer mem.AssertSize(t, 0)
	reader, err := ipc.NewReader(&r.stream, ipc.WithAllocator(mem))
	if err != nil {
		t.Fatalf("the stream has no schema: %v", err)
	}
	defer reader.Release()
	for _, f := range reader.Schema().Fields() {
		schema = append(schema, f.Name+": "+f.Type.String())
	}
	for reader.Next() {
		rows = append(rows, Text(reader.RecordBatch())...)
	}
	if err := reader.Err(); err != nil {
		t.Fatalf("the stream is damaged: %v", err)
	}
	if int64(len(rows)) != r.out.Rows() {
		t.Errorf("the stream has %d rows, the output says %d", len(rows), r.out.Rows())
	}
	return schema, rows
}

// Text is one line a row: each value as Arrow writes it (array.ValueStr; a NULL is `NULL`), joined by ` | `.
func Text(batch arrow.RecordBatch) []string {
	rows := make([]string, batch.NumRows())
	for i := range rows {
		values := make([]string, batch.NumCols())
		for j, col := range batch.Columns() {
			values[j] = value(col, i)
		}
		rows[i] = strings.Join(values, " | ")
	}
	return rows
}

func value(col arrow.Array, i int) string {
	if col.IsNull(i) {
		return "NULL"
	}
	if b, ok := col.(*array.Binary); ok {
		return fmt.Sprintf("x%X", b.Value(i))
	}
	return col.ValueStr(i)
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
